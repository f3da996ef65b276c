"""KV events from the live sockets of a simulated engine, read with plain ZMQ and msgpack."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from extproc.sim.fleet import SimFleet
from extproc.sim.settings import EngineSettings, KvEvents, SimSettings
from extproc.sim.tokens import to_ids
from tests.ports import free_port, free_ports

SETTINGS = SimSettings(
    engine=EngineSettings(blocks=65, max_model_len=1000),
    adapters=("tuned",),
    time_factor=20.0,
    control=True,
    kv_events=KvEvents(topic="kv@me@sim"),
)
END = b"\xff" * 8


class Subscriber:
    """A subscriber of one rank, and one who asks it for old batches."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.live = context.socket(zmq.SUB)
        self.live.setsockopt(zmq.SUBSCRIBE, b"")
        self.dealer = context.socket(zmq.DEALER)

    async def batch(self) -> tuple[int, list[Any], int]:
        """Wait for a batch; return number, events and rank."""
        topic, number, payload = await asyncio.wait_for(self.live.recv_multipart(), 10)
        assert topic == b"kv@me@sim"
        assert len(number) == 8
        at, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(at, float)
        return int.from_bytes(number, "big"), events, rank

    async def silent(self) -> bool:
        """Whether nothing comes for a moment."""
        return not await self.live.poll(50)

    async def replay(self, start: int) -> list[list[bytes]]:
        """Ask for all batches from `start` on; return the answers as they come, with the end."""
        await self.dealer.send_multipart([b"", start.to_bytes(8, "big")])
        answers: list[list[bytes]] = []
        while not answers or END not in answers[-1]:
            answers.append(await asyncio.wait_for(self.dealer.recv_multipart(), 10))
        return answers


class Setup:
    """One engine, a client of its HTTP server, and a subscriber a rank that it already knows."""

    def __init__(self, fleet: SimFleet, client: aiohttp.ClientSession, subscribers: list[Subscriber]) -> None:
        self.fleet = fleet
        self.client = client
        self.subscribers = subscribers
        self.one = subscribers[0]

    async def ask(self, prompt: Any = "x" * 400, *, headers: dict[str, str] | None = None, **more: Any) -> Any:
        """Ask for a completion of one token."""
        body = {"model": "sim", "prompt": prompt, "max_tokens": 1} | more
        async with self.client.post("/v1/completions", json=body, headers=headers) as response:
            assert response.status == 200
            return await response.json()

    async def order(self, what: str, **body: Any) -> None:
        """Give the engine an order."""
        async with self.client.post(f"/sim/{what}", json=body) as response:
            assert response.status == 200


@asynccontextmanager
async def started(settings: SimSettings = SETTINGS) -> AsyncIterator[Setup]:
    """An engine whose subscribers have joined."""
    context = zmq.asyncio.Context()
    try:
        async with SimFleet(1, settings) as fleet, aiohttp.ClientSession(f"http://{fleet.addresses[0]}") as client:
            subscribers = []
            for endpoint in fleet.endpoints[0].event_endpoints:
                one = Subscriber(context)
                monitor = one.live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
                one.live.connect(f"tcp://127.0.0.1:{endpoint.port}")
                one.dealer.connect(f"tcp://127.0.0.1:{endpoint.replay_port}")
                await asyncio.wait_for(monitor.recv_multipart(), 10)
                one.live.disable_monitor()
                monitor.close(linger=0)
                # The publisher takes in the subscription with the first it sends after the handshake.
                await asyncio.sleep(0.1)
                subscribers.append(one)
            yield Setup(fleet, client, subscribers)
    finally:
        context.destroy(linger=0)


async def test_batches_are_numbered_from_0_and_tell_of_prompt_and_answer() -> None:
    """Topic, number, `[ts, events, rank]`; chained by the parent; what generated tokens fill is published too."""
    async with started() as setup:
        answer = await setup.ask(max_tokens=29)
        number, events, rank = await setup.one.batch()
        assert (number, rank) == (0, 0)
        (stored,) = events
        assert stored["type"] == "BlockStored"
        assert (stored["parent_block_hash"], stored["block_size"], stored["medium"]) == (None, 16, "GPU")
        assert len(stored["block_hashes"]) == 6
        assert stored["token_ids"] == to_ids(b"x" * 384)
        number, (grown,), _ = await setup.one.batch()
        assert (number, grown["parent_block_hash"]) == (1, stored["block_hashes"][-1])
        text = answer["choices"][0]["text"].encode()
        assert grown["token_ids"] == to_ids((b"x" * 400 + text)[384:448])
        second, _, _ = await setup.one.batch()
        assert second == 2
        assert await setup.one.silent()


async def test_what_is_published_is_what_hits() -> None:
    """A prompt that was published hits all its full blocks, but for its last token."""
    async with started() as setup:
        for prompt in ("a" * 256, "a" * 256, "a" * 640, "b" * 260):
            first = await setup.ask(prompt)
            again = await setup.ask(prompt)
            tokens = first["usage"]["prompt_tokens"]
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (tokens - 1) // 16 * 16


async def test_adapters_and_salts_are_told_of() -> None:
    """Name and number of the adapter with every block, the salt with the first."""
    async with started() as setup:
        await setup.ask(model="tuned", cache_salt="t")
        _, (stored,), _ = await setup.one.batch()
        assert (stored["lora_name"], stored["lora_id"]) == ("tuned", 1)
        assert stored["extra_keys"] == [["tuned", "t"], *[["tuned"]] * 5]


async def test_evictions_of_many_prompts() -> None:
    """A cache of 64 blocks: what is stored less what is removed is what it holds."""
    async with started() as setup:
        held = 0
        for n in range(20):
            await setup.ask(f"{n:02}" * 200)
            _, events, _ = await setup.one.batch()
            held += sum(len(event["block_hashes"]) for event in events if event["type"] == "BlockStored")
            held -= sum(len(event["block_hashes"]) for event in events if event["type"] == "BlockRemoved")
        async with setup.client.get("/sim/state") as response:
            assert (await response.json())["blocks_cached"] == held


async def test_a_cleared_cache_is_published_with_the_next_request() -> None:
    """Idle, the engine says nothing of it."""
    async with started() as setup:
        await setup.ask()
        await setup.one.batch()
        await setup.order("reset_prefix_cache")
        assert await setup.one.silent()
        await setup.ask("z" * 100)
        number, events, _ = await setup.one.batch()
        assert number == 1
        assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored"]


@pytest.mark.parametrize(("profile", "topic"), [("vllm-0.11", 0), ("vllm-0.23", 0), ("vllm-0.33", 1), ("sglang", 0)])
async def test_replay_in_the_framing_of_the_version(profile: str, topic: int) -> None:
    """Every batch from a number on, then number -1; the frame of the topic came with vLLM 0.26."""
    async with started(replace(SETTINGS, profile=profile)) as setup:
        payloads = []
        for n in range(3):
            await setup.ask(f"{n}" * 100)
            payloads.append((await setup.one.live.recv_multipart())[2])
        frames = [[b"", *[b"kv@me@sim"] * topic, n.to_bytes(8, "big"), payloads[n]] for n in (1, 2)]
        assert await setup.one.replay(1) == [*frames, [b"", *[b""] * topic, END, b""]]
        assert await setup.one.replay(9) == [[b"", *[b""] * topic, END, b""]]


async def test_only_the_last_batches_are_replayed() -> None:
    """`buffer_steps`."""
    async with started(replace(SETTINGS, kv_events=KvEvents(topic="kv@me@sim", buffer=2))) as setup:
        for n in range(4):
            await setup.ask(f"{n}" * 100)
            await setup.one.batch()
        assert [frames[2] for frames in (await setup.one.replay(0))[:-1]] == [n.to_bytes(8, "big") for n in (2, 3)]


async def test_what_is_no_replay_request_is_ignored() -> None:
    """Three frames or nothing."""
    async with started() as setup:
        await setup.ask()
        await setup.one.dealer.send_multipart([b"1", b"2", b"3", b"4"])
        await setup.one.dealer.send_multipart([b"alone"])
        assert len(await setup.one.replay(0)) == 2


async def test_lost_batches_leave_a_gap_that_a_replay_fills() -> None:
    """Their numbers are used up; what was to be forgotten is gone for good."""
    async with started() as setup:
        await setup.order("kv_events", drop=1)
        await setup.ask("a" * 100)
        await setup.order("kv_events", drop=1, forget=True)
        await setup.ask("b" * 100)
        await setup.ask("c" * 100)
        assert (await setup.one.batch())[0] == 2
        numbers = [int.from_bytes(frames[2], "big") for frames in (await setup.one.replay(0))[:-1]]
        assert numbers == [0, 2]


async def test_held_batches_go_out_in_order_when_let_go() -> None:
    """Late, but whole."""
    async with started() as setup:
        await setup.order("kv_events", hold=True)
        await setup.ask("a" * 100)
        await setup.ask("b" * 100)
        assert await setup.one.silent()
        await setup.order("kv_events", hold=False)
        assert [(await setup.one.batch())[0] for _ in range(2)] == [0, 1]


async def test_events_cannot_be_disturbed_where_there_are_none() -> None:
    """An order that could not be carried out is refused."""
    async with (
        SimFleet(1, SimSettings(control=True)) as fleet,
        aiohttp.ClientSession(f"http://{fleet.addresses[0]}") as client,
        client.post("/sim/kv_events", json={"drop": 1}) as response,
    ):
        assert response.status == 400


async def test_a_restart_begins_again_at_0_on_the_same_ports() -> None:
    """An empty cache, old batches gone."""
    async with started() as setup:
        before = setup.fleet.endpoints[0].event_endpoints
        for n in range(3):
            await setup.ask(f"{n}" * 100)
            await setup.one.batch()
        await setup.order("restart", down_s=0.05)
        await asyncio.sleep(0.3)
        assert setup.fleet.endpoints[0].event_endpoints == before
        # Until the subscriber is back, batches go past it; each of these prompts makes one.
        for asked in range(50):
            await setup.ask(f"{asked:04}" * 25)
            if await setup.one.live.poll(200):
                break
        number, (stored,), _ = await setup.one.batch()
        assert number == asked
        assert (stored["type"], stored["parent_block_hash"]) == ("BlockStored", None)


async def test_ranks_publish_for_themselves_on_ports_that_follow() -> None:
    """Rank r has port + r, its own numbers from 0, and its number in each batch."""
    async with started(replace(SETTINGS, dp_ranks=3)) as setup:
        ports = [one.port for one in setup.fleet.endpoints[0].event_endpoints]
        assert ports == list(range(ports[0], ports[0] + 3))
        for prompt in ("one" * 50, "other" * 50):
            await setup.ask(prompt, headers={"X-data-parallel-rank": "2"})
        numbers = [await setup.subscribers[2].batch() for _ in range(2)]
        assert [(number, rank) for number, _, rank in numbers] == [(0, 2), (1, 2)]
        assert await setup.subscribers[0].silent()
        assert await setup.subscribers[1].silent()


async def test_the_engine_connects_where_it_is_told_to() -> None:
    """`tcp://host:port` without a star: the subscriber listens, and rank r comes to port + r."""
    first, second = free_ports(2)
    settings = replace(
        SETTINGS,
        dp_ranks=2,
        kv_events=KvEvents(connect=f"tcp://127.0.0.1:{first}", topic="kv@me@sim", replay_port=None),
    )
    context = zmq.asyncio.Context()
    subscribers = [Subscriber(context), Subscriber(context)]
    try:
        for one, port in zip(subscribers, (first, second), strict=True):
            one.live.bind(f"tcp://127.0.0.1:{port}")
        async with SimFleet(1, settings) as fleet, aiohttp.ClientSession(f"http://{fleet.addresses[0]}") as client:
            for rank, one in enumerate(subscribers):
                for _ in range(100):
                    if await one.live.poll(100):
                        break
                    body = {"prompt": "x" * 100, "max_tokens": 1}
                    header = {"x-data-parallel-rank": str(rank)}
                    await (await client.post("/v1/completions", json=body, headers=header)).read()
                    await (await client.post("/sim/reset_prefix_cache", json={})).read()
                assert (await one.batch())[2] == rank
    finally:
        context.destroy(linger=0)


async def test_given_ports_are_used_and_a_taken_one_is_named() -> None:
    """Engines of a fleet take ports that follow each other; a port that is in use ends the start."""
    first, replays = free_port(), free_port()
    settings = replace(SETTINGS, kv_events=KvEvents(port=first, replay_port=replays))
    async with SimFleet(1, settings) as fleet:
        assert fleet.endpoints[0].event_endpoints[0].address == f"tcp://*:{first}"
        assert fleet.endpoints[0].where()["kv_replay"] == [f"tcp://*:{replays}"]
        with pytest.raises(OSError, match=f"ports {first} to {first}"):
            await SimFleet(1, settings).start()


def test_engines_of_a_fleet_have_ports_that_follow_each_other() -> None:
    """Engine n begins after the ranks of the one before; ports that were left open stay so."""
    assert KvEvents(port=5557, replay_port=6557).shifted(4) == KvEvents(port=5561, replay_port=6561)
    assert KvEvents().shifted(4) == KvEvents()
    assert KvEvents(port=5557, replay_port=None).shifted(2) == KvEvents(port=5559, replay_port=None)


async def test_a_fleet_gives_its_engines_ports_in_turn() -> None:
    """Two engines of two ranks: the second's ports follow the first's."""
    first, replays = free_ports(4)[0], free_ports(4)[0]
    settings = replace(SETTINGS, dp_ranks=2, kv_events=KvEvents(port=first, replay_port=replays))
    async with SimFleet(2, settings) as fleet:
        endpoints = [one for engine in fleet.endpoints for one in engine.event_endpoints]
        assert [one.port for one in endpoints] == list(range(first, first + 4))
        assert [one.replay_port for one in endpoints] == list(range(replays, replays + 4))


async def test_kv_event_sources_tells_where_events_are() -> None:
    """As vLLM has it since 0.31: by rank, with the addresses that are listened on; empty without events."""
    async with started(replace(SETTINGS, dp_ranks=2)) as setup:
        ports = setup.fleet.endpoints[0].event_endpoints
        async with setup.client.get("/kv_event_sources") as response:
            sources = await response.json()
        assert list(sources) == ["0", "1"]
        assert sources["1"] == {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{ports[1].port}",
            "replay_endpoint": f"tcp://*:{ports[1].replay_port}",
            "buffer_steps": 10000,
            "hwm": 100000,
            "max_queue_size": 100000,
            "topic": "kv@me@sim",
        }
    async with (
        SimFleet() as fleet,
        aiohttp.ClientSession(f"http://{fleet.addresses[0]}") as client,
        client.get("/kv_event_sources") as response,
    ):
        assert await response.json() == {}


async def test_hashes_of_bytes() -> None:
    """`VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`."""
    async with started(replace(SETTINGS, kv_events=KvEvents(topic="kv@me@sim", int_hashes=False))) as setup:
        await setup.ask()
        _, (stored,), _ = await setup.one.batch()
        assert {type(one) for one in stored["block_hashes"]} == {bytes}
        assert {len(one) for one in stored["block_hashes"]} == {32}


async def test_sglang_publishes_signed_numbers_a_page_each() -> None:
    """One map a page, chained; its ports stand in `/server_info`."""
    async with started(replace(SETTINGS, profile="sglang")) as setup:
        async with setup.client.get("/server_info") as response:
            told = (await response.json())["kv_events"]
        endpoint = setup.fleet.endpoints[0].event_endpoints[0]
        assert told == {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": endpoint.port,
            "topic": "kv@me@sim",
            "block_size": 16,
            "dp_size": 1,
            "replay_endpoint_port_base": endpoint.replay_port,
            "load_endpoint_port_base": None,
            "load_topic": "load",
        }
        await setup.ask()
        _, events, _ = await setup.one.batch()
        assert len(events) == 6
        names = [event["block_hashes"][0] for event in events]
        assert [event["parent_block_hash"] for event in events] == [None, *names[:-1]]
        assert all(-(1 << 63) <= name < 1 << 63 for name in names)

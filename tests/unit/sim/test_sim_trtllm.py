"""The simulated `trtllm-serve`: what it drains, what is stale, what it refuses and how."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from extproc.sim.fleet import SimFleet
from extproc.sim.settings import EngineSettings, KvEvents, SimSettings
from tests.unit.sim.client import settled

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_utilization",
    "kv_cache_max_blocks",
    "kv_cache_free_blocks",
    "kv_cache_used_blocks",
    "kv_cache_tokens_per_block",
    "kv_cache_hit_rate",
    "max_num_active_requests",
    "max_batch_size_runtime",
    "num_context_requests",
    "num_generation_requests",
    "num_paused_requests",
    "num_scheduled_requests",
    "iteration_latency_seconds",
)


@asynccontextmanager
async def started(**settings: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of one server with blocks of 32 tokens, 64 of them to use."""
    given: dict[str, Any] = {
        "engine": EngineSettings(blocks=65, block_size=32),
        "time_factor": 20.0,
        "control": True,
        "kv_events": True,
    } | settings
    async with (
        SimFleet(1, SimSettings(profile="trtllm", **given)) as fleet,
        aiohttp.ClientSession(f"http://{fleet.addresses[0]}") as client,
    ):
        yield client


async def call(client: aiohttp.ClientSession, method: str, path: str, body: Any = None, status: int = 200) -> Any:
    """Ask, and return the JSON that comes with `status`."""
    async with client.request(method, path, json=body) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def ask(client: aiohttp.ClientSession, prompt: Any = "x" * 512, **more: Any) -> Any:
    """Ask for a completion of two tokens."""
    return await call(client, "POST", COMPLETIONS, {"model": "sim", "prompt": prompt, "max_tokens": 2} | more)


async def taken(client: aiohttp.ClientSession) -> list[dict[str, Any]]:
    """Take the events."""
    events: list[dict[str, Any]] = await call(client, "POST", "/kv_cache_events")
    return events


async def page(client: aiohttp.ClientSession) -> dict[str, str]:
    """The samples of the Prometheus page by name and labels."""
    async with client.get("/prometheus/metrics") as response:
        lines = (await response.text()).splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


async def test_records_of_iterations_are_drained() -> None:
    """One a step since the last call; then nothing, however often one asks."""
    async with started() as client:
        assert await call(client, "GET", "/metrics") == []
        await ask(client, max_tokens=5)
        records = await call(client, "GET", "/metrics")
        assert [record["iter"] for record in records] == [1, 2, 3, 4, 5]
        assert await call(client, "GET", "/metrics") == []
        await ask(client, "y" * 640)
        (first, _) = await call(client, "GET", "/metrics")
    assert first["iter"] == 6
    assert (first["numActiveRequests"], first["numQueuedRequests"]) == (1, 0)
    assert first["kvCacheStats"] == {
        "maxNumBlocks": 64,
        "freeNumBlocks": 59,
        "usedNumBlocks": 5,
        "tokensPerBlock": 32,
        "allocTotalBlocks": 9,
        "allocNewBlocks": 9,
        "reusedBlocks": 0,
        "missedBlocks": 9,
        "cacheHitRate": 0.0,
    }
    batch = first["inflightBatchingStats"]
    assert (batch["numContextRequests"], batch["numGenRequests"], batch["numCtxTokens"]) == (1, 0, 160)


async def test_only_the_last_thousand_records_are_kept() -> None:
    """`iter_stats_max_iterations`."""
    async with started() as client:
        await ask(client, "x", max_tokens=1200, ignore_eos=True)
        records = await call(client, "GET", "/metrics")
    assert [records[0]["iter"], len(records)] == [201, 1000]


async def test_events_are_drained_and_numbered_through() -> None:
    """The first tells of the cache's creation; ids go on over calls; nothing comes twice."""
    async with started() as client:
        (created,) = await taken(client)
        assert created == {
            "event_id": 0,
            "data": {"type": "created", "num_blocks_per_cache_level": [64, 0]},
            "window_size": 2048,
            "hash_algo": "v1_block_key",
            "layer_group_id": 0,
        }
        await ask(client, list(range(1, 66)))
        (stored,) = await taken(client)
        assert (stored["event_id"], stored["data"]["type"], stored["data"]["parent_hash"]) == (1, "stored", None)
        blocks = stored["data"]["blocks"]
        # Tokens 1 to 32 and 33 to 64: the vectors of the engine's own hash.
        assert [block["block_hash"] for block in blocks] == [17831341519058834317, 11197498242826443880]
        assert blocks[0]["tokens"][:2] == [
            {"type": "unique_token", "token_id": 1, "token_extra_id": 0},
            {"type": "unique_token", "token_id": 2, "token_extra_id": 0},
        ]
        assert await taken(client) == []
        await ask(client, list(range(1, 100)))
        (more,) = await taken(client)
        assert (more["event_id"], more["data"]["parent_hash"]) == (2, 11197498242826443880)


async def test_a_full_buffer_loses_its_oldest_events() -> None:
    """A gap in the ids is all that tells of it. Nothing is replayed."""
    async with started(kv_events=KvEvents(buffer=2)) as client:
        for n in range(4):
            await ask(client, f"{n}" * 256)
        assert [event["event_id"] for event in await taken(client)] == [3, 4]


async def test_events_can_be_lost_on_order() -> None:
    """Their ids are used up."""
    async with started() as client:
        await taken(client)
        await call(client, "POST", "/sim/kv_events", {"drop": 1})
        for n in range(2):
            await ask(client, f"{n}" * 256)
        assert [event["event_id"] for event in await taken(client)] == [2]


async def test_without_events_the_route_has_none() -> None:
    """`event_buffer_max_size` is 0 unless it is set."""
    async with started(kv_events=False) as client:
        await ask(client)
        assert await taken(client) == []


async def test_evictions_are_told_of() -> None:
    """What is stored less what is removed is what the cache holds."""
    async with started() as client:
        held: set[int] = set()
        for n in range(12):
            await ask(client, f"{n:02}" * 512)
            for event in await taken(client):
                data = event["data"]
                held |= {block["block_hash"] for block in data.get("blocks", ())}
                assert held >= set(data.get("block_hashes", ()))
                held -= set(data.get("block_hashes", ()))
        assert (await settled(client, live=0))["blocks_cached"] == len(held)


async def test_ranks_are_told_apart_in_events() -> None:
    """`attention_dp_rank` is there only with several."""
    async with started(dp_ranks=2) as client:
        for n in range(2):
            await ask(client, f"{n}" * 256)
        assert sorted(event["attention_dp_rank"] for event in await taken(client)) == [0, 0, 1, 1]


async def test_gauges_move_only_when_a_request_completes() -> None:
    """During a long answer they tell of the time before; until the first completion they are not there at all."""
    async with started() as client:
        labels = f'{{model_name="sim",engine_type="trtllm",pid="{os.getpid()}"}}'
        assert not [name for name in await page(client) if "pid=" in name]
        await ask(client)
        before = await page(client)
        assert {f"trtllm_{name}{labels}" for name in GAUGES} <= set(before)
        assert before[f"trtllm_num_requests_running{labels}"] == "0.0"
        assert before[f"trtllm_kv_cache_max_blocks{labels}"] == "64.0"
        assert before[f"trtllm_kv_cache_tokens_per_block{labels}"] == "32.0"
        await call(client, "POST", "/sim/slow", {"factor": 20.0})
        long = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        async with client.post(COMPLETIONS, json=long) as response:
            await response.content.readuntil(b"\n\n")
            assert (await page(client))[f"trtllm_num_requests_running{labels}"] == "0.0"
            await ask(client, "short")
            assert (await page(client))[f"trtllm_num_requests_running{labels}"] == "1.0"


async def test_counters_and_histograms_of_requests() -> None:
    """They count what completed, and carry no process id."""
    async with started() as client:
        for _ in range(2):
            await ask(client)
        values = await page(client)
    labels = 'model_name="sim",engine_type="trtllm"'
    wanted = {
        "prompt_tokens_total": "256.0",
        "prompt_cached_tokens_total": "96.0",
        "generation_tokens_total": "4.0",
        "num_requests_completed_total": "2.0",
        "request_error_total": "0.0",
        "kv_cache_reused_blocks_total": "3.0",
        "time_to_first_token_seconds_count": "2.0",
        "e2e_request_latency_seconds_count": "2.0",
    }
    assert {name: values[f"trtllm_{name}{{{labels}}}"] for name in wanted} == wanted
    assert values[f'trtllm_request_success_total{{{labels},finished_reason="length"}}'] == "2.0"
    assert not [name for name in values if "_created" in name]
    assert all(re.match(r"trtllm_\w+\{", name) for name in values)


async def test_the_small_routes() -> None:
    """Health, version, one card without a context length, and the server's own information."""
    async with started(adapters=("tuned",)) as client:
        async with client.get("/health") as response:
            assert (response.status, await response.read()) == (200, b"")
        async with client.get("/health_generate") as response:
            assert await response.text() == "Generation health check OK"
        assert set(await call(client, "GET", "/version")) == {"version"}
        (card,) = (await call(client, "GET", "/v1/models"))["data"]
        assert set(card) == {"id", "object", "created", "owned_by"}
        assert (card["id"], card["owned_by"]) == ("sim", "tensorrt_llm")
        info = await call(client, "GET", "/server_info")
        assert (info["tokens_per_block"], info["kv_cache_hash_algo"]) == (32, "v1_block_key")
        assert await call(client, "POST", "/_internal/tokenize", {"prompt": "abcdefgh"}) == {
            "count": 2,
            "tokens": [int.from_bytes(b"abcd", "little"), int.from_bytes(b"efgh", "little")],
        }
        for path in ("/v1/load_lora_adapter", "/kv_event_sources", "/tokenize", "/sleep"):
            assert await call(client, "POST", path, {}, 404) == {"detail": "Not Found"}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, "request_id"),
        (CHAT, "session_id"),
        (CHAT, "return_token_ids"),
        (CHAT, "vllm_xargs"),
        (CHAT, "kv_transfer_params"),
        (COMPLETIONS, "cache_salt"),
        (COMPLETIONS, "prompt_token_ids"),
    ],
)
async def test_fields_it_does_not_know_are_refused(path: str, field: str) -> None:
    """`extra="forbid"`: 400 with a text under `error`. Salts are for chats only."""
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    async with started() as client:
        await call(client, "POST", path, prompt | {"max_tokens": 1})
        error = await call(client, "POST", path, prompt | {field: None}, 400)
    assert set(error) == {"error"}
    assert "extra_forbidden" in error["error"]
    assert f"'{field}'" in error["error"]


async def test_every_error_is_a_flat_400() -> None:
    """Whatever is wrong; a prompt that is too long has a code of its own; the model's name is not looked at."""
    async with started() as client:
        long = await call(client, "POST", COMPLETIONS, {"prompt": "x" * 9000}, 400)
        assert set(long) == {"object", "message", "type", "param", "code"}
        assert (long["object"], long["type"], long["code"]) == ("error", "BadRequestError", "context_length_exceeded")
        wrong = await call(client, "POST", COMPLETIONS, {"prompt": "x", "max_tokens": 99_999}, 400)
        assert (wrong["object"], wrong["type"], wrong["code"]) == ("error", "BadRequestError", 400)
        assert "error" in await call(client, "POST", CHAT, {"model": "sim"}, 400)
        assert (await ask(client, "x", model="whatever"))["model"] == "whatever"


@pytest.mark.parametrize(("priority", "status"), [(0, 200), (0.5, 200), (1.0, 200), (5, 400), (-0.1, 400)])
async def test_priorities_are_from_0_to_1(priority: float, status: int) -> None:
    """A share, unlike the whole numbers of the other engines."""
    async with started() as client:
        await call(client, "POST", COMPLETIONS, {"prompt": "x", "max_tokens": 1, "priority": priority}, status)


async def test_there_is_no_end_of_its_queue() -> None:
    """Three hundred at once: all are taken, none is refused."""
    async with started() as client:
        answers = await asyncio.gather(*[ask(client, f"{n}") for n in range(300)])
    assert len(answers) == 300


async def test_adapters_come_with_the_request() -> None:
    """`lora_request`; its number parts the blocks of the adapter from others. A path that is none is refused."""
    async with started() as client:
        adapter = {"lora_name": "a", "lora_int_id": 7, "lora_path": "/adapters/a"}
        prompt = list(range(1, 34))
        plain = [await ask(client, prompt), await ask(client, prompt)]
        tuned = [await ask(client, prompt, lora_request=adapter), await ask(client, prompt, lora_request=adapter)]
        hits = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (*plain, *tuned)]
        assert hits == [0, 32, 0, 32]
        stored = [event["data"]["blocks"][0]["block_hash"] for event in (await taken(client))[1:]]
        assert stored == [17831341519058834317, 15744835200463573885]
        gone = adapter | {"lora_path": "/nonexistent/a"}
        error = await call(client, "POST", COMPLETIONS, {"prompt": "x", "lora_request": gone}, 400)
        assert error["message"] == "lora_path (/nonexistent/a) does not exist."


async def test_a_chat_may_bring_its_token_ids() -> None:
    """`prompt_token_ids` skips the template: the same tokens hit, whatever the messages say."""
    async with started() as client:
        ids = list(range(1, 66))
        body = {"messages": [{"role": "user", "content": "x"}], "prompt_token_ids": ids, "max_tokens": 1}
        first = await call(client, "POST", CHAT, body)
        assert first["usage"]["prompt_tokens"] == 65
        assert (await ask(client, ids))["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}


async def test_a_salt_enters_the_first_block() -> None:
    """By the head of its SHA-256."""
    async with started() as client:
        body = {"messages": [], "prompt_token_ids": list(range(1, 34)), "max_tokens": 1, "cache_salt": "tenant-a"}
        await call(client, "POST", CHAT, body)
        block = (await taken(client))[1]["data"]["blocks"][0]
        assert (block["block_hash"], block["cache_salt"]) == (9967532097703111829, "tenant-a")


async def test_a_restart_begins_its_events_again() -> None:
    """Event 0, an empty cache."""
    async with started() as client:
        await ask(client)
        await call(client, "POST", "/sim/restart", {})
        await asyncio.sleep(0.1)
        assert [event["event_id"] for event in await taken(client)] == [0]
        assert (await ask(client))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

"""Simulated engines of every kind, over real HTTP: found out by their pages, and read as what they are."""

from collections.abc import AsyncIterator
from functools import partial

import aiohttp
import pytest

from extproc.engines.adapter import Reading
from extproc.engines.detect import all_adapters
from extproc.fleet.asking import fetch, new_session
from extproc.fleet.health import Health, after, described, first
from extproc.fleet.reader import Reader
from extproc.sim.fleet import SimFleet
from extproc.sim.settings import KvEvents, SimSettings
from extproc.state.endpoint import EndpointState

VERSIONS = {
    "vllm-0.11": "0.11.2",
    "vllm-0.23": "0.23.0",
    "vllm-0.33": "0.33.0",
    "trtllm": "1.4.0rc4",
    "sglang": "0.5.23",
}
KINDS = {"trtllm": "tensorrt_llm", "sglang": "sglang"}


class Keeper:
    """Reads one engine."""

    def __init__(self, address: str, session: aiohttp.ClientSession) -> None:
        self._fetch = partial(fetch, session, address)
        self._reader = Reader(all_adapters(), "auto")
        self._health: Health = first(address, 0.0)
        self._at = 0.0

    async def read(self) -> EndpointState:
        """Its state after one scrape, and one look at its slow pages."""
        self._at += 1.0
        told = await self._reader.load(self._fetch, self._at)
        assert isinstance(told.outcome, Reading), told
        self._health = after(self._health, told.outcome, 1000.0 + self._at, self._at)
        more = await self._reader.about(self._fetch, self._at, 0.0)
        assert not more.faults
        for about in more.abouts:
            self._health = described(self._health, about)
        return self._health.state


async def ask(session: aiohttp.ClientSession, address: str, **more: object) -> None:
    """One prompt of a few hundred tokens."""
    body = {"model": "sim", "prompt": "one two three " * 200, "max_tokens": 4, **more}
    async with session.post(f"http://{address}/v1/completions", json=body) as answer:
        assert answer.status == 200
        await answer.read()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A client."""
    async with new_session("keeper") as made:
        yield made


@pytest.mark.parametrize("profile", VERSIONS)
async def test_every_kind_is_found_out_and_read(profile: str, session: aiohttp.ClientSession) -> None:
    """Kind, version, model, block size and capacity; an idle engine is idle."""
    async with SimFleet(1, SimSettings(profile=profile)) as engines:
        (address,) = engines.addresses
        keeper = Keeper(address, session)
        await keeper.read()
        await ask(session, address)
        state = await keeper.read()
    assert (state.kind, state.version) == (KINDS.get(profile, "vllm"), VERSIONS[profile])
    assert (state.models, state.adapters, state.block_tokens) == (("sim",), (), 16)
    assert 6000 <= state.kv_blocks <= 6144
    assert (state.running, state.waiting, state.asleep, state.unread) == (0, 0, False, 0)


@pytest.mark.parametrize("profile", ["vllm-0.11", "vllm-0.23", "vllm-0.33", "trtllm"])
async def test_counters_tell_what_was_found_in_the_cache(profile: str, session: aiohttp.ClientSession) -> None:
    """The second of two equal prompts is found but for its last block."""
    async with SimFleet(1, SimSettings(profile=profile)) as engines:
        (address,) = engines.addresses
        keeper = Keeper(address, session)
        await ask(session, address)
        cold = await keeper.read()
        await ask(session, address)
        warm = await keeper.read()
    assert cold.prefix_queries > 0
    assert cold.prefix_hits == 0
    assert warm.prefix_queries == 2 * cold.prefix_queries
    assert 0 < cold.prefix_queries - warm.prefix_hits <= 16
    assert warm.tokens > cold.tokens


@pytest.mark.parametrize("profile", [profile for profile in VERSIONS if profile != "trtllm"])
async def test_adapters_that_are_loaded_are_resident_without_a_request(
    profile: str, session: aiohttp.ClientSession
) -> None:
    """TensorRT-LLM alone does not tell."""
    async with SimFleet(1, SimSettings(profile=profile, adapters=("sql",))) as engines:
        state = await Keeper(engines.addresses[0], session).read()
    assert (state.models, state.adapters, state.active_adapters) == (("sim",), ("sql",), ())


@pytest.mark.parametrize(
    ("profile", "ways"), [("vllm-0.33", ["zmq"]), ("sglang", ["zmq"]), ("trtllm", ["drain"]), ("vllm-0.23", [])]
)
async def test_events_are_found_where_an_engine_tells_of_them(
    profile: str, ways: list[str], session: aiohttp.ClientSession
) -> None:
    """Of vLLM, only versions since 0.31 do."""
    async with SimFleet(1, SimSettings(profile=profile, kv_events=KvEvents())) as engines:
        state = await Keeper(engines.addresses[0], session).read()
    assert [source.way for source in state.sources] == ways
    assert all(source.endpoint for source in state.sources)


@pytest.mark.parametrize("profile", ["vllm-0.11", "vllm-0.33", "sglang"])
async def test_data_parallel_ranks_are_one_endpoint(profile: str, session: aiohttp.ClientSession) -> None:
    """Their caches add up."""
    found = []
    for ranks in (1, 2):
        async with SimFleet(1, SimSettings(profile=profile, dp_ranks=ranks)) as engines:
            keeper = Keeper(engines.addresses[0], session)
            await keeper.read()
            found.append(await keeper.read())
    assert [state.ranks for state in found] == [1, 2]
    assert found[1].kv_blocks == 2 * found[0].kv_blocks


async def test_an_engine_that_was_put_to_sleep_says_so(session: aiohttp.ClientSession) -> None:
    """And says when it is awake again."""
    async with SimFleet(1, SimSettings(profile="vllm-0.33", dev_mode=True)) as engines:
        (address,) = engines.addresses
        keeper = Keeper(address, session)
        asleep = [(await keeper.read()).asleep]
        for path in ("/sleep", "/wake_up"):
            async with session.post(f"http://{address}{path}") as answer:
                assert answer.status == 200
            asleep.append((await keeper.read()).asleep)
    assert asleep == [False, True, False]

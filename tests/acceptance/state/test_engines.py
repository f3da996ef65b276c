"""Engines are read once for all replicas, and what becomes of one is known to all of them."""

import contextlib
import itertools
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from tests.acceptance.journal import Journal
from tests.acceptance.local import POOL, Engine, simulated
from tests.acceptance.routing.asking import decide_chat
from tests.acceptance.state.replicas import Plan, Pools, Replica, Site, site
from tests.acceptance.state.toll import Toll, tolls
from tests.acceptance.state.traffic import Traffic
from tests.ports import free_port
from tests.waiting import until, until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

WATCHED = "watched"
TOLLS = 4
READS = 8
NUMBERS = itertools.count()


class Yard(msgspec.Struct, frozen=True):
    """Two replicas behind an Envoy; one pool of engines, and one of engines that note who reads them."""

    here: Site
    engines: list[Engine]
    watched: list[Toll]

    async def shared_out(self) -> None:
        """Wait until each replica's keeper reads half of the watched engines."""

        async def even() -> bool:
            held = [await one.metric("warmpath_endpoints_held", pool=WATCHED) for one in self.here.replicas]
            return held == [TOLLS / len(held)] * len(held)

        await until_async(even)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def yard(journal: Journal, folder: Path) -> AsyncIterator[Yard]:
    """The site; who joins gets its share of requests at once."""
    async with contextlib.AsyncExitStack() as cleanup:
        others = await cleanup.enter_async_context(simulated(journal, each=3))
        alone = await cleanup.enter_async_context(simulated(journal, arguments=("--port", str(free_port()))))
        watched = await cleanup.enter_async_context(tolls(others[0], TOLLS))
        pools: Pools = {POOL: [*alone, *others], WATCHED: watched}
        sections = {"redis": {"timeout_ms": 2000, "hold_ms": 1000}, "routing": {"ramp_s": 0.0}}
        here = await cleanup.enter_async_context(site(journal, folder, pools, Plan(envoys=[()], sections=sections)))
        yield Yard(here, [*alone, *others], watched)


async def read(watched: Sequence[Toll], times: int) -> None:
    """Wait until each watched engine was read so often from now on."""
    for toll in watched:
        toll.readers.clear()
    await until(lambda: all(len(toll.readers) >= times for toll in watched))


async def test_each_engine_is_read_by_one_keeper_of_the_fleet(yard: Yard) -> None:
    """Two replicas read what one would: every engine has one reader, and each keeper half of the engines."""
    await yard.shared_out()
    await read(yard.watched, READS)
    readers = [set(toll.readers) for toll in yard.watched]
    assert [len(one) for one in readers] == [1] * TOLLS
    assert sorted(Counter(name for one in readers for name in one).values()) == [TOLLS / 2] * 2


async def test_the_engines_of_a_killed_replica_are_read_by_another(yard: Yard) -> None:
    """SIGKILL of a replica: the other one reads all engines, and knows them as they are; later they share again."""
    await yard.shared_out()
    doomed, survivor = yard.here.replicas
    await doomed.kill()
    killed = time.time()
    await read(yard.watched, READS)
    assert len({name for toll in yard.watched for name in toll.readers[-2:]}) == 1
    for toll in yard.watched:
        assert await survivor.metric("warmpath_engine_scraped_at_seconds", endpoint=toll.address) > killed
    await doomed.start()
    await yard.here.well()
    await yard.shared_out()


async def picks(replica: Replica, number: int) -> Counter[str]:
    """Endpoints that a replica picks for so many prompts that nobody has seen."""
    async with replica.as_gateway() as worker:
        return Counter([(await decide_chat(worker, f"prompt {next(NUMBERS)}, " * 30)).endpoint for _ in range(number)])


async def test_a_killed_engine_gets_its_share_again_when_it_is_back(yard: Yard) -> None:
    """SIGKILL of an engine: no replica picks it. It starts again: every replica does, and the gateway follows.

    Requests meanwhile do not fail.
    """
    engine = yard.engines[0]
    for replica in yard.here.replicas:
        assert (await picks(replica, 80))[engine.address] > 0
    engine.process.send(signal.SIGKILL)
    await engine.process.wait()
    async with Traffic(yard.here.fronts, 40.0) as traffic:
        for replica in yard.here.replicas:

            async def avoided(replica: Replica = replica) -> bool:
                return (await picks(replica, 40))[engine.address] == 0

            await until_async(avoided)
        await traffic.answered(40)
        await engine.process.start()
        for replica in yard.here.replicas:

            async def picked(replica: Replica = replica) -> bool:
                return (await picks(replica, 40))[engine.address] > 0

            await until_async(picked)
            assert (await picks(replica, 80))[engine.address] >= 5

        async def serves() -> bool:
            assert (await yard.here.front.chat(f"prompt {next(NUMBERS)}, " * 30)).status == 200
            return await engine.prompt_tokens() > 0

        await until_async(serves)
    await yard.here.books.holds(0)
    await yard.here.well()

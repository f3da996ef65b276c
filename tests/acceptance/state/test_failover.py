"""A store with Sentinel: its master dies under traffic, and the replica that is promoted takes over for all of us."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from tests.acceptance.journal import Journal
from tests.acceptance.local import POOL, simulated
from tests.acceptance.routing.asking import Decided, decide_chat
from tests.acceptance.state.open_requests import finish, held
from tests.acceptance.state.replicas import Plan, Replica, Site, site
from tests.acceptance.state.traffic import Traffic
from tests.sentinels import SentinelFleet
from tests.waiting import until, until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

SESSIONS = 100
OPEN = 10


class Watched(msgspec.Struct, frozen=True):
    """Two replicas behind an Envoy, and a store of a master, its replica and three sentinels."""

    here: Site
    stores: SentinelFleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(journal: Journal, folder: Path) -> AsyncIterator[Watched]:
    """The site."""
    async with contextlib.AsyncExitStack() as cleanup:
        engines = await cleanup.enter_async_context(simulated(journal, each=3))
        stores = SentinelFleet()
        cleanup.push_async_callback(asyncio.to_thread, stores.stop)
        await asyncio.to_thread(stores.start)
        plan = Plan(envoys=[()], sections={"redis": {"timeout_ms": 200, "lease_ms": 3000}}, store_url=stores.url)
        here = await cleanup.enter_async_context(site(journal, folder, {POOL: engines}, plan))
        yield Watched(here, stores)


async def turn(replica: Replica) -> list[Decided]:
    """One more turn of every session at a replica."""
    async with replica.as_gateway() as worker:
        return [await decide_chat(worker, f"session {number}", f"kept-{number}") for number in range(SESSIONS)]


async def test_a_promoted_replica_is_used_without_a_restart(watched: Watched) -> None:
    """SIGKILL of the master: no request fails, decisions are shared again, sessions stay, what is open stays charged.

    Of the sessions, one in twenty may be lost at most: the master may die before its replica has heard of a pin.
    """
    here, stores = watched.here, watched.stores
    first, second = here.replicas
    before = [one.pids() for one in here.replicas]
    async with held(first, OPEN) as streams:
        async with Traffic(here.fronts, 40.0) as traffic:
            at = [one.endpoint for one in await turn(first)]
            await traffic.answered(40)
            master = await asyncio.to_thread(stores.master)
            await asyncio.to_thread(master.kill)
            await until(lambda: stores.promoted(master))
            await traffic.answered(40)
            for replica in here.replicas:
                await until_async(replica.well)
            after = await turn(second)
        assert sum(now.endpoint == then for then, now in zip(at, after, strict=True)) >= 0.95 * SESSIONS
        await here.books.holds(OPEN)
        await finish(streams)
    await here.books.holds(0)
    assert [one.pids() for one in here.replicas] == before

"""The store freezes, is cut off, dies and comes back empty, all under traffic: no request notices."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from tests.acceptance.journal import Journal
from tests.acceptance.local import POOL, Engine, simulated
from tests.acceptance.routing.asking import Decided, decide_chat
from tests.acceptance.state.network import cut
from tests.acceptance.state.open_requests import finish, held
from tests.acceptance.state.replicas import Plan, Replica, Site, site
from tests.acceptance.state.traffic import Traffic
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

RATE = 60.0
TIMEOUT_MS = 100
FAILURES = 3
"""Missed deadlines that open a worker's circuit."""
MORE = 200
"""Requests answered while the store is silent, once every worker knows."""
OPEN = 12
SESSIONS = 60


class Shop(msgspec.Struct, frozen=True):
    """Two replicas behind an Envoy, and four engines."""

    here: Site
    engines: list[Engine]

    @contextlib.asynccontextmanager
    async def traffic(self, still_open: int = 0) -> AsyncIterator[Traffic]:
        """Requests flow within the block; none fails, no process is replaced, and just what is open stays charged."""
        await self.here.well()
        before = [one.pids() for one in self.here.replicas]
        async with Traffic(self.here.fronts, RATE) as traffic:
            await traffic.answered(100)
            yield traffic
        await self.here.books.holds(still_open)
        await self.here.well()
        assert [one.pids() for one in self.here.replicas] == before

    async def alone(self, *, alone: bool) -> None:
        """Wait until every worker decides without the store, or none does."""

        async def so() -> bool:
            told = [await one.metric("warmpath_store_degraded", process="worker-0") for one in self.here.replicas]
            return told == [float(alone)] * len(told)

        await until_async(so)

    async def shared(self, traffic: Traffic) -> None:
        """Wait until decisions are shared again: each replica's grow, and those on a local ledger do not."""
        await self.alone(alone=False)
        for replica in self.here.replicas:

            async def grows(replica: Replica = replica) -> bool:
                local = await replica.metric("warmpath_fallbacks_total", rung="local_ledger")
                decided = await replica.metric("warmpath_decisions_total")
                await traffic.answered(20)
                more = await replica.metric("warmpath_decisions_total") > decided
                return more and await replica.metric("warmpath_fallbacks_total", rung="local_ledger") == local

            await until_async(grows)

    async def waited(self) -> list[float]:
        """By replica, calls of its worker that waited for the store in vain, since its start."""
        name = "warmpath_store_failures_total"
        return [await one.metric(name, kind="slow", process="worker-0") for one in self.here.replicas]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shop(journal: Journal, folder: Path) -> AsyncIterator[Shop]:
    """The site. Its deadline is long enough for a busy machine."""
    async with simulated(journal, each=4) as engines:
        plan = Plan(envoys=[()], sections={"redis": {"timeout_ms": TIMEOUT_MS, "lease_ms": 3000}})
        async with site(journal, folder, {POOL: engines}, plan) as here:
            yield Shop(here, engines)


@contextlib.asynccontextmanager
async def frozen(here: Site) -> AsyncIterator[None]:
    """The store stands still: connections stay open and nothing is answered."""
    here.store.freeze()
    try:
        yield
    finally:
        here.store.thaw()


def cut_off(here: Site) -> AbstractAsyncContextManager[None]:
    """No packet reaches the store, or comes from it."""
    return cut(here.store.port)


@pytest.mark.parametrize("fault", [frozen, cut_off])
async def test_a_silent_store_delays_a_bounded_number_of_decisions(
    shop: Shop, fault: Callable[[Site], AbstractAsyncContextManager[None]]
) -> None:
    """Every worker waits for it a few deadlines long, then no longer; when it speaks again, decisions are shared."""
    async with shop.traffic() as traffic:
        before = await shop.waited()
        async with fault(shop.here):
            await shop.alone(alone=True)
            await traffic.answered(50)  # what was under way when the circuits opened has met its deadline
            first = await shop.waited()
            await traffic.answered(MORE)
            last = await shop.waited()
        await shop.shared(traffic)
    # What still waits are probes, not decisions.
    assert all(now - then <= MORE / 20 for then, now in zip(first, last, strict=True)), (first, last)
    # Per deadline missed: what arrives at the worker within it, and the few calls of its own background work.
    most = FAILURES * (RATE * TIMEOUT_MS / 1000 + 10)
    assert all(0 < now - then <= most for then, now in zip(before, first, strict=True)), (before, first)


async def turns(replica: Replica, after: int) -> list[Decided]:
    """One more turn of each conversation at a replica, `after` so many turns before it."""
    async with replica.as_gateway() as worker:
        return [await decide_chat(worker, _said(number, after), f"active-{number}") for number in range(SESSIONS)]


def _said(number: int, turns_: int) -> str:
    return " ".join(f"turn {turn} of conversation {number}, at some length, " * 30 for turn in range(turns_ + 1))


async def test_a_store_that_comes_back_empty_is_told_what_is_open(shop: Shop) -> None:
    """SIGKILL of the store and a new, empty one: no request fails, and it learns what is in flight, and sessions stay.

    Conversations that were under way stay where they are, whichever replica handles their next turn: all but one in
    twenty at most.
    """
    first, second = shop.here.replicas
    async with held(first, OPEN) as one, held(second, OPEN // 2) as other:
        async with shop.traffic(still_open=len(one)) as traffic:
            at = [each.endpoint for each in await turns(first, 1)]
            await until_async(lambda: _follow(second, at))
            shop.here.store.kill()
            await shop.alone(alone=True)
            await traffic.answered(100)
            await finish(other)
            await asyncio.to_thread(shop.here.store.start)
            await shop.shared(traffic)
            now = [each.endpoint for each in await turns(second, 3)]
            later = [each.endpoint for each in await turns(first, 4)]
        assert sum(map(str.__eq__, at, now)) >= 0.95 * SESSIONS
        assert sum(map(str.__eq__, at, later)) >= 0.95 * SESSIONS
        await finish(one)
    await shop.here.books.holds(0)


async def _follow(replica: Replica, at: list[str]) -> bool:
    """Whether one more turn at another replica finds every conversation where it is."""
    return [each.endpoint for each in await turns(replica, 2)] == at

"""Case B5: pages of load that are late, or fail, cost nobody an answer and no engine its place."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from extproc.sim.workload import text
from extproc.state.endpoint import STALE_AFTER, EndpointState
from tests.acceptance.engines.curtain import Curtain, curtains
from tests.acceptance.engines.stand import Crew, Stand, body_of, crewed, standing
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT
from tests.waiting import until, until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

RNG = random.Random(41)
KINDS = ("vllm-0.33", "sglang", "trtllm")
BURST = 24
LATE_S = 1.0
FOR_GOOD = 1_000_000


class Hall(msgspec.Struct, frozen=True):
    """Two engines of each kind, each behind a curtain that holds its page of load."""

    here: Stand
    curtains: dict[str, list[Curtain]]

    @contextlib.contextmanager
    def drawn(self, pool: str, *, late_s: float = 0.0, failing: int = 0, first: int = 2) -> Iterator[list[Curtain]]:
        """Hold back or fail the pages of a pool's first engines."""
        ones = self.curtains[pool][:first]
        for one in ones:
            one.late_s, one.failing = late_s, failing
        try:
            yield ones
        finally:
            for one in ones:
                one.late_s, one.failing = 0.0, 0

    async def state(self, pool: str, at: int = 0) -> EndpointState:
        """What is published of one engine of a pool."""
        return (await self.here.states(pool))[self.curtains[pool][at].address]

    async def fresh(self, pool: str) -> None:
        """Wait until both engines can be read."""

        async def so() -> bool:
            states = (await self.here.states(pool)).values()
            return len(states) == 2 and all(not one.unread and one.kind for one in states)

        await until_async(so)

    async def burst(self, pool: str) -> Counter[str]:
        """Prompts that nobody has seen, all at once; who answered them. None is refused."""
        refused = (await self.here.page()).total("warmpath_refusals_total")
        bodies = [body_of(pool, text(RNG, 400), max_tokens=30) for _ in range(BURST)]
        before = [curtain.passed for curtain in self.curtains[pool]]
        answers = await asyncio.gather(*(self.here.local.ask(CHAT, body) for body in bodies))
        assert Counter(answer.status for answer in answers) == {200: BURST}
        assert (await self.here.page()).total("warmpath_refusals_total") == refused
        after = [curtain.passed for curtain in self.curtains[pool]]
        return Counter({str(at): now - then for at, (then, now) in enumerate(zip(before, after, strict=True))})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hall(journal: Journal, folder: Path) -> AsyncIterator[Hall]:
    """The stack; an engine that joined has its whole share at once."""
    async with contextlib.AsyncExitStack() as cleanup:
        crews = [Crew(pool=kind, profile=kind, each=2) for kind in KINDS]
        engines = await cleanup.enter_async_context(crewed(journal, crews))
        made = {kind: await cleanup.enter_async_context(curtains(engines[kind])) for kind in KINDS}
        veiled = [
            msgspec.structs.replace(crew, addresses=[curtain.address for curtain in made[crew.pool]]) for crew in crews
        ]
        sections: dict[str, Any] = {"routing": {"ramp_s": 0.0}, "retries": {"max": 0}}
        here = await cleanup.enter_async_context(standing(journal, folder, veiled, engines, **sections))
        for kind in KINDS:
            assert (await here.local.ask(CHAT, body_of(kind, "hello"))).status == 200
        yield Hall(here, made)


@pytest.mark.parametrize("pool", KINDS)
async def test_late_pages_refuse_nobody(hall: Hall, pool: str) -> None:
    """All pages of a pool are a second late: a burst is answered in full, and spread by the fleet's own counts."""
    await hall.fresh(pool)
    with hall.drawn(pool, late_s=LATE_S) as drawn:
        read = [len(one.readers) for one in drawn]
        await until(lambda: all(len(one.readers) > then for one, then in zip(drawn, read, strict=True)))
        served = await hall.burst(pool)
        assert min(served.values()) >= BURST / 4
        states = (await hall.here.states(pool)).values()
        assert all(state.reachable for state in states)
    await hall.fresh(pool)


@pytest.mark.parametrize("pool", KINDS)
async def test_one_failed_scrape_changes_nothing(hall: Hall, pool: str) -> None:
    """One page fails: it is counted, and the engine is neither stale nor gone; the next one is read again."""
    await hall.fresh(pool)

    async def faults() -> float:
        return (await hall.here.keeper_page()).total("warmpath_scrape_faults_total", pool=pool, page="load")

    before = await faults()
    with hall.drawn(pool, failing=1, first=1) as (drawn,):
        await until(lambda: drawn.failing == 0)

        async def counted() -> bool:
            return await faults() > before

        await until_async(counted)
        state = await hall.state(pool)
        assert state.unread <= 1
        assert not state.stale
        assert state.reachable
    await hall.fresh(pool)
    assert await faults() == before + 1


@pytest.mark.parametrize("pool", KINDS)
async def test_three_failed_scrapes_make_an_engine_old_news_and_no_outcast(hall: Hall, pool: str) -> None:
    """One engine's page fails for good: its numbers are stale, it is believed slower, and serves all the same."""
    await hall.fresh(pool)
    with hall.drawn(pool, failing=FOR_GOOD, first=1):

        async def stale() -> bool:
            return (await hall.state(pool)).unread >= STALE_AFTER

        await until_async(stale)
        assert (await hall.state(pool)).reachable
        await hall.here.idle(pool)
        prompt = text(RNG, 2000)

        async def dearer() -> bool:
            first, second = [(await hall.here.expected(pool, prompt))[one.address] for one in hall.curtains[pool]]
            assert not first.dropped
            return first.terms["prefill"] > 1.5 * second.terms["prefill"]

        await until_async(dearer)
        served = await hall.burst(pool)
        assert 0 < served["0"] < served["1"]
    await hall.fresh(pool)


@pytest.mark.parametrize("pool", KINDS)
async def test_a_pool_that_nobody_can_read_serves_by_its_own_counts(hall: Hall, pool: str) -> None:
    """All pages of a pool fail for good: a burst is answered in full, and spread over both engines."""
    await hall.fresh(pool)
    with hall.drawn(pool, failing=FOR_GOOD):

        async def stale() -> bool:
            return all(state.unread >= STALE_AFTER for state in (await hall.here.states(pool)).values())

        await until_async(stale)
        served = await hall.burst(pool)
        assert min(served.values()) >= BURST / 4
    await hall.fresh(pool)

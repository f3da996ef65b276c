"""Case C12: whoever tells token ids is late or fails, and requests are routed all the same."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from extproc.sim.workload import text
from tests.acceptance.engines.curtain import Curtain, curtains
from tests.acceptance.engines.stand import Crew, Stand, crewed, standing
from tests.acceptance.journal import Journal
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

RNG = random.Random(47)
RENDERED, ASKED = "rendered", "asked"
PATHS = {RENDERED: "/v1/chat/completions/render", ASKED: "/tokenize"}
SOURCES = {RENDERED: "render", ASKED: "engine"}
BUDGET_MS = 250.0
SLEEP_S = 5.0
AT_ONCE = 10
FOR_GOOD = 1_000_000


class Desk(msgspec.Struct, frozen=True):
    """A pool that asks a render server, and one that asks its own engine; each behind a curtain."""

    here: Stand
    curtains: dict[str, Curtain]

    async def outcomes(self, pool: str) -> tuple[float, float]:
        """Prompts whose token ids could be had, and those whose could not."""
        page = await self.here.page()
        had = page.total("warmpath_token_prompts_total", pool=pool, outcome="ok")
        return had, page.total("warmpath_token_prompts_total", pool=pool) - had

    async def precise(self, pool: str) -> None:
        """Wait until prompts are matched precisely, and exactly so."""

        async def matched() -> bool:
            return (await self.here.ask(pool, text(RNG, 100))).pick.matched_by == "precise"

        await until_async(matched)
        prompt = text(RNG, 2000)

        async def exact() -> bool:
            await self.here.in_step(pool)
            asked = await self.here.ask(pool, prompt)
            return asked.pick.matched_by == "precise" and asked.predicted == asked.reported > 0

        await until_async(exact)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desk(journal: Journal, folder: Path) -> AsyncIterator[Desk]:
    """The stack. The render server is an engine that nobody else asks anything."""
    async with contextlib.AsyncExitStack() as cleanup:
        arguments = ("--kv-events", "--time-factor", "10")
        crews = [
            Crew(pool=RENDERED, profile="vllm-0.33", arguments=arguments),
            Crew(pool=ASKED, profile="sglang", arguments=arguments),
        ]
        server = Crew(pool="server", profile="vllm-0.33", arguments=("--scale-out", "--model", RENDERED))
        engines = await cleanup.enter_async_context(crewed(journal, [*crews, server]))
        (render,) = await cleanup.enter_async_context(curtains(engines["server"], (PATHS[RENDERED],)))
        (own,) = await cleanup.enter_async_context(curtains(engines[ASKED], (PATHS[ASKED],)))
        tokens = {
            RENDERED: {"source": "render", "url": f"http://{render.address}", "budget_ms": BUDGET_MS},
            ASKED: {"source": "engine", "budget_ms": BUDGET_MS},
        }
        crews = [
            Crew(
                pool=crew.pool,
                profile=crew.profile,
                settings={"profiles": "precise", "tokens": tokens[crew.pool]},
                addresses=[own.address] if crew.pool == ASKED else [],
            )
            for crew in crews
        ]
        here = await cleanup.enter_async_context(standing(journal, folder, crews, engines))
        started = Desk(here, {RENDERED: render, ASKED: own})
        for pool in (RENDERED, ASKED):
            await started.precise(pool)
        yield started


@pytest.mark.parametrize("pool", [RENDERED, ASKED])
@pytest.mark.parametrize("trouble", ["sleeps", "fails"])
async def test_requests_go_on_without_token_ids(desk: Desk, pool: str, trouble: str) -> None:
    """Token ids come five seconds late, or not at all: every request is answered, by estimated profiles, and counted.

    When they come again, profiles are precise again.
    """
    had, had_not = await desk.outcomes(pool)
    curtain = desk.curtains[pool]
    curtain.late_s, curtain.failing = (SLEEP_S, 0) if trouble == "sleeps" else (0.0, FOR_GOOD)
    try:
        asked = await asyncio.gather(*(desk.here.ask(pool, text(RNG, 600)) for _ in range(AT_ONCE)))
        prompt = text(RNG, 2000)
        asked += [await desk.here.ask(pool, prompt), await desk.here.ask(pool, prompt)]
    finally:
        curtain.late_s, curtain.failing = 0.0, 0
    assert {one.pick.matched_by for one in asked} == {"estimated"}
    # The estimated profile goes on beside the precise one: a prompt that comes again is expected where it was.
    assert asked[-1].predicted > 0
    assert asked[-1].reported > 0
    assert await desk.outcomes(pool) == (had, had_not + AT_ONCE + 2)
    assert (await desk.here.page()).total("warmpath_matched_total", pool=pool, rung="estimated") >= AT_ONCE
    await desk.precise(pool)

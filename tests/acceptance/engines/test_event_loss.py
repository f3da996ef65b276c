"""Events that are lost: a replay repairs the profile, or it is given up until all is known; no request fails."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from tests.acceptance.engines.stand import (
    PRECISE,
    RENDERER,
    Crew,
    Stand,
    body_of,
    crewed,
    rendered_by,
    renderer,
    standing,
)
from tests.acceptance.engines.talks import Talks, line, worst
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

REPLAYED, SILENT, DRAINED = "replayed", "silent", "drained"
BLOCKS = 201
AUTO = {**PRECISE, "profiles": "auto"}
ARGUMENTS = ("--kv-events", "--blocks", str(BLOCKS), "--time-factor", "20")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(journal: Journal, folder: Path) -> AsyncIterator[Stand]:
    """An engine that replays its events, one that does not, and one whose events are taken out by reading."""
    crews = [
        Crew(pool=REPLAYED, profile="vllm-0.33", arguments=ARGUMENTS, settings=AUTO),
        Crew(pool=SILENT, profile="vllm-0.33", arguments=(*ARGUMENTS, "--kv-no-replay"), settings=AUTO),
        Crew(pool=DRAINED, profile="trtllm", arguments=ARGUMENTS),
    ]
    async with contextlib.AsyncExitStack() as cleanup:
        engines = await cleanup.enter_async_context(crewed(journal, [*crews, renderer(DRAINED)]))
        rendered = {**rendered_by(engines[RENDERER][0]), "profiles": "auto"}
        crews[-1] = msgspec.structs.replace(crews[-1], settings=rendered)
        started = await cleanup.enter_async_context(standing(journal, folder, crews, engines))
        for crew in crews:
            await precise(started, crew.pool)
        yield started


async def precise(here: Stand, pool: str) -> None:
    """Wait until the pool's profile counts again. Without a replay, the engine's whole cache must have turned over."""
    talks = Talks(here, pool, 99, system_tokens=800)

    async def used() -> bool:
        return (await talks.turn()).pick.matched_by == "precise"

    await until_async(used)


async def faults(here: Stand, pool: str, kind: str) -> float:
    """How often something went wrong with a pool's events."""
    return (await here.keeper_page()).total("warmpath_kv_event_faults_total", pool=pool, kind=kind)


async def exact(here: Stand, pool: str, seed: int) -> None:
    """Predictions are exact now."""
    tried = await Talks(here, pool, seed).compare(40)
    assert tried.exact >= 0.99 * tried.requests, f"{line(pool, tried)}; {worst(tried.off)}"


async def test_a_gap_is_repaired_by_a_replay(here: Stand) -> None:
    """Three batches do not arrive: the next one shows the gap, the replay fills it, and predictions are exact again."""
    gaps, replays = await faults(here, REPLAYED, "gaps"), await faults(here, REPLAYED, "replays")
    lost = await faults(here, REPLAYED, "gap")
    await here.engines[REPLAYED][0].control("kv_events", drop=3)
    talks = Talks(here, REPLAYED, 2)
    for _ in range(5):
        await talks.turn()

    async def shown() -> bool:
        return await faults(here, REPLAYED, "gaps") > gaps and await faults(here, REPLAYED, "replays") > replays

    await until_async(shown)
    assert await faults(here, REPLAYED, "gap") == lost
    page = await here.keeper_page()
    assert page.total("warmpath_kv_events_in_step", pool=REPLAYED) == 1
    assert page.total("warmpath_kv_profile_used", pool=REPLAYED) == 1
    await exact(here, REPLAYED, 3)


async def test_batches_lost_at_the_end_of_a_burst_are_found(here: Stand) -> None:
    """The last batch does not arrive and none follows: a quiet stream is asked for its last batch again."""
    await here.engines[REPLAYED][0].control("kv_events", drop=1)
    prompt = "the last word " * 100
    stored = await told(here)
    first = await here.ask(REPLAYED, prompt, max_tokens=1)

    async def found() -> bool:
        return await told(here) > stored

    await until_async(found)
    again = await here.ask(REPLAYED, prompt, max_tokens=1)
    assert first.reported < again.reported == again.predicted


async def told(here: Stand) -> float:
    """Events of stored blocks that came from the engine with a replay."""
    return (await here.keeper_page()).total("warmpath_kv_events_total", pool=REPLAYED, kind="stored")


@pytest.mark.parametrize("pool", [REPLAYED, SILENT, DRAINED])
async def test_what_cannot_be_had_again_costs_the_profile_until_it_is_known(here: Stand, pool: str) -> None:
    """Events are lost for good: the pool falls back to estimated profiles, and is precise again when all is known.

    The engine's cache has turned over by then. No request fails, and the metrics tell of it.
    """
    gap = await faults(here, pool, "gap")
    await here.engines[pool][0].control("kv_events", drop=2, forget=True)
    talks = Talks(here, pool, 4)
    for _ in range(4):
        await talks.turn()

    async def shown() -> bool:
        page = await here.keeper_page()
        return page.total("warmpath_kv_profile_used", pool=pool) == 0 and await faults(here, pool, "gap") > gap

    await until_async(shown)
    assert (await here.ask(pool, "where to? " * 60)).pick.matched_by == "estimated"
    assert (await here.page()).total("warmpath_matched_total", pool=pool, rung="estimated") > 0
    assert (await here.local.ask(CHAT, body_of(pool, "hello"))).status == 200
    await precise(here, pool)

    async def used() -> bool:
        return (await here.keeper_page()).total("warmpath_kv_profile_used", pool=pool) == 1

    await until_async(used)
    await exact(here, pool, 5)


async def test_events_that_come_late_are_taken_in_late(here: Stand) -> None:
    """Batches are held back and come all at once: nothing is lost, and predictions are exact again."""
    gap = await faults(here, REPLAYED, "gap")
    (engine,) = here.engines[REPLAYED]
    await engine.control("kv_events", hold=True)
    talks = Talks(here, REPLAYED, 6)
    for _ in range(5):
        await talks.turn()
    await engine.control("kv_events", hold=False)
    await exact(here, REPLAYED, 7)
    assert await faults(here, REPLAYED, "gap") == gap

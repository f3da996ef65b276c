"""Case A5: an engine that starts again on its address, or empties its cache, is known to hold nothing."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.sim.workload import text
from tests.acceptance.engines.stand import PRECISE, PROFILES, Asked, Crew, Stand, stand
from tests.acceptance.journal import Journal
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

RNG = random.Random(37)
PRECISE_KINDS = ("vllm-0.33", "sglang")
SCRAPE_MS = 1000
NOT_LONG_S = 20.0
AT_ONCE = 3
"""Scrapes in which a restart must have shown: one that was out, the one that meets the new engine, one to spare."""


def exact(profile: str) -> str:
    """The pool of a kind whose profiles are precise."""
    return f"precise-{profile}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(journal: Journal, folder: Path) -> AsyncIterator[Stand]:
    """One engine of each kind with an estimated profile, and of some with a precise one; one scrape a second."""
    arguments = ("--kv-events", "--blocks", "2001", "--time-factor", "10")
    crews = [Crew(pool=profile, profile=profile, arguments=arguments) for profile in PROFILES] + [
        Crew(pool=exact(profile), profile=profile, arguments=arguments, settings=PRECISE) for profile in PRECISE_KINDS
    ]
    async with stand(journal, folder, crews, telemetry={"scrape_ms": SCRAPE_MS}) as started:
        yield started


async def warm(here: Stand, pool: str) -> str:
    """Ask for a long prompt until its engine is expected to hold it; returns the prompt."""
    prompt = text(RNG, 4000)

    async def held() -> bool:
        await here.ask(pool, prompt)
        (each,) = (await here.expected(pool, prompt)).values()
        return each.matched_tokens > 3000

    await until_async(held)
    return prompt


async def answered(here: Stand, pool: str, prompt: str) -> bool:
    """Whether a prompt is answered: an engine that starts again refuses connections for a moment."""
    return (await here.local.chat(prompt, model=pool)).status == 200


async def emptied(here: Stand, pool: str, prompt: str, *, woken: bool = False) -> int:
    """Wait until nothing of a prompt is expected in the pool's engine; returns how many scrapes came by meanwhile.

    An engine that has nothing to do may not say what became of it: vLLM and SGLang tell of a cleared cache with their
    next step, and nothing on TensorRT-LLM's pages moves before a request completes. A short prompt makes them speak.
    """

    async def scrapes() -> float:
        page = await here.keeper_page()
        return page.total("warmpath_scrapes_total", pool=pool, outcome="read")

    if woken:
        await until_async(lambda: answered(here, pool, text(RNG, 100)))
    before = await scrapes()

    async def none() -> bool:
        (each,) = (await here.expected(pool, prompt)).values()
        return each.matched_tokens == 0

    await until_async(none, NOT_LONG_S)
    return int(await scrapes() - before)


@pytest.mark.parametrize("pool", [*PROFILES, *map(exact, PRECISE_KINDS)])
async def test_an_engine_that_starts_again_is_expected_to_hold_nothing(here: Stand, pool: str) -> None:
    """The same address, another life: within one scrape of it nothing is expected there, and nothing is found.

    The prompt that comes then is expected there again, and is found.
    """
    prompt = await warm(here, pool)
    await here.idle(pool)

    async def scraped() -> bool:
        # Engines that do not tell their start are known to have started again by a counter that went back.
        return all(
            state.told_start or state.tokens or state.prefix_queries for state in (await here.states(pool)).values()
        )

    await until_async(scraped)
    await here.engines[pool][0].control("restart", down_s=0.05)
    assert await emptied(here, pool, prompt, woken=pool == "trtllm") <= AT_ONCE

    async def served() -> Asked | None:
        answer = await here.local.chat(prompt, model=pool)
        return Asked(answer, await here.decision(answer)) if answer.status == 200 else None

    first = await served()
    while first is None:
        await asyncio.sleep(0.05)
        first = await served()
    assert (first.predicted, first.reported) == (0.0, 0)
    if pool.startswith("precise"):
        await here.in_step(pool)
    again = await here.ask(pool, prompt)
    assert again.reported > 0
    assert again.predicted > 0
    if pool.startswith("precise"):
        assert (again.pick.matched_by, again.predicted) == ("precise", again.reported)


@pytest.mark.parametrize("pool", [exact(profile) for profile in PRECISE_KINDS])
async def test_an_engine_whose_cache_was_cleared_is_expected_to_hold_nothing(here: Stand, pool: str) -> None:
    """`AllBlocksCleared`, as of `/reset_prefix_cache` and `/flush_cache`: its precise profile is empty, and used."""
    prompt = await warm(here, pool)
    await here.idle(pool)
    assert (await here.engines[pool][0].control("reset_prefix_cache"))["success"]
    assert await emptied(here, pool, prompt, woken=True) <= AT_ONCE
    await here.in_step(pool)
    first = await here.ask(pool, prompt)
    assert (first.pick.matched_by, first.predicted, first.reported) == ("precise", 0.0, 0)
    await here.in_step(pool)
    again = await here.ask(pool, prompt)
    assert again.predicted == again.reported > 0


@pytest.mark.parametrize("pool", PROFILES)
async def test_an_estimated_profile_gives_up_a_cleared_cache_when_its_engine_reports(here: Stand, pool: str) -> None:
    """Nobody tells of a cleared cache without events: the first report corrects what was believed."""
    prompt = await warm(here, pool)
    await here.idle(pool)
    assert (await here.engines[pool][0].control("reset_prefix_cache"))["success"]
    first = await here.ask(pool, prompt)
    assert first.reported == 0
    assert first.predicted > 3000 / 4

    async def right() -> bool:
        again = await here.ask(pool, prompt)
        return again.reported > 0 and abs(again.predicted - again.reported) <= 0.05 * again.decision.prompt_tokens

    await until_async(right)

"""A keeper, a worker, an engine stand still for ten seconds: no request fails, and nothing is promised that is gone."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from extproc import inner
from extproc.choose.explain import Explanation
from tests.acceptance.engines.stand import PRECISE, Asked, Crew, Stand, body_of, crewed, standing
from tests.acceptance.engines.talks import Talks, line, worst
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, Answer
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

POOL = "vllm-0.33"
BLOCKS = 201
STILL_S = 10.0
ARGUMENTS = ("--kv-events", "--blocks", str(BLOCKS), "--time-factor", "20")
OLD = [f"{number} old prompts that will be gone " * 20 for number in range(8)]
"""Some 160 tokens each: they fit one engine's cache together."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(journal: Journal, folder: Path) -> AsyncIterator[Stand]:
    """Two engines with small caches and precise profiles, one worker, one keeper."""
    crew = Crew(pool=POOL, profile=POOL, each=1, settings=PRECISE, arguments=ARGUMENTS)
    async with contextlib.AsyncExitStack() as cleanup:
        first = await cleanup.enter_async_context(crewed(journal, [crew]))
        second = await cleanup.enter_async_context(crewed(journal, [crew]))
        engines = {POOL: first[POOL] + second[POOL]}
        started = await cleanup.enter_async_context(standing(journal, folder, [crew], engines))

        async def used() -> bool:
            assert (await started.local.ask(CHAT, body_of(POOL, os.urandom(300).hex()))).status == 200
            return (await started.keeper_page()).total("warmpath_kv_profile_used", pool=POOL) == 2

        await until_async(used)
        yield started


class Still:
    """Processes that are stopped for a while."""

    def __init__(self, *pids: int) -> None:
        self.pids = pids

    async def __aenter__(self) -> "Still":
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)
        return self

    async def __aexit__(self, *_: object) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGCONT)


async def flow(here: Stand, seed: int, ending: asyncio.Event) -> list[Answer]:
    """Requests one after the other, until told to end."""
    answers = list[Answer]()
    while not ending.is_set():
        prompt = f"{seed} and {len(answers) % 7} times more of the same " * 20
        answers.append(await here.local.ask(CHAT, body_of(POOL, prompt)))
        await asyncio.sleep(0.05)
    return answers


async def stood_still(here: Stand, *pids: int) -> None:
    """Stop processes for ten seconds while requests go on, for a second longer; none of them fails."""
    ending = asyncio.Event()
    flows = [asyncio.create_task(flow(here, number, ending)) for number in range(3)]
    try:
        async with Still(*pids):
            await asyncio.sleep(STILL_S)
        await asyncio.sleep(1.0)
    finally:
        ending.set()
        answers = [one for each in await asyncio.gather(*flows) for one in each]
    assert {each.status for each in answers} == {200}
    assert len(answers) >= 6


def rung(asked: Asked) -> str:
    """What told the cached tokens of the pick."""
    return asked.pick.matched_by


async def decided(here: Stand, answer: Answer) -> Asked | None:
    """An answered request with its decision; None when Envoy sent it on without one."""
    assert answer.status == 200
    told = await inner.recall(here.worker, answer.headers["x-request-id"])
    return Asked(answer, msgspec.json.decode(told.body, type=Explanation)) if told.status == 200 else None


async def exact(here: Stand, seed: int) -> None:
    """Predictions are exact again, without a restart."""
    prompt = f"{seed} and much the same " * 40

    async def used() -> bool:
        asked = await decided(here, await here.local.ask(CHAT, body_of(POOL, prompt)))
        return asked is not None and rung(asked) == "precise"

    await until_async(used)
    tried = await Talks(here, POOL, seed).compare(40)
    assert tried.exact >= 0.99 * tried.requests, f"{line(POOL, tried)}; {worst(tried.off)}"


async def matched(here: Stand, kind: str) -> float:
    """Decisions whose cached tokens were told by this."""
    return (await here.page()).total("warmpath_matched_total", pool=POOL, rung=kind)


async def forget(here: Stand) -> None:
    """Have all engines evict all they hold, past the gateway."""

    async def one(address: str, number: int) -> None:
        body = body_of(POOL, f"{number} of very much else " * 80, max_tokens=1)
        async with here.local.http.post(f"http://{address}{CHAT}", data=body) as answer:
            assert answer.status == 200

    for number in range(24):
        await asyncio.gather(*(one(each.address, number) for each in here.engines[POOL]))


def check(asked: Asked) -> None:
    """See that nothing is promised that is gone, and that it is."""
    assert asked.reported < 16 * 4, "it was not evicted"
    assert rung(asked) == "estimated" or asked.predicted <= asked.reported, f"{asked.predicted}, {asked.reported}"


async def test_a_keeper_that_stands_still(here: Stand) -> None:
    """Nobody hears what engines evict: the estimated profiles count, until the keeper has caught up with the events."""
    for prompt in OLD:
        await here.ask(POOL, prompt)
    await here.in_step(POOL)
    held = [(await here.expected(POOL, prompt)).values() for prompt in OLD]
    assert sum(max(each.matched_tokens for each in found) > 100 for found in held) >= len(OLD) - 1
    async with Still(here.local.keeper()):
        await asyncio.sleep(STILL_S - 2.0)
        turn = await here.ask(POOL, "a prompt meanwhile " * 40)
        assert rung(turn) == "estimated"
        await forget(here)
        await asyncio.sleep(2.0)
    for prompt in OLD:
        check(await here.ask(POOL, prompt))
    await exact(here, 20)


async def test_no_request_fails_while_a_keeper_stands_still(here: Stand) -> None:
    """They go on, by the estimated profiles after a while, and by the precise ones again; no process starts again."""
    await exact(here, 9)
    keeper = here.local.keeper()
    before = [await matched(here, kind) for kind in ("precise", "estimated")]
    await stood_still(here, keeper)
    after = [await matched(here, kind) for kind in ("precise", "estimated")]
    assert all(now > then for now, then in zip(after, before, strict=True))
    await exact(here, 21)
    assert here.local.keeper() == keeper


async def test_a_worker_that_stands_still(here: Stand) -> None:
    """Requests wait for it; its first decisions promise nothing that was evicted meanwhile."""
    for prompt in OLD:
        await here.ask(POOL, prompt)
    await here.in_step(POOL)
    (worker,) = here.local.workers()
    async with Still(worker):
        waiting = [asyncio.create_task(here.local.ask(CHAT, body_of(POOL, prompt))) for prompt in OLD]
        await asyncio.gather(asyncio.sleep(STILL_S), forget(here))
    answers = await asyncio.gather(*waiting)
    # Envoy may have sent them on without a pick; the worker's own decisions are looked at.
    answers += [await here.local.ask(CHAT, body_of(POOL, prompt)) for prompt in OLD]
    assert [each.status for each in answers] == [200] * 2 * len(OLD)
    for each in answers:
        asked = await decided(here, each)
        assert asked is None or rung(asked) == "estimated" or asked.predicted <= asked.reported
    await here.idle(POOL)
    await exact(here, 30)
    assert here.local.workers() == [worker]


async def test_an_engine_that_stands_still(here: Stand) -> None:
    """Its requests wait for it, and its profile is right afterwards."""
    await stood_still(here, here.engines[POOL][0].process.pid)
    await here.idle(POOL)
    await exact(here, 50)

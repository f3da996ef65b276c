"""Rollouts that are interrupted: keepers are killed, Redis is emptied. Nothing moves but by the plan."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.acceptance import processes
from tests.acceptance.journal import Journal
from tests.acceptance.rollouts.people import Habits, People
from tests.acceptance.rollouts.stand import NEW, Fleet, Stand, stand
from tests.waiting import until, until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

TALKS = Habits(rate=25.0, turns=(3, 5), think_s=0.5)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(journal: Journal, folder: Path) -> AsyncIterator[Stand]:
    """Two replicas, and two versions that are alike."""
    async with stand(journal, folder, Fleet()) as started:
        yield started


def keepers(here: Stand) -> list[int]:
    """Process ids of the keepers that run now."""
    children = [one for replica in here.site.replicas for one in processes.children(replica.child.pid)]
    return [one.pid for one in children if " keeper " in one.command]


async def whole(here: Stand) -> None:
    """Wait until every part is well, and the store has the rollout."""
    for replica in here.site.replicas:
        await until_async(replica.well)


async def test_keepers_that_are_killed_lose_no_step_and_take_none_twice(here: Stand) -> None:
    """Both die in each step, with SIGKILL, and are started again: the steps and the audit log are as without it."""
    async with People([here.url], TALKS, 1) as people:
        started = await here.start("--steps", "25,50,100", "--hold", "3", "--settle", "0.2", "--min-samples", "3")
        for step in range(3):
            await here.when(lambda rollout, step=step: rollout["step"] >= step)  # type: ignore[misc]
            for pid in keepers(here):
                os.kill(pid, signal.SIGKILL)
            await until(lambda: len(keepers(here)) == len(here.site.replicas))
        await here.phase("promoted")
        await whole(here)
        told = [(one["what"], one["share"]) for one in await here.events() if one["rollout"] == started["id"]]
    await here.abort()
    people.none_failed()
    assert told == [("started", 0.25), ("step", 0.5), ("step", 1.0), ("promoted", 1.0)]
    assert not people.changed()


async def flushed(here: Stand) -> None:
    """Empty Redis, as by `FLUSHALL`."""
    with contextlib.closing(here.site.store.client()) as client:
        await asyncio.to_thread(client.flushall)


async def restarted(here: Stand) -> None:
    """Kill Redis, which keeps nothing on disk, and start it again after three seconds."""
    await asyncio.to_thread(here.site.store.kill)
    await asyncio.sleep(3.0)
    await asyncio.to_thread(here.site.store.start)


@pytest.mark.parametrize("lose", [flushed, restarted], ids=["flushed", "restarted"])
async def test_a_rollout_goes_on_when_redis_has_lost_it(here: Stand, lose: Callable[[Stand], Awaitable[None]]) -> None:
    """The share stays what it was, conversations stay where they run, and the rollout goes on to its end."""
    async with People([here.url], TALKS, 2 if lose is flushed else 3) as people:
        started = await here.start("--steps", "25,100", "--hold", "8", "--settle", "0.2", "--min-samples", "3")
        await until(lambda: people.by_version().get(NEW, 0) >= 20)
        await lose(here)
        await people.more(50)
        status = await here.status()
        assert (status["rollout"]["id"], status["rollout"]["share"]) == (started["id"], 0.25)
        await here.phase("promoted")
        await whole(here)
    await here.abort()
    people.none_failed()
    assert not people.changed()

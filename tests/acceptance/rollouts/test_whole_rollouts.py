"""Whole rollouts before four replicas, with streams running: up to the end of the old version, and back from 25 %."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from tests.acceptance.journal import Journal
from tests.acceptance.rollouts.people import Habits, People
from tests.acceptance.rollouts.stand import MODEL, NEW, OLD, Fleet, Stand, stand
from tests.acceptance.routing.asking import decide_chat
from tests.unit.envoy.gateway import Gateway
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

REPLICAS = 4
RATE = 50.0
LONG_TALKS = Habits(rate=10.0, turns=(20, 20), think_s=0.3, question_tokens=(20, 40))
PATIENCE_S = 150.0


class Look(msgspec.Struct, frozen=True):
    """Which version a worker gave to one session, and when, in seconds since the epoch."""

    at: float
    version: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(journal: Journal, folder: Path) -> AsyncIterator[Stand]:
    """Four replicas, and two versions that are alike."""
    async with stand(journal, folder, Fleet(replicas=REPLICAS)) as started:
        yield started


async def version_at(here: Stand, worker: Gateway, session: str) -> str:
    """The version that a worker gives to a session now."""
    decided = await decide_chat(worker, "which one?", session, model=MODEL)
    return next(
        version for version, engines in here.engines.items() if decided.endpoint in {e.address for e in engines}
    )


async def on_the_new(here: Stand, worker: Gateway) -> str:
    """A session that gets the new version."""
    for number in range(1000):
        if await version_at(here, worker, f"probe {number}") == NEW:
            return f"probe {number}"
    raise AssertionError("no session of a thousand gets the new version")


@contextlib.asynccontextmanager
async def watched(here: Stand, workers: Sequence[Gateway], session: str) -> AsyncIterator[list[list[Look]]]:
    """Look, all the time, which version each worker gives to a session."""
    looks: list[list[Look]] = [[] for _ in workers]

    async def watch(worker: Gateway, seen: list[Look]) -> None:
        while True:
            version = await version_at(here, worker, session)
            seen.append(Look(time.time(), version))
            await asyncio.sleep(0.02)

    tasks = [asyncio.create_task(watch(worker, seen)) for worker, seen in zip(workers, looks, strict=True)]
    try:
        yield looks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_rollback_holds_at_every_replica_and_fails_no_request(here: Stand, measured: list[str]) -> None:
    """25 % have the new version when its verdict is bad: each replica leaves it, once and for all, with every turn."""
    async with contextlib.AsyncExitStack() as cleanup:
        workers = [await cleanup.enter_async_context(one.as_gateway()) for one in here.site.replicas]
        people = await cleanup.enter_async_context(People([here.url], Habits(rate=RATE)))
        await here.start("--steps", "25,100", "--hold", "3600", "--min-samples", "0")
        await until(lambda: people.by_version().get(NEW, 0) >= 30)
        session = await on_the_new(here, workers[0])
        looks = await cleanup.enter_async_context(watched(here, workers, session))
        await people.more(50)
        await here.done("verdict", MODEL, "fail", "--text", "it answers in rhymes")
        ended = await here.phase("rolled_back")
        await until(lambda: all(seen[-1].version == OLD for seen in looks))
        await people.more(100)
    took = [next(look.at for look in seen if look.version == OLD) - ended["since"] for seen in looks]
    measured.append(
        f"a rollback at 25 %, {len(people.got)} requests, {len(people.failed)} failed: the replicas followed after "
        + ", ".join(f"{1000 * one:.0f} ms" for one in sorted(took))
    )
    people.none_failed()
    assert ended["gate"] == "verdict"
    for seen in looks:
        versions = [look.version for look in seen]
        turned = versions.index(OLD)
        assert versions == [NEW] * turned + [OLD] * (len(versions) - turned)
    assert (await here.events())[-1]["what"] == "rolled_back"


async def test_an_equal_version_takes_over_and_the_old_one_ends(here: Stand, measured: list[str]) -> None:
    """1, 5, 25, 100 %, until the old version is retired and its engines are gone: no request fails.

    No conversation leaves the new version, and none leaves the old one before it is retired.
    """
    began = time.time()
    async with People([here.url], Habits(rate=RATE - 10.0), 2) as people, People([here.url], LONG_TALKS, 3) as talkers:
        await people.more(50)
        options = ("--hold", "4", "--settle", "0.5", "--min-samples", "3", "--retire-after", "4")
        await here.start("--steps", "1,5,25,100", *options)
        await here.phase("promoted", patience_s=PATIENCE_S)
        ended = await here.phase("retired")
        offset = time.time() - asyncio.get_running_loop().time()
        await people.more(100)
        await here.engines[OLD][0].process.stop()
        await people.more(100)
    got = people.got + talkers.got
    whole = [versions for versions in talkers.sessions().values() if len(versions) == 20]
    measured.append(
        f"1, 5, 25, 100 % and the end of the old version: {len(got)} requests in {time.time() - began:.0f} s, "
        f"{len(people.failed + talkers.failed)} failed; {len(whole)} conversations of 20 turns"
    )
    people.none_failed()
    talkers.none_failed()
    told = [(event["what"], event["share"]) for event in (await here.events()) if event["rollout"] == ended["id"]]
    steps = [("started", 0.01), ("step", 0.05), ("step", 0.25), ("step", 1.0), ("promoted", 1.0), ("retired", 1.0)]
    assert told == steps
    retired = ended["since"] - offset
    assert not people.changed(retired)
    assert not talkers.changed(retired)
    assert {one.version for one in talkers.got if one.sent_s < retired} == {OLD, NEW}
    assert {one.version for one in got if one.sent_s > retired + 2.0} == {NEW}
    assert whole

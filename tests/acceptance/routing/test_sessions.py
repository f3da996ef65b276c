"""Conversations stay where they are: named, recognised, stored at an engine, or placed by hash as the pool grows."""

import asyncio
import contextlib
import copy
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from tests.acceptance.journal import Journal
from tests.acceptance.local import POOL, Answer, Local, configuration, running, simulated
from tests.acceptance.routing.asking import Decided, at_workers, decide, decide_chat, use
from tests.acceptance.routing.stored import StoringEngine, storing
from tests.unit.envoy.gateway import Gateway
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKERS = 2
MAIN, HASHED, STORING = 4, 8, 3
"""Engines of each pool at first; the first two pools get one more."""
SESSIONS = 3000
RESPONSES = "/v1/responses"
AT_ONCE = 32


class Kept(msgspec.Struct, frozen=True):
    """A stack with the default policy, sessions placed by hash, and engines that store responses, in two pools."""

    local: Local
    storing: Sequence[StoringEngine]
    document: dict[str, Any]
    path: Path

    @contextlib.asynccontextmanager
    async def one_more(self, pool: str) -> AsyncIterator[str]:
        """A pool has one more engine for a while; yields its address."""
        extra = self.local.engines[-1 if pool == "hashed" else MAIN].address
        document = copy.deepcopy(self.document)
        document["pools"][pool]["endpoints"].append(extra)
        await use(self.local, self.path, document)
        try:
            yield extra
        finally:
            await use(self.local, self.path, self.document)

    async def respond(self, text: str, **fields: str) -> Answer:
        """Ask for a response that the engine stores."""
        return await self.local.ask(RESPONSES, responses(text, **fields))

    async def read(self, name: str) -> Answer:
        """Read a stored response."""
        return await self.local.ask(f"{RESPONSES}/{name}", method="GET")

    async def decisions(self, pool: str) -> list[float]:
        """Decisions for a pool, by worker."""
        processes = [f"worker-{index}" for index in range(WORKERS)]
        return [await self.local.metric("warmpath_decisions_total", pool=pool, process=one) for one in processes]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(journal: Journal, folder: Path) -> AsyncIterator[Kept]:
    """All pools behind two workers."""
    async with contextlib.AsyncExitStack() as cleanup:
        number = MAIN + 1 + HASHED + 1
        engines = await cleanup.enter_async_context(simulated(journal, each=number, arguments=("--adapter", "hashed")))
        stored = [await cleanup.enter_async_context(storing()) for _ in range(STORING)]
        pools = {
            "stored": [one.address for one in stored],  # the first pool gets what names no model
            "also": [one.address for one in stored],
            POOL: [one.address for one in engines[:MAIN]],
            "hashed": [one.address for one in engines[MAIN + 1 : -1]],
        }
        document = configuration(pools, telemetry={"access_log_flush_ms": 10})
        document["pools"]["hashed"]["policy"] = "session_hash"
        document["gateway"]["sidecar"]["workers"] = WORKERS
        document["redis"] = {"timeout_ms": 2000}  # pins are what is tested, not a store that looks slow
        path = folder / "warmpath.yaml"
        local = await cleanup.enter_async_context(running(journal, path, document, engines))
        yield Kept(local, stored, document, path)


def turns(number: int, count: int) -> list[dict[str, str]]:
    """A conversation of so many questions, all so short that no profile can know any of it."""
    said = [{"role": "user", "content": f"{number}?"}]
    for turn in range(1, count):
        said += [{"role": "assistant", "content": f"{turn}."}, {"role": "user", "content": "so?"}]
    return said


async def test_a_conversation_without_a_key_is_recognised_by_every_worker(kept: Kept) -> None:
    """Its growing list of messages alone brings each turn, at whatever worker, to the engine of the first."""
    async with at_workers(kept.local) as workers:
        for number in range(12):
            told = [
                await decide_chat(workers[turn % WORKERS], "", messages=turns(number, turn + 1)) for turn in range(4)
            ]
            assert len({one.endpoint for one in told}) == 1
            assert [one.pinned for one in told] == [False, True, True, True]
            assert all(one.cached_tokens == 0 for one in told)


async def test_a_conversation_without_a_key_stays_behind_the_gateway(kept: Kept) -> None:
    """The same through Envoy, with the engines' own answers in the history, whichever worker it asks."""
    before = await kept.decisions(POOL)
    for number in range(8):
        messages: list[dict[str, str]] = [{"role": "user", "content": f"tell me of {number}"}]
        engines = set()
        for _ in range(3):
            answer, engine = await kept.local.chat_served("", messages=messages)
            engines.add(engine.address)
            said = answer.json["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
        assert len(engines) == 1
    after = await kept.decisions(POOL)
    assert all(now > then for then, now in zip(before, after, strict=True)), "one worker decided alone"


async def test_a_branch_of_a_conversation_begins_where_the_conversation_is(kept: Kept) -> None:
    """Two different follow-ups of one turn both go to the engine that answered it."""
    async with at_workers(kept.local) as workers:
        for number in range(100, 108):
            first = await decide_chat(workers[0], "", messages=turns(number, 1))
            history = turns(number, 2)
            other = [*history[:-1], {"role": "user", "content": "why?"}]
            branches = [await decide_chat(workers[1], "", messages=one) for one in (history, other)]
            assert {one.endpoint for one in branches} == {first.endpoint}


async def test_a_response_is_continued_where_it_is_stored(kept: Kept) -> None:
    """`previous_response_id` finds the engine that has the response; the engine names it as it was told to."""
    before = await kept.decisions("stored")
    got = sum(len(one.bodies) for one in kept.storing)
    for number in range(10):
        answer, previous = await kept.respond(f"question {number} " * 20), ""
        for turn in range(3):
            assert answer.status == 200, answer.body
            name = answer.json["id"]
            (holder,) = [one for one in kept.storing if any(body.get("request_id") == name for body in one.bodies)]
            assert holder.bodies[-1].get("previous_response_id", "") == previous
            read = await kept.read(name)
            assert (read.status, read.json.get("id")) == (200, name)
            previous = name
            if turn < 2:
                answer = await kept.respond("and then? ", previous_response_id=previous)
    assert sum(len(one.bodies) for one in kept.storing) == got + 30
    assert all(one.bodies for one in kept.storing), "all chains went to one engine"
    after = await kept.decisions("stored")
    assert all(now > then for then, now in zip(before, after, strict=True)), "one worker decided alone"


async def test_a_response_is_read_where_it_is_stored_whatever_its_pool(kept: Kept) -> None:
    """`GET /v1/responses/{id}` names no model: the id alone brings it to the engine that has the response."""
    names = [(await kept.respond(f"question {number}", model="also")).json["id"] for number in range(8)]
    assert {(await kept.read(name)).status for name in names} == {200}


async def test_a_response_that_the_client_named_is_found_by_the_other_worker(kept: Kept) -> None:
    """An id the client chose is left alone, and pins like one that was chosen for it, across workers."""
    async with at_workers(kept.local) as workers:
        for number in range(12):
            here, there = workers[number % WORKERS], workers[(number + 1) % WORKERS]
            first = await decide(here, responses(f"about {number}", request_id=f"resp_{number}"), RESPONSES)
            more = responses("and?", request_id=f"resp_{number}_b", previous_response_id=f"resp_{number}")
            second = await decide(there, more, RESPONSES)
            assert (second.endpoint, second.pinned) == (first.endpoint, True)


async def test_what_is_stored_of_a_response_counts_as_cached(kept: Kept) -> None:
    """A follow-up's few bytes stand for the whole conversation: its length is predicted, the answer included."""
    answer = await kept.respond("a long question, " * 200)
    whole = float(answer.json["usage"]["total_tokens"])
    async with at_workers(kept.local) as workers:

        async def known() -> bool:
            told = await decide(workers[0], responses("more", previous_response_id=answer.json["id"]), RESPONSES)
            return told.cached_tokens >= 0.9 * whole

        await until_async(known)


def responses(text: str, **fields: str) -> bytes:
    """Body of a request for a response."""
    return json.dumps({"model": "stored", "input": text, **fields}).encode()


async def test_hashed_sessions_move_no_more_than_they_must(kept: Kept) -> None:
    """One engine more than eight: at most a ninth of the sessions, and 2 %, move, and all of those to the new one."""
    async with at_workers(kept.local) as workers:
        before = await everyone(workers, SESSIONS, model="hashed")
        async with kept.one_more("hashed") as extra:
            after = await everyone(workers, SESSIONS, model="hashed")
        again = await everyone(workers, 200, model="hashed")
    moved = [now.endpoint for then, now in zip(before, after, strict=True) if now.endpoint != then.endpoint]
    assert len({one.endpoint for one in before}) == HASHED
    assert 0 < len(moved) <= SESSIONS * (1 / (HASHED + 1) + 0.02)
    assert set(moved) == {extra}
    assert [one.endpoint for one in again] == [one.endpoint for one in before[:200]]


async def test_pinned_sessions_do_not_move_when_an_engine_joins(kept: Kept) -> None:
    """Whatever worker is asked, through Envoy as well: every pinned session stays, and new ones use the new engine."""
    async with at_workers(kept.local) as workers:
        before = await everyone(workers, 200)
        served = [await kept.local.chat_served("hello", f"served-{number}") for number in range(6)]
        async with kept.one_more(POOL) as extra:
            after = await everyone([*reversed(workers)], 200)
            again = [await kept.local.chat_served("hello again", f"served-{number}") for number in range(6)]
            fresh = await everyone(workers, 200, kind="new")
    assert [one.endpoint for one in after] == [one.endpoint for one in before]
    assert all(one.pinned for one in after)
    assert [engine.address for _, engine in again] == [engine.address for _, engine in served]
    assert extra in {one.endpoint for one in fresh}


async def everyone(workers: Sequence[Gateway], number: int, kind: str = "session", **fields: object) -> list[Decided]:
    """What is decided for so many sessions, each asked of one of the workers in turn."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(worker: Gateway, session: str) -> Decided:
        async with gate:
            return await decide_chat(worker, "hello", session, **fields)

    turns = zip(itertools.cycle(workers), range(number))
    return await asyncio.gather(*(one(worker, f"{kind}-{session}") for worker, session in turns))

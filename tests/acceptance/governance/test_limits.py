"""Time limits by stage, at two replicas of two workers behind an Envoy, with the shared store and without it."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from tests.acceptance import processes
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, POOL, chat_body
from tests.acceptance.state.replicas import Plan, Site, site
from tests.bad_engine import BadEngine, Behave
from tests.greedy import text_of
from tests.waiting import until, until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 8
LIMIT_S = 1.0
"""Of the first token, and of silence; a whole answer takes longer than all limits of stages together."""
HEADERS_S = 0.6
SECTIONS: Mapping[str, Any] = {
    "models": {"patient": {"pool": POOL, "served_as": "sim"}},
    "redis": {"timeout_ms": 500},
    "gateway": {"message_timeout_ms": 20_000},
    "telemetry": {"access_log_flush_ms": 20},
    "breakers": {"strikes": 0},
    "timeouts": {
        "headers_s": HEADERS_S,
        "first_token_s": LIMIT_S,
        "stall_s": LIMIT_S,
        "stream_idle_s": 6.0,
        # Waits for headers as long as it must: only the limit on the first token is left.
        "rules": [{"model": "patient", "headers_s": 0.0}],
    },
}


class Told(msgspec.Struct, frozen=True):
    """An answer as far as it came."""

    status: int
    reason: str
    body: bytes
    broken: bool
    seconds: float

    @property
    def text(self) -> str:
        """What a stream says."""
        events = [json.loads(line[6:]) for line in self.body.split(b"\n\n") if line.startswith(b"data: {")]
        return "".join(each["choices"][0]["delta"].get("content", "") for each in events)


class Ward(msgspec.Struct, frozen=True):
    """What runs, and two engines behind it."""

    here: Site
    engines: list[BadEngine]
    numbers: "itertools.count[int]" = itertools.count()

    def prompt(self) -> str:
        """One that nobody asked before."""
        return f"prompt number {next(self.numbers)}, and {'so on, ' * 50}"

    async def ask(self, prompt: str, behave: Behave, session: str = "", **fields: object) -> Told:
        """Ask for a stream, and read as much as there is of it."""
        body = chat_body(prompt, **{"stream": True, "max_tokens": TOKENS, **fields})
        headers = {"content-type": "application/json", **behave.header()}
        headers |= {"x-session-id": session} if session else {}
        whole, broken, began = bytearray(), False, time.monotonic()
        async with self.here.http.post(f"{self.here.front.url}{CHAT}", data=body, headers=headers) as answer:
            try:
                async for piece in answer.content.iter_any():
                    whole += piece
            except aiohttp.ClientError:
                broken = True
        reason = answer.headers.get("x-warmpath-reason", "")
        return Told(answer.status, reason, bytes(whole), broken, time.monotonic() - began)

    async def ended(self, stage: str) -> float:
        """Requests that a limit ended so far."""
        return await self.here.metric("warmpath_time_limits_total", stage=stage)

    async def counts(self, stage: str, number: float) -> None:
        """Wait until so many were counted."""

        async def equal() -> bool:
            return await self.ended(stage) == number

        await until_async(equal)

    def received(self) -> int:
        """Requests that reached engines."""
        return sum(len(engine.received) for engine in self.engines)

    def left(self) -> int:
        """Of these, those whose client closed the connection before their end."""
        return sum(each.left for engine in self.engines for each in engine.received)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ward(journal: Journal, folder: Path) -> AsyncIterator[Ward]:
    """The site."""
    async with contextlib.AsyncExitStack() as cleanup:
        engines = [await cleanup.enter_async_context(BadEngine()) for _ in range(2)]
        plan = Plan(replicas=2, workers=2, envoys=[()], sections=SECTIONS)
        yield Ward(await cleanup.enter_async_context(site(journal, folder, {POOL: engines}, plan)), engines)


@pytest.fixture(autouse=True)
def fresh(ward: Ward) -> None:
    """Nothing received yet, all well."""
    for engine in ward.engines:
        engine.received.clear()


async def test_a_silent_engine_is_left_for_the_next(ward: Ward) -> None:
    """No headers in time: the other one answers, once; charge and pin follow, the next turn goes there (D7, C14)."""
    prompt = ward.prompt()
    first = await ward.ask(prompt, Behave(), session="left")
    assert first.text == text_of(json.loads(chat_body(prompt, max_tokens=TOKENS)))
    [silent] = [engine for engine in ward.engines if engine.received]
    [other] = [engine for engine in ward.engines if engine is not silent]
    told = await ward.ask(prompt, Behave(silent=True, at=(silent.address,)), session="left")
    assert (told.status, told.broken, told.text) == (200, False, first.text)
    assert (len(silent.received), len(other.received)) == (2, 1)
    assert silent.received[1].body == other.received[0].body
    await until(lambda: silent.received[1].left)
    await ward.here.books.holds(0)

    async def follows() -> bool:
        before = len(other.received)
        await ward.ask(prompt, Behave(), session="left")
        return len(other.received) == before + 1

    await until_async(follows)


async def test_silence_of_all_engines_is_answered_504(ward: Ward) -> None:
    """Three tries, then JSON with the reason (D1)."""
    before = await ward.ended("headers")
    told = await ward.ask(ward.prompt(), Behave(silent=True))
    assert (told.status, told.reason, ward.received()) == (504, "time_limit_headers", 3)
    assert json.loads(told.body)["error"]["type"] == "timeout_error"
    await ward.counts("headers", before + 1)
    await ward.here.books.holds(0)


async def test_no_first_token_before_the_headers_is_answered_504(ward: Ward) -> None:
    """Where the engine may be silent, the sidecar ends the request: a clean answer, as nothing has been sent."""
    before = await ward.ended("first_token")
    told = await ward.ask(ward.prompt(), Behave(silent=True), model="patient")
    assert (told.status, told.reason, ward.received()) == (504, "time_limit_first_token", 1)
    assert json.loads(told.body)["error"]["type"] == "timeout_error"
    await ward.counts("first_token", before + 1)
    await until(lambda: ward.left() == 1)
    await ward.here.books.holds(0)


async def test_no_first_token_after_the_headers_breaks_the_stream(ward: Ward) -> None:
    """VLLM sends its headers at once: the client sees its stream break, and no engine is asked again (D6, D7)."""
    before = await ward.ended("first_token")
    told = await ward.ask(ward.prompt(), Behave(first_s=60.0))
    assert (told.status, told.body, told.broken, ward.received()) == (200, b"", True, 1)
    await ward.counts("first_token", before + 1)
    await until(lambda: ward.left() == 1)
    await ward.here.books.holds(0)


async def test_slow_and_steady_is_fine(ward: Ward) -> None:
    """First token within its time, then one every 0.6 s, for four times as long as any limit but the whole one (D7)."""
    prompt = ward.prompt()
    told = await ward.ask(prompt, Behave(first_s=0.5, gap_s=0.6))
    assert told.seconds > 4 * LIMIT_S
    assert (told.status, told.broken) == (200, False)
    assert told.text == text_of(json.loads(chat_body(prompt, max_tokens=TOKENS)))


async def test_a_whole_answer_has_no_stages(ward: Ward) -> None:
    """An answer that is not streamed is silent until its end."""
    told = await ward.ask(ward.prompt(), Behave(first_s=3 * LIMIT_S), stream=False)
    assert (told.status, told.broken, ward.received()) == (200, False, 1)


async def test_a_stall_ends_the_stream(ward: Ward) -> None:
    """The client has what was sent and sees its stream break; the engine is left, and none is asked again (D7)."""
    before = await ward.ended("stall")
    prompt = ward.prompt()
    told = await ward.ask(prompt, Behave(stall_after=3))
    assert (told.status, told.broken, ward.received()) == (200, True, 1)
    assert told.text == text_of(json.loads(chat_body(prompt, max_tokens=TOKENS)), 3)
    await ward.counts("stall", before + 1)
    await until(lambda: ward.left() == 1)
    await ward.here.books.holds(0)


async def test_every_worker_ends_its_own(ward: Ward, measured: list[str]) -> None:
    """Many streams stall at once, decided by all workers, seen by any: each is ended, and counted once."""
    before = await ward.ended("stall")
    told = await asyncio.gather(*(ward.ask(ward.prompt(), Behave(stall_after=2)) for _ in range(24)))
    assert {(each.status, each.broken) for each in told} == {(200, True)}
    await ward.counts("stall", before + 24)
    decided = [await one.metric("warmpath_decisions_total") for one in ward.here.replicas]
    assert all(decided), "one replica decided nothing: nobody was told by another"
    longest = max(each.seconds for each in told)
    measured.append(
        f"24 stalled streams with a limit of {LIMIT_S} s: the last client saw its end after {longest:.2f} s"
    )


async def test_a_worker_that_dies_hinders_nobody(ward: Ward) -> None:
    """Streams of others are ended as before; its own by Envoy's limit on idle streams; a new worker takes over."""
    asking = [asyncio.create_task(ward.ask(ward.prompt(), Behave(stall_after=2))) for _ in range(24)]
    await until(lambda: ward.received() == 24)
    workers = [one for one in processes.tree(ward.here.replicas[0].child.pid) if " worker " in one.command]
    os.kill(workers[0].pid, signal.SIGKILL)
    told = await asyncio.gather(*asking)
    assert {each.status for each in told} == {200}
    assert all(each.broken for each in told)
    await until(lambda: ward.left() == 24)
    await ward.here.well()
    # The counts of a worker end with it: only from here on do they add up.
    told_of = await ward.ended("stall")
    again = await asyncio.gather(*(ward.ask(ward.prompt(), Behave(stall_after=2)) for _ in range(12)))
    assert {(each.status, each.broken) for each in again} == {(200, True)}
    await ward.counts("stall", told_of + 12)


async def test_limits_hold_without_the_store(ward: Ward) -> None:
    """The shared store is gone: stalls and missing first tokens are ended all the same. The last test of this file."""
    ward.here.store.kill()
    before = await ward.ended("stall"), await ward.ended("first_token")
    stalls = [ward.ask(ward.prompt(), Behave(stall_after=2)) for _ in range(8)]
    silent = [ward.ask(ward.prompt(), Behave(silent=True), model="patient") for _ in range(8)]
    told = await asyncio.gather(*stalls, *silent)
    assert {(each.status, each.broken) for each in told[:8]} == {(200, True)}
    assert {(each.status, each.reason) for each in told[8:]} == {(504, "time_limit_first_token")}
    await ward.counts("stall", before[0] + 8)
    await ward.counts("first_token", before[1] + 8)
    prompt = ward.prompt()
    assert (await ward.ask(prompt, Behave(gap_s=0.3))).text == text_of(json.loads(chat_body(prompt, max_tokens=TOKENS)))

"""Rows go to a gateway at their times, as the clients of the trace would send them. Real sockets throughout."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from extproc.replay.generate import generated
from extproc.replay.rows import Row, Trace
from extproc.replay.sending import LATE_MS, Lag, Sent, send
from extproc.replay.text import SESSION_HEADER, messages
from extproc.sim.client import Failure
from extproc.sim.fleet import SimFleet
from extproc.sim.load import LoadSettings, Run
from extproc.sim.settings import EngineSettings, SimSettings

SETTINGS = LoadSettings(model="m", timeout_s=20.0, limit_s=30.0)
STREAM = (
    b'data: {"choices":[{"delta":{"content":"hello"}}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}\n\n'
    b"data: [DONE]\n\n"
)


class Heard(msgspec.Struct, frozen=True):
    """One request as it arrived: moment on the monotonic clock, headers by lower-case name, body."""

    at_s: float
    headers: dict[str, str]
    body: dict[str, Any]


class Recorder:
    """An origin that answers every request with one word, but the first `failing` with 503.

    Attributes:
        heard: the requests.
        block_until_s: the event loop stands still from the first request until then.
    """

    def __init__(self, failing: int = 0, block_until_s: float = 0.0) -> None:
        self.heard: list[Heard] = []
        self.block_until_s = block_until_s
        self._failing = failing

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests until the client leaves."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                self.heard.append(Heard(time.monotonic(), headers, body))
                time.sleep(max(0.0, self.block_until_s - time.monotonic()))  # noqa: ASYNC251 - to hold the sender up
                failed = len(self.heard) <= self._failing
                answer, status = (b"{}", b"503 No") if failed else (STREAM, b"200 OK")
                writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(answer), answer))
        writer.close()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Listen; yields the base URL."""
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()


def talk(think_s: float = 0.05) -> Trace:
    """Two turns of one conversation; the second holds the first one's answer of 64 tokens."""
    first = Row(0.0, -1, 128, 64, (1, 2), (3,), session="s-1")
    return Trace("talk", 64, [first, Row(think_s, 0, 256, 8, (1, 2, 3, 4))])


async def test_requests_say_what_their_rows_say() -> None:
    """Path, session header, length of the answer and the chat are the row's; a stream is asked to count its tokens."""
    recorder = Recorder()
    trace = Trace("t", 64, [Row(0.0, -1, 70, 5, (1,), session="s-1"), Row(0.0, -1, 70, 6, (2,))])
    async with recorder.listening() as url:
        sent = await send(url, trace, SETTINGS)
    named, unnamed = sorted(recorder.heard, key=lambda one: one.body["max_tokens"])
    assert named.headers[SESSION_HEADER] == "s-1"
    assert SESSION_HEADER not in unnamed.headers
    assert [named.body["messages"], unnamed.body["messages"]] == [messages(trace, index, {}) for index in (0, 1)]
    assert named.body["model"] == "m"
    assert named.body["stream_options"] == {"include_usage": True}
    assert [one.failure for one in sent.run.outcomes] == [None, None]


async def test_a_waiting_row_follows_the_real_answer_by_its_think_time() -> None:
    """It is not sent before the answer's end and the pause after it, and what the engine said stands in its history."""
    recorder, trace = Recorder(), talk()
    async with recorder.listening() as url:
        sent = await send(url, trace, SETTINGS)
    first, second = sent.run.outcomes
    assert [first.turn, second.turn] == [0, 1]
    assert second.sent_s >= first.end_s + 0.05
    assert recorder.heard[1].body["messages"] == messages(trace, 1, {0: "hello"})
    assert {"role": "assistant", "content": "hello"} in recorder.heard[1].body["messages"]


async def test_a_failed_row_does_not_keep_its_client_from_going_on() -> None:
    """The row after it is sent all the same, without the answer that never came."""
    recorder, trace = Recorder(failing=1), talk()
    async with recorder.listening() as url:
        sent = await send(url, trace, SETTINGS)
    assert [one.failure for one in sent.run.outcomes] == [Failure.STATUS, None]
    assert [one["role"] for one in recorder.heard[1].body["messages"]] == ["user", "user"]


async def test_engines_find_in_reality_what_the_rows_share() -> None:
    """One simulated engine with room for all finds the ideal share cached, but for blocks that straddle a boundary."""
    trace = generated("multi_turn", 1, rate=20.0, seconds=0.5, turns=(2, 3), think_s=(0.0, 0.05), answer_tokens=(4, 8))
    settings = SimSettings(engine=EngineSettings(prefill_tokens_per_s=1e6), time_factor=10.0)
    async with SimFleet(1, settings) as fleet:
        sent = await send(f"http://{fleet.addresses[0]}", trace, msgspec.structs.replace(SETTINGS, model="sim"))
    outcomes = sent.run.outcomes
    assert sorted(one.turn for one in outcomes) == list(range(trace.requests))
    assert not sent.run.failed
    assert {one.turn: one.output_tokens for one in outcomes} == {n: r.output_tokens for n, r in enumerate(trace.rows)}
    share = sum(one.cached_tokens for one in outcomes) / sum(one.prompt_tokens for one in outcomes)
    assert share == pytest.approx(trace.ideal_cached_share, abs=0.05)


async def test_a_sender_that_was_held_up_says_so() -> None:
    """With the event loop blocked past a row's time, that row's lag is what was lost; the figures are in doubt."""
    recorder = Recorder()
    trace = Trace("t", 64, [Row(0.0, -1, 70, 5, (1,)), Row(0.6, -1, 70, 5, (2,))])
    async with recorder.listening() as url:
        recorder.block_until_s = time.monotonic() + 1.5
        sent = await send(url, trace, SETTINGS)
    assert sent.lag.max is not None
    assert sent.lag.max >= 300
    assert sent.lag.late


async def test_a_run_ends_at_its_limit() -> None:
    """What is due later is not sent, counts as failed, and tells nothing of the sender's punctuality."""
    recorder = Recorder()
    trace = Trace("t", 64, [Row(0.0, -1, 70, 5, (1,)), Row(60.0, -1, 70, 5, (2,)), Row(0.0, 1, 70, 5, (3,))])
    async with recorder.listening() as url:
        sent = await send(url, trace, msgspec.structs.replace(SETTINGS, limit_s=0.5))
    assert {one.turn: one.failure for one in sent.run.outcomes} == {0: None, 1: Failure.UNSENT, 2: Failure.UNSENT}
    assert len(sent.lags_s) == 1


async def test_requests_beyond_the_limit_of_the_client_fail_unsent() -> None:
    """Holding them back here would hide their delay."""
    recorder = Recorder()
    async with recorder.listening() as url:
        sent = await send(url, talk(), msgspec.structs.replace(SETTINGS, max_in_flight=0))
    assert [one.failure for one in sent.run.outcomes] == [Failure.CLIENT_LIMIT, Failure.CLIENT_LIMIT]
    assert not recorder.heard


def test_lag_is_judged_by_the_last_hundredth() -> None:
    """One late request in a thousand is no reason for doubt, two in a hundred are; a run that sent nothing has none."""
    bound_s = LATE_MS / 1000.0
    assert not Sent(Run(0.0, 1.0, ()), [0.0] * 999 + [10 * bound_s]).lag.late
    assert Sent(Run(0.0, 1.0, ()), [0.0] * 98 + [2 * bound_s] * 2).lag.late
    lag = Sent(Run(0.0, 1.0, ()), [0.001, 0.003, 0.002]).lag
    assert (lag.p50, lag.p99, lag.max) == pytest.approx((2.0, 2.98, 3.0))
    assert Sent(Run(0.0, 1.0, ()), []).lag == Lag(None, None, None)
    assert not Lag(None, None, None).late

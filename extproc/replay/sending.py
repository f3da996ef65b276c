"""Sends the rows of a trace to a gateway at their times, and notes how late each of them went out."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from extproc.clock import Clock, SystemClock
from extproc.replay import text
from extproc.replay.rows import Row, Trace
from extproc.sim.client import Client
from extproc.sim.load import Asked, LoadSettings, Outcome, Requests, Run
from extproc.sim.replies import Reply
from extproc.sim.report import percentile

LATE_MS = 10.0
"""Lateness of the last hundredth of the requests from which a run tells more of this machine than of the policies.

It is less than two steps of an engine (6 ms each). Whatever holds the sender up holds up the rest of the stack on the
same cores: on two cores, the mean TTFT of runs with 2 to 6 ms lay within 21 ms of that of their replays, and runs with
12 to 50 ms, beside other work, were off by factors of 1.2 to 4.3.
"""

_AHEAD_S = 0.25
"""How long before its time a request's body is made: on time, and few at once."""
_USAGE = b',"stream_options":{"include_usage":true}}'


class Lag(msgspec.Struct, frozen=True):
    """How much later than planned requests were sent, in milliseconds; None when none was sent."""

    p50: float | None
    p99: float | None
    max: float | None

    @property
    def late(self) -> bool:
        """Whether the sender was too late for the figures to be believed."""
        return self.p99 is not None and self.p99 > LATE_MS


class Sent(msgspec.Struct, frozen=True):
    """A trace that was sent.

    Attributes:
        run: what became of every row; an outcome's `turn` is the row's index.
        lags_s: seconds from the planned to the real moment, for every row that was sent.
    """

    run: Run
    lags_s: Sequence[float]

    @property
    def lag(self) -> Lag:
        """The lags as a few numbers."""
        ordered = sorted(1000.0 * lag for lag in self.lags_s)
        return Lag(percentile(ordered, 0.5), percentile(ordered, 0.99), percentile(ordered, 1.0))


def _ignore(_outcome: Outcome) -> None:
    """Watch nothing."""


async def send(
    url: str,
    trace: Trace,
    settings: LoadSettings,
    watch: Callable[[Outcome], None] = _ignore,
    clock: Clock | None = None,
) -> Sent:
    """Send every row and return what became of them; takes no longer than `settings.limit_s`.

    A row with `after` is sent its think time after that row's real answer, which its history holds. A row that fails
    does not keep those that wait for it from being sent.

    Args:
        url: `http://host:port` of the gateway.
        trace: the rows.
        settings: how they are sent.
        watch: called with each outcome as it is known.
        clock: source of all moments.
    """
    clock = clock or SystemClock()
    async with Client(url) as client, asyncio.TaskGroup() as group:
        sender = _Sender(client, trace, settings, watch, clock, group)
        for index, row in enumerate(trace.rows):
            if row.after < 0:
                sender.plan(index, sender.started_s + row.at_s)
    return Sent(Run(sender.started_s, clock.monotonic(), tuple(sender.requests.outcomes)), tuple(sender.lags_s))


class _Sender:
    """One trace under way."""

    def __init__(
        self,
        client: Client,
        trace: Trace,
        settings: LoadSettings,
        watch: Callable[[Outcome], None],
        clock: Clock,
        group: asyncio.TaskGroup,
    ) -> None:
        self.lags_s: list[float] = []
        # The first body is made before its row is due as well.
        self.started_s = clock.monotonic() + _AHEAD_S
        self._client = client
        self._trace = trace
        self._model = settings.model
        self._now = clock.monotonic
        self._group = group
        self._deadline_s = self.started_s + settings.limit_s
        self.requests = Requests(client, settings, watch, self._now, self._deadline_s)
        self._answers: dict[int, str] = {}
        self._followers: dict[int, list[int]] = {}
        for index, row in enumerate(trace.rows):
            if row.after >= 0:
                self._followers.setdefault(row.after, []).append(index)

    def plan(self, index: int, due_s: float) -> None:
        """Send a row at a moment to come, and after it those that wait for its answer."""
        self._group.create_task(self._row(index, due_s))

    async def _row(self, index: int, due_s: float) -> None:
        row = self._trace.rows[index]
        await self._until(due_s - _AHEAD_S)
        request = self._request(index)
        await self._until(due_s)
        reply = Reply(self._now, stream=row.stream)
        sent_s = self._now()
        failure = await self.requests.ask(partial(self._sent, request, due_s), reply)
        asked = Asked(self._trace.name, row.session, index, row.stream)
        self.requests.note(asked, reply, sent_s, failure)
        followers = self._followers.pop(index, ())
        if followers and failure is None:
            self._answers[index] = reply.text
        for follower in followers:
            self.plan(follower, self._now() + self._trace.rows[follower].at_s)

    async def _until(self, moment_s: float) -> None:
        left_s = min(moment_s, self._deadline_s) - self._now()
        if left_s > 0:
            await asyncio.sleep(left_s)

    def _sent(self, request: bytes, due_s: float) -> bytes:
        self.lags_s.append(max(0.0, self._now() - due_s))
        return request

    def _request(self, index: int) -> bytes:
        row = self._trace.rows[index]
        body = text.body(self._trace, index, self._answers, self._model)
        if row.stream:
            # Engines count a stream's tokens only when asked to; the object's last byte is its closing brace.
            body = body[:-1] + _USAGE
        return _head(self._client.authority, row, len(body)) + body


def _head(authority: str, row: Row, length: int) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", f"host: {authority}", "content-type: application/json"]
    lines += (f"{name}: {value}" for name, value in text.headers(row).items())
    return "\r\n".join([*lines, f"content-length: {length}", "", ""]).encode()

"""Sends a workload to a gateway and notes what became of every request."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from extproc.clock import Clock, SystemClock
from extproc.sim.client import Client, Failure
from extproc.sim.replies import Reply
from extproc.sim.workload import Conversation, Message, Turn, messages

_PATH = "/v1/chat/completions"


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a workload is sent.

    Attributes:
        model: model name that is asked for.
        timeout_s: limit of one request.
        limit_s: limit of the whole run; what is not answered or not sent by then counts as failed.
        max_in_flight: requests beyond this count as failed unsent; queueing them here would hide the delay.
    """

    model: str = "sim"
    timeout_s: float = 60.0
    limit_s: float = 300.0
    max_in_flight: int = 512


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """What became of one request. Moments are the clock's monotonic seconds.

    Attributes:
        kind: of the conversation.
        session: the session id that was sent; empty for none.
        turn: place in the conversation, from 0.
        stream: whether a stream was asked for.
        sent_s: when it was sent, or given up unsent.
        first_byte_s: first byte of the answer's body; None if none came.
        first_s: first piece of content; None if none came. Without a stream it comes with the whole answer.
        end_s: last byte, or when it failed.
        status: HTTP status; 0 if none came.
        failure: None for a complete, well-formed answer.
        prompt_tokens: as the engine reported, as are the two that follow; 0 if it did not.
        cached_tokens: prompt tokens found in the engine's cache.
        output_tokens: tokens of the answer.
    """

    kind: str
    session: str
    turn: int
    stream: bool
    sent_s: float
    first_byte_s: float | None
    first_s: float | None
    end_s: float
    status: int
    failure: Failure | None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first content of a stream that was answered; None for anything else."""
        if self.failure is not None or not self.stream or self.first_s is None:
            return None
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token of a stream after its first, to the last byte; None for shorter and failed answers."""
        if self.ttft_s is None or self.first_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.output_tokens - 1)


class Run(msgspec.Struct, frozen=True):
    """A workload that was sent.

    Attributes:
        started_s: monotonic second of the start.
        ended_s: when the last request ended.
        outcomes: one for each request of the workload, in the order they ended.
    """

    started_s: float
    ended_s: float
    outcomes: tuple[Outcome, ...]

    @property
    def seconds(self) -> float:
        """Duration of the run."""
        return self.ended_s - self.started_s

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """Requests that were not answered as they should be."""
        return tuple(one for one in self.outcomes if one.failure is not None)


def in_flight(outcomes: Iterable[Outcome], moment_s: float) -> list[Outcome]:
    """Return the requests that were sent but not yet ended at `moment_s`, a monotonic second."""
    return [one for one in outcomes if one.sent_s <= moment_s < one.end_s]


class Asked(msgspec.Struct, frozen=True):
    """What an outcome says of its request: see `Outcome`."""

    kind: str
    session: str
    turn: int
    stream: bool


def _ignore(_outcome: Outcome) -> None:
    """Watch nothing."""


async def run(
    url: str,
    conversations: Sequence[Conversation],
    settings: LoadSettings | None = None,
    watch: Callable[[Outcome], None] = _ignore,
    clock: Clock | None = None,
) -> Run:
    """Send a workload and return what became of it; takes no longer than `settings.limit_s`.

    Args:
        url: `http://host:port` of the gateway.
        conversations: the workload.
        settings: how it is sent.
        watch: called with each outcome as it is known.
        clock: source of all moments.
    """
    clock = clock or SystemClock()
    async with Client(url) as client:
        sender = _Sender(client, settings or LoadSettings(), watch, clock)
        async with asyncio.TaskGroup() as group:
            for conversation in conversations:
                group.create_task(sender.converse(conversation))
    return Run(sender.started_s, clock.monotonic(), tuple(sender.requests.outcomes))


class Requests:
    """The requests of one run: lets each out within the run's limits, and notes what became of it.

    Attributes:
        outcomes: one for each request, in the order they ended.
    """

    def __init__(
        self,
        client: Client,
        settings: LoadSettings,
        watch: Callable[[Outcome], None],
        now: Callable[[], float],
        deadline_s: float,
    ) -> None:
        """Nothing is sent past `deadline_s`; `watch` is called with each outcome, and `now` gives seconds."""
        self.outcomes: list[Outcome] = []
        self._client = client
        self._settings = settings
        self._watch = watch
        self._now = now
        self._deadline_s = deadline_s
        self._in_flight = 0

    async def ask(self, request: Callable[[], bytes], reply: Reply) -> Failure | None:
        """Send what `request` makes, unless a limit is reached, and read the reply."""
        left_s = self._deadline_s - self._now()
        if left_s <= 0:
            return Failure.UNSENT
        if self._in_flight >= self._settings.max_in_flight:
            return Failure.CLIENT_LIMIT
        made = request()
        self._in_flight += 1
        try:
            failure = await self._client.send(made, reply, min(self._settings.timeout_s, left_s))
        finally:
            self._in_flight -= 1
        if failure is Failure.TIMEOUT and left_s < self._settings.timeout_s:
            return Failure.STOPPED
        return failure or reply.finish()

    def note(self, asked: Asked, reply: Reply, sent_s: float, failure: Failure | None) -> None:
        """Note what became of a request."""
        usage = reply.usage
        outcome = Outcome(
            kind=asked.kind,
            session=asked.session,
            turn=asked.turn,
            stream=asked.stream,
            sent_s=sent_s,
            first_byte_s=reply.first_byte_s,
            first_s=reply.first_s,
            end_s=self._now(),
            status=reply.code,
            failure=failure,
            prompt_tokens=usage.prompt_tokens if usage else 0,
            cached_tokens=usage.cached_tokens if usage else 0,
            output_tokens=usage.completion_tokens if usage else 0,
        )
        self.outcomes.append(outcome)
        self._watch(outcome)


class _Sender:
    """One run under way."""

    def __init__(self, client: Client, settings: LoadSettings, watch: Callable[[Outcome], None], clock: Clock) -> None:
        self.started_s = clock.monotonic()
        self._authority = client.authority
        self._model = settings.model
        self._now = clock.monotonic
        self._deadline_s = self.started_s + settings.limit_s
        self.requests = Requests(client, settings, watch, self._now, self._deadline_s)

    async def converse(self, conversation: Conversation) -> None:
        """Send the turns one after the other. A turn that fails does not keep its client from the next."""
        answers: list[str] = []
        due_s = self.started_s + conversation.at_s
        for number, turn in enumerate(conversation.turns):
            due_s = max(due_s, self._now()) + turn.think_s
            await asyncio.sleep(min(due_s, self._deadline_s) - self._now())
            reply = Reply(self._now, stream=turn.stream)
            sent_s = self._now()
            make = partial(
                _request, self._authority, self._model, conversation.session, turn, messages(conversation, answers)
            )
            failure = await self.requests.ask(make, reply)
            self.requests.note(
                Asked(conversation.kind, conversation.session, number, turn.stream), reply, sent_s, failure
            )
            answers.append(reply.text if failure is None else "")


def _request(authority: str, model: str, session: str, turn: Turn, history: Sequence[Message]) -> bytes:
    body = {"model": model, "messages": history, "max_tokens": turn.max_tokens, "stream": turn.stream}
    if turn.stream:
        body["stream_options"] = {"include_usage": True}
    payload = msgspec.json.encode(body)
    head = [f"POST {_PATH} HTTP/1.1", f"host: {authority}", "content-type: application/json"]
    if session:
        head.append(f"x-session-id: {session}")
    head.append(f"content-length: {len(payload)}\r\n\r\n")
    return "\r\n".join(head).encode() + payload

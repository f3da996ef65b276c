"""A steady load: requests go out at random moments at one rate, whatever becomes of those before them."""

import asyncio
import random
import time
from collections.abc import Sequence

import msgspec

from extproc.sim.client import Client, Failure
from extproc.sim.replies import Reply
from extproc.sim.workload import Message, text
from tests.chaos.run.judge import Sent
from tests.chaos.run.stack import MODEL, NUMBER

LIMIT_S = 40.0
"""Limit of a whole answer."""
SYSTEMS = 8
SYSTEM_TOKENS = 600
QUESTION_TOKENS = (40, 200)
ANSWER_TOKENS = (16, 48)
TURNS = (4, 10)
THINK_S = 1.0
"""A session rests at least so long between an answer and its next question."""
SESSIONS = 40
"""Sessions that go on at the same time, at the least; more when all of them are waiting for an answer."""
STREAMED = 0.6


class _Session:
    """One conversation, and what it will still ask."""

    def __init__(self, number: int, opening: Message, rng: random.Random) -> None:
        self.number = number
        self.turn = 0
        self.left = rng.randint(*TURNS)
        self.messages = [opening]


class _Heard(Reply):
    """A reply that notes when its status came."""

    head_s: float | None = None

    def status(self, code: int) -> None:
        """See `Reply.status`."""
        super().status(code)
        self.head_s = time.monotonic()


class Load:
    """The clients.

    Attributes:
        sent: every request that has ended, in the order they ended.
    """

    def __init__(self, urls: Sequence[str], rate: float, seed: int) -> None:
        """`urls` are the Envoys, which requests go to in turn; `rate` is in requests a second."""
        self.sent: list[Sent] = []
        self._rate = rate
        self._rng = random.Random(seed)
        self._clients = [Client(url) for url in urls]
        self._openings = [Message("system", text(self._rng, SYSTEM_TOKENS)) for _ in range(SYSTEMS)]
        self._resting: list[tuple[float, _Session]] = []
        self._born = self._alive = self._asked = 0

    async def run(self, seconds: float) -> None:
        """Send for so long; returns when every answer has come or was given up."""
        end = due = time.monotonic()
        end += seconds
        async with self._clients[0], self._clients[1], asyncio.TaskGroup() as group:
            while (due := due + self._rng.expovariate(self._rate)) < end:
                await asyncio.sleep(due - time.monotonic())
                group.create_task(self._ask(self._next()))

    def _next(self) -> _Session:
        """The session that has rested longest, or a new one."""
        if self._alive >= SESSIONS and self._resting and self._resting[0][0] <= time.monotonic():
            return self._resting.pop(0)[1]
        self._born, self._alive = self._born + 1, self._alive + 1
        return _Session(self._born, self._rng.choice(self._openings), self._rng)

    async def _ask(self, session: _Session) -> None:
        rng, number = self._rng, self._asked
        self._asked += 1
        stream, client = rng.random() < STREAMED, self._clients[number % len(self._clients)]
        question = Message("user", text(rng, rng.randint(*QUESTION_TOKENS)))
        asked = [*session.messages, question]
        request = _request(client.authority, number, session.number, asked, rng.randint(*ANSWER_TOKENS), stream=stream)
        reply, sent_s = _Heard(time.monotonic, stream=stream), time.monotonic()
        failure = await client.send(request, reply, LIMIT_S) or reply.finish()
        self.sent.append(
            Sent(
                number=number,
                session=session.number,
                turn=session.turn,
                envoy=number % len(self._clients),
                stream=stream,
                sent_s=sent_s,
                head_s=reply.head_s,
                first_byte_s=reply.first_byte_s,
                end_s=time.monotonic(),
                status=reply.code,
                failure=failure,
            )
        )
        self._rest(session, [*asked, Message("assistant", reply.text)], failure)

    def _rest(self, session: _Session, history: list[Message], failure: Failure | None) -> None:
        """A failed turn is asked no second time; the next question stands in its place."""
        if failure is None:
            session.messages = history
        session.turn += 1
        session.left -= 1
        if session.left:
            self._resting.append((time.monotonic() + THINK_S, session))
        else:
            self._alive -= 1


def _request(
    authority: str, number: int, session: int, asked: Sequence[Message], max_tokens: int, *, stream: bool
) -> bytes:
    body: dict[str, object] = {"model": MODEL, "messages": asked, "max_tokens": max_tokens, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    payload = msgspec.json.encode(body)
    head = [
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {authority}",
        "content-type: application/json",
        f"x-session-id: chaos-{session}",
        f"{NUMBER}: {number}",
        f"content-length: {len(payload)}\r\n\r\n",
    ]
    return "\r\n".join(head).encode() + payload

"""People who talk: sessions of several turns, clients that leave before the end, and what became of every request."""

import asyncio
import itertools
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from extproc.envoy.contract import VERSION_HEADER
from extproc.sim.workload import text
from tests.acceptance.local import CHAT
from tests.waiting import until

_PATIENT = aiohttp.ClientTimeout(total=60.0)
_DONE = b"data: [DONE]"
_MOST = 200
_SHOWN = 10


class Habits(msgspec.Struct, frozen=True, kw_only=True):
    """How people talk.

    Attributes:
        rate: requests a second.
        turns: fewest and most turns of a session.
        think_s: pause between an answer and the next question.
        question_tokens: shortest and longest question.
        max_tokens: longest answer that is accepted; 0 for no limit, so that engines end answers by themselves.
        stream_share: share of requests that are streamed.
        leaves: chance to leave in the middle of a stream, by the version that answers.
        model: what is asked for.
        headers: sent with each request.
    """

    rate: float = 50.0
    turns: tuple[int, int] = (1, 3)
    think_s: float = 0.2
    question_tokens: tuple[int, int] = (150, 250)
    max_tokens: int = 0
    stream_share: float = 0.8
    leaves: Mapping[str, float] = {}
    model: str = "chat"
    headers: Mapping[str, str] = {}


class Got(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request. Moments are the loop's seconds.

    Attributes:
        session: who asked.
        turn: place in the session, from 0.
        version: who answered, by the answer's header; empty where it has none.
        status: of the answer; 0 for none.
        failure: what was wrong with it; empty for nothing.
        left: the client left before the end.
        stream: whether it was streamed.
        sent_s: when it was sent.
        first_s: when the first piece of its body came; 0 for none.
        ended_s: when it ended.
        question_tokens: length of its question.
        tokens: of its answer, of streams only.
    """

    session: str
    turn: int
    version: str = ""
    status: int = 0
    failure: str = ""
    left: bool = False
    stream: bool = False
    sent_s: float = 0.0
    first_s: float = 0.0
    ended_s: float = 0.0
    question_tokens: int = 0
    tokens: int = 0


class People:
    """Use as an async context manager: people talk within the block; on exit the last answers are awaited.

    Attributes:
        got: what became of each request, in the order of their ends.
        habits: how they talk; change it at any time.
    """

    def __init__(self, urls: Sequence[str], habits: Habits | None = None, seed: int = 1) -> None:
        """They talk to these gateways in turn."""
        self.got: list[Got] = []
        self.habits = habits or Habits()
        self._urls = itertools.cycle(urls)
        self._rng = random.Random(seed)
        self._name = f"person-{seed}"
        self._numbers = itertools.count()
        self._asked = 0
        self._talking: set[asyncio.Task[None]] = set()
        self._coming: asyncio.Task[None] | None = None
        self._http: aiohttp.ClientSession | None = None

    @property
    def failed(self) -> list[Got]:
        """Requests that were not answered as they should be; those whose client left are not among them."""
        return [one for one in self.got if one.failure]

    def by_version(self, since_s: float = 0.0) -> dict[str, int]:
        """How many requests, sent since then, each version answered."""
        found: dict[str, int] = defaultdict(int)
        for one in self.got:
            if one.version and one.sent_s >= since_s:
                found[one.version] += 1
        return dict(found)

    def touched(self, version: str, since_s: float = 0.0) -> float:
        """Share of the sessions since then that had any answer of a version."""
        everyone = {one.session for one in self.got if one.sent_s >= since_s}
        those = {one.session for one in self.got if one.sent_s >= since_s and one.version == version}
        return len(those) / max(1, len(everyone))

    def sessions(self, until_s: float = math.inf) -> dict[str, list[str]]:
        """The versions that answered each session, turn by turn, of requests that were sent until then and answered."""
        found: dict[str, list[str]] = defaultdict(list)
        for one in sorted(self.got, key=lambda one: one.turn):
            if one.version and one.sent_s < until_s:
                found[one.session].append(one.version)
        return found

    def changed(self, until_s: float = math.inf) -> dict[str, list[str]]:
        """The sessions among these that more than one version answered."""
        return {name: versions for name, versions in self.sessions(until_s).items() if len(set(versions)) > 1}

    async def more(self, answers: int) -> None:
        """Wait until so many more requests have ended."""
        wanted = len(self.got) + answers
        await until(lambda: len(self.got) >= wanted)

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(timeout=_PATIENT, connector=aiohttp.TCPConnector(limit=0))
        self._coming = asyncio.create_task(self._come())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._coming is not None
        assert self._http is not None
        self._coming.cancel()
        self.habits = msgspec.structs.replace(self.habits, turns=(0, 0))
        await asyncio.gather(self._coming, return_exceptions=True)
        await asyncio.gather(*self._talking)
        await self._http.close()

    def none_failed(self) -> None:
        """Raises AssertionError when any request failed, with the first of them."""
        told = "\n".join(str(one) for one in self.failed[:_SHOWN])
        assert not self.failed, f"{len(self.failed)} of {len(self.got)}:\n{told}"

    async def _come(self) -> None:
        loop = asyncio.get_running_loop()
        began, rate, asked = loop.time(), self.habits.rate, 0
        while True:
            if rate != self.habits.rate:
                began, rate, asked = loop.time(), self.habits.rate, self._asked
            while self._asked - asked < (loop.time() - began) * rate and len(self._talking) < _MOST:
                turns = self._rng.randint(*self.habits.turns)
                self._asked += turns
                task = asyncio.create_task(self._talk(f"{self._name}-{next(self._numbers)}", turns))
                self._talking.add(task)
                task.add_done_callback(self._talking.discard)
            await asyncio.sleep(0.02)

    async def _talk(self, session: str, turns: int) -> None:
        assert self._http is not None
        messages: list[dict[str, str]] = []
        for turn in range(turns):
            if turn:
                await asyncio.sleep(self.habits.think_s)
                if self.habits.turns == (0, 0):
                    return
            tokens = self._rng.randint(*self.habits.question_tokens)
            messages.append({"role": "user", "content": text(self._rng, tokens)})
            stream = self._rng.random() < self.habits.stream_share
            asked = Got(session=session, turn=turn, stream=stream, question_tokens=tokens)
            got, said = await ask(self._http, next(self._urls), asked, messages, self.habits, self._rng.random())
            self.got.append(got)
            if got.failure or got.left:
                return
            messages.append({"role": "assistant", "content": said})


async def ask(
    http: aiohttp.ClientSession,
    url: str,
    asked: Got,
    messages: Sequence[Mapping[str, str]],
    habits: Habits,
    mood: float,
) -> tuple[Got, str]:
    """Send one turn; what became of it, and the text of the answer. Clients leave when `mood` is below their chance."""
    body: dict[str, Any] = {"model": habits.model, "messages": messages, "stream": asked.stream}
    if habits.max_tokens:
        body["max_tokens"] = habits.max_tokens
    headers = {"content-type": "application/json", "x-session-id": asked.session, **habits.headers}
    now: Callable[[], float] = asyncio.get_running_loop().time
    sent_s, first_s, received = now(), 0.0, bytearray()
    version, status, failure, left, said = "", 0, "", False, ""
    try:
        async with http.post(f"{url}{CHAT}", data=json.dumps(body).encode(), headers=headers) as answer:
            status, version = answer.status, answer.headers.get(VERSION_HEADER, "")
            leaves = asked.stream and mood < habits.leaves.get(version, 0.0)
            async for piece in answer.content.iter_any():
                first_s = first_s or now()
                received += piece
                if leaves:
                    left = True
                    answer.close()
                    break
        if not left:
            failure, said = _read(status, bytes(received), stream=asked.stream)
    except (aiohttp.ClientError, TimeoutError) as error:
        failure = type(error).__name__
    got = msgspec.structs.replace(
        asked,
        version=version,
        status=status,
        failure=failure,
        left=left,
        sent_s=sent_s,
        first_s=first_s,
        ended_s=now(),
        tokens=max(0, bytes(received).count(b'"content":"') - 1) if asked.stream else 0,
    )
    return got, said


def _read(status: int, data: bytes, *, stream: bool) -> tuple[str, str]:
    """What is wrong with an answer, and what it says."""
    if status != 200:
        return f"status {status}: {data[:200]!r}", ""
    if not stream:
        return "", str(json.loads(data)["choices"][0]["message"]["content"])
    if _DONE not in data:
        return "no [DONE]", ""
    said = []
    for line in data.splitlines():
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                return "an error in the stream", ""
            said += [choice["delta"].get("content") or "" for choice in event["choices"]]
    return "", "".join(said)

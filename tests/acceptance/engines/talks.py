"""Conversations of several turns behind a few shared system prompts, sent one request after the other."""

import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from extproc.sim.workload import text
from tests.acceptance.engines.stand import Asked, Stand
from tests.waiting import until_async

_SYSTEMS = 5
_OPEN = 6
BLOCK_TOKENS = 16
_ANSWER_TOKENS = (18, 50)
"""A block more than the prompt has: what is expected before the engine tells is the prompt's own blocks alone."""


class Tried(msgspec.Struct):
    """What was compared.

    Attributes:
        requests: all requests.
        exact: those whose cached tokens were predicted to the token, by a precise profile.
        hits: those that found something.
        stored: prompt tokens that were computed.
        rungs: how prompts were matched.
        off: predicted and reported of those that were not exact.
    """

    requests: int = 0
    exact: int = 0
    hits: int = 0
    stored: int = 0
    rungs: Counter[str] = msgspec.field(default_factory=Counter)
    off: list[tuple[float, int]] = msgspec.field(default_factory=list)

    def note(self, asked: Asked) -> None:
        """Take in one request."""
        self.requests += 1
        self.rungs[asked.pick.matched_by] += 1
        self.hits += asked.reported > 0
        self.stored += int(asked.usage["prompt_tokens"]) - asked.reported
        right = asked.predicted == asked.reported and asked.decision.prompt_tokens == asked.usage["prompt_tokens"]
        self.exact += right and asked.pick.matched_by == "precise"
        if not right:
            self.off.append((asked.predicted, asked.reported))


class _Talk(msgspec.Struct):
    messages: list[dict[str, str]]


_NEXT = {"role": "user", "content": "what now?"}


class Talks:
    """The conversations of one pool: some open at a time, each may be the next to go on.

    Args:
        here: the stack.
        pool: the pool, and its model.
        seed: of the texts.
        system_tokens: length of a shared system prompt.
        question_tokens: shortest and longest question.
    """

    def __init__(
        self, here: Stand, pool: str, seed: int, system_tokens: int = 400, question_tokens: tuple[int, int] = (20, 200)
    ) -> None:
        self._here = here
        self._pool = pool
        self._rng = random.Random(f"{pool} {seed}")
        self._span = question_tokens
        self._systems = [text(self._rng, system_tokens) for _ in range(_SYSTEMS)]
        self._open: list[_Talk] = []
        self._last: tuple[Asked, list[dict[str, str]]] | None = None

    async def turn(self) -> Asked:
        """Send the next turn of one of them."""
        rng = self._rng
        if len(self._open) < _OPEN or rng.random() < 0.3:
            talk = _Talk([{"role": "system", "content": rng.choice(self._systems)}])
            self._open = [*self._open[-(_OPEN - 1) :], talk]
        else:
            talk = rng.choice(self._open)
        talk.messages.append({"role": "user", "content": text(rng, rng.randint(*self._span))})
        asked = await self._here.ask(self._pool, talk.messages, max_tokens=rng.randint(*_ANSWER_TOKENS))
        talk.messages.append({"role": "assistant", "content": asked.text})
        self._last = asked, list(talk.messages)
        return asked

    async def known(self) -> None:
        """Wait until the worker knows what the last turn left in the cache of the engine that served it.

        That is all its full blocks, but for the last token, which nobody computed; and what it evicted is gone: the
        worker knows as many blocks as the engine holds. A full cache always holds as many: that alone says little.
        """
        if self._last is None:
            return
        asked, messages = self._last
        tokens = int(asked.usage["prompt_tokens"]) + int(asked.usage["completion_tokens"]) - 1
        left = tokens // BLOCK_TOKENS * BLOCK_TOKENS

        async def so() -> bool:
            found = (await self._here.expected(self._pool, [*messages, _NEXT]))[asked.decision.pick]
            told = found.matched_by == "precise" and found.matched_tokens >= left
            return told and await self._here.is_in_step(self._pool)

        await until_async(so)

    async def compare(self, requests: int) -> Tried:
        """So many turns, each after the worker knows what the one before did to the cache; one goes before all."""
        tried = Tried()
        await self.turn()
        await self.known()
        for _ in range(requests):
            tried.note(await self.turn())
            await self.known()
        return tried


def line(pool: str, tried: Tried) -> str:
    """One line for people."""
    return (
        f"{pool}: {tried.exact} of {tried.requests} predicted to the token ({tried.exact / tried.requests:.1%}), "
        f"{tried.hits} found something, {tried.stored:,} tokens computed, matched by {dict(tried.rungs)}"
    )


def worst(off: Sequence[tuple[float, int]], shown: int = 8) -> str:
    """Some of what was not exact, for the text of a failed assertion."""
    return ", ".join(f"expected {predicted:.0f}, found {reported}" for predicted, reported in off[:shown])

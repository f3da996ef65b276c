"""Which endpoint answered which turn of a conversation, and how many tokens its cache then held of it.

An engine caches what it generates as it caches a prompt. The next turn carries the answer back, so more of it is cached
than of any prompt that was decided before. Only digests of conversations are kept here, never their text.
"""

import math
from collections import OrderedDict
from collections.abc import Collection
from itertools import islice

import msgspec

_REMEMBERED = 65_536
_GAIN = 0.125
_NEARLY = 0.95
"""The share of a turn's prompt that counts as all of it: the bytes of a token differ along a prompt."""


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One answered turn, lengths in tokens as the endpoint reported them."""

    endpoint: str
    prompt_tokens: float
    output_tokens: float

    @property
    def tokens(self) -> float:
        """What the endpoint computed of the conversation: of the last generated token nothing was."""
        return self.prompt_tokens + max(0.0, self.output_tokens - 1.0)


def cached(turn: Turn, base: float, prompt: float, tokens_a_block: float, share: float) -> float:
    """Tokens of a follow-up that the endpoint which answered `turn` has cached.

    An engine evicts from the end of a sequence: where the turn's own prompt is not held as a whole, its answer is gone.

    Args:
        turn: the turn that is continued.
        base: what the endpoint's profile holds of the follow-up.
        prompt: the follow-up's length.
        tokens_a_block: tokens of one block of it.
        share: how much of an answer the next prompt finds: see `AnswerReuse`.
    """
    earlier, whole = min(turn.prompt_tokens, prompt), min(turn.tokens, prompt)
    if base + tokens_a_block < turn.prompt_tokens * _NEARLY:
        return base
    return max(base, earlier) + share * max(0.0, whole - max(base, earlier))


class Turns:
    """Answered turns by digest; those unused for longest are forgotten."""

    def __init__(self, limit: int = _REMEMBERED) -> None:
        """`limit` is the number of turns that are kept."""
        self._limit = limit
        self._turns: OrderedDict[bytes, Turn] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def learn(self, digest: bytes, turn: Turn) -> None:
        """Keep an answered turn; one without a digest, or whose lengths are unknown, is passed over."""
        if not digest or not 0.0 < turn.prompt_tokens < math.inf or not 0.0 <= turn.output_tokens < math.inf:
            return
        self._turns[digest] = turn
        self._turns.move_to_end(digest)
        if len(self._turns) > self._limit:
            self._turns.popitem(last=False)

    def find(self, digest: bytes) -> Turn | None:
        """The turn with this digest; None when there is none. Changes nothing: who only asks is no use of it."""
        return self._turns.get(digest) if digest else None

    def use(self, digest: bytes) -> Turn | None:
        """The turn with this digest, which is continued; None when there is none."""
        turn = self.find(digest)
        if turn is not None:
            self._turns.move_to_end(digest)
        return turn

    def of(self, endpoint: str, most: int) -> list[tuple[bytes, float, float]]:
        """The newest turns that an endpoint answered, oldest first: digest, prompt and output tokens."""
        answered = (
            (digest, turn.prompt_tokens, turn.output_tokens)
            for digest, turn in reversed(self._turns.items())
            if turn.endpoint == endpoint
        )
        return list(islice(answered, most))[::-1]

    def forget(self, endpoints: Collection[str]) -> None:
        """Forget what these endpoints answered: they restarted, or left."""
        gone = [digest for digest, turn in self._turns.items() if turn.endpoint in endpoints]
        for digest in gone:
            del self._turns[digest]


class AnswerReuse:
    """Share of an answer's tokens that the next turn finds cached, learnt in the pool.

    It is 1 where a template renders an answer as it was generated, and 0 where it leaves the reasoning out, because the
    prompt then differs from its answer's first token on. An exponential mean over about 8 follow-ups.
    """

    def __init__(self) -> None:
        self.share = 1.0

    def resume(self, share: float) -> None:
        """Go on from what another worker came to."""
        if 0.0 <= share <= 1.0:
            self.share = share

    def observe(self, turn: Turn, cached_tokens: float, block_tokens: int) -> None:
        """Take in a follow-up of `turn`, answered by the same endpoint.

        Args:
            turn: the turn that was continued.
            cached_tokens: what the endpoint reported of the follow-up.
            block_tokens: tokens in its KV block; reports come in whole blocks.
        """
        answer, found = turn.tokens - turn.prompt_tokens, cached_tokens - turn.prompt_tokens
        # Where the turn itself was evicted the report says nothing of its answer, nor does rounding of a short one.
        if answer >= 2 * block_tokens and found > -block_tokens:
            seen = min(max(found / (answer - block_tokens / 2), 0.0), 1.0)
            self.share += _GAIN * (seen - self.share)

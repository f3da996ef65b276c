"""Request bodies of a stated size: a beginning that many share, an end of their own."""

import random

import msgspec

MODEL = "m"
PATH = "/v1/chat/completions"

_WORDS = (
    "route",
    "cache",
    "prefix",
    "token",
    "engine",
    "block",
    "queue",
    "answer",
    "the",
    "of",
    "a",
    "to",
    "is",
    "and",
)


class Prompts:
    """Chat bodies whose first half comes from a few shared texts, as system prompts and histories do.

    Args:
        size: bytes of a body.
        shared: how many different first halves there are.
        seed: makes the texts repeatable.
    """

    def __init__(self, size: int, shared: int = 16, seed: int = 1) -> None:
        self._rng = random.Random(seed)
        self._size = size
        frame = len(self._body("", "", stream=False))
        half = max(1, (size - frame) // 2)
        self._own = max(1, size - frame - half)
        self._heads = [self._text(half) for _ in range(shared)]

    def next(self, *, stream: bool = False) -> bytes:
        """One more body, never the same twice."""
        return self._body(self._rng.choice(self._heads), self._text(self._own), stream=stream)

    def _text(self, size: int) -> str:
        rng = self._rng
        # A fresh kilobyte and then repetitions of shuffled words: unlike from its first block on, and cheap to make.
        words = rng.choices(_WORDS, k=min(size, 4096) // 4 + 1)
        text = f"{rng.getrandbits(64):016x} {' '.join(words)} "
        return (text * (size // len(text) + 1))[:size]

    def _body(self, head: str, own: str, *, stream: bool) -> bytes:
        messages = [{"role": "system", "content": head}, {"role": "user", "content": own}]
        return msgspec.json.encode({"model": MODEL, "stream": stream, "max_tokens": 64, "messages": messages})

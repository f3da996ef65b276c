"""Which conversations run in a pool, as far as one worker knows: those that it sent there, and those it was told of.

A conversation is known by a keyed digest of 16 bytes, never by its session or its text. Times are of one clock of this
worker, in seconds.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

DIGEST_BYTES: Final = 16
_REMEMBERED: Final = 65_536
"""Of each kind; 10.5 MB of them."""
_SAVED: Final = 16_384
"""Those told last go into a snapshot: 0.5 MB."""


class Conversations:
    """Conversations by digest; those unused for longest are forgotten."""

    def __init__(self, limit: int = _REMEMBERED) -> None:
        """`limit` is the number of conversations of each kind that are kept: own ones, and those all know of."""
        self._limit = limit
        self._own: OrderedDict[bytes, float] = OrderedDict()
        self._told: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        """How many are known."""
        return len(self._own.keys() | self._told.keys())

    def used(self, digest: bytes, now: float) -> None:
        """This worker sent a turn to the pool."""
        _put(self._own, digest, now, self._limit)

    def told(self, digests: bytes, now: float) -> None:
        """All workers are told, or were at that time, that these run here; packed digests."""
        for at in range(0, len(digests) - DIGEST_BYTES + 1, DIGEST_BYTES):
            _put(self._told, digests[at : at + DIGEST_BYTES], now, self._limit)

    def last(self, digest: bytes) -> float:
        """When a conversation was last known to run here; minus infinity for one that is not known."""
        return max(self._own.get(digest, -math.inf), self._told.get(digest, -math.inf))

    def told_at(self, digest: bytes) -> float:
        """When all were told of it; minus infinity for never."""
        return self._told.get(digest, -math.inf)

    def own(self, since: float) -> list[bytes]:
        """Conversations that this worker sent here since then, the one used last first."""
        return list(_newest(self._own, since))

    def learnt(self, now: float) -> list[tuple[bytes, float]]:
        """The conversations that all were told of, and how long ago, for who joins; oldest first."""
        newest = zip(reversed(self._told.items()), range(_SAVED), strict=False)
        return [(digest, max(0.0, now - at)) for (digest, at), _ in newest][::-1]

    def resume(self, learnt: Sequence[tuple[bytes, float]], then: float) -> None:
        """Take over what another worker had `learnt` by then."""
        for digest, age_s in learnt:
            if then - age_s > self.told_at(digest):
                _put(self._told, digest, then - age_s, self._limit)

    def forget(self) -> None:
        """Forget all: the pool is out of use."""
        self._own.clear()
        self._told.clear()


def _put(known: OrderedDict[bytes, float], digest: bytes, now: float, limit: int) -> None:
    known[digest] = now
    known.move_to_end(digest)
    if len(known) > limit:
        known.popitem(last=False)


def _newest(known: OrderedDict[bytes, float], since: float) -> Iterator[bytes]:
    for digest, at in reversed(known.items()):
        if at < since:
            return
        yield digest

"""What of a rank's precise profile the workers have not been told yet, as deltas for the pool's feed.

A profile is told as `Exact`, which empties what workers had, then all that is held, then what changes. Changes wait as
the last state of each block, so that a block that came and went while nothing could be sent costs nothing, and what
waits is bounded: past `_MOST_WAITING` blocks it is forgotten, and everything is told anew from the chain. However long
the store was gone, workers end up with what the engine told.

Everything is read off the chain when it is sent, never before: so it does not matter that changes and the rest of a
profile told anew overtake one another.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Final

from extproc.engines.kv_values import Tier
from extproc.fleet.kv_chain import Chain, Change, Emptied
from extproc.state.deltas import Cached, Delta, Evicted, Exact, pack

_MOST_WAITING: Final = 16_384
"""Blocks of one rank whose change waits: half a minute of an engine that stores 500 blocks a second, in 2 MB."""
_MOST_IN_DELTA: Final = 4096
"""Blocks of one delta: 32 KB, which workers apply in about 2 ms."""


class Telling:
    """One rank of one endpoint.

    Attributes:
        is_open: the workers use this profile, or will when all is told.
    """

    def __init__(self, endpoint: str, rank: int, chain: Chain) -> None:
        """Nothing is told before `begin`."""
        self.is_open = False
        self._endpoint = endpoint
        self._rank = rank
        self._chain = chain
        self._started_at = 0.0
        self._first: Exact | None = None
        self._rest: Iterator[Change] | None = None
        self._waiting: dict[Tier, dict[int, bool]] = {tier: {} for tier in Tier}
        self._count = 0

    @property
    def is_due(self) -> bool:
        """Whether there is anything to tell."""
        return self._first is not None or self._rest is not None or self._count > 0

    def begin(self, started_at: float) -> None:
        """Tell the profile from its beginning, of an engine that started then."""
        self.is_open = True
        self._started_at = started_at
        self._anew()

    def end(self, started_at: float) -> None:
        """There is no such profile, or no longer: workers use the estimated one."""
        self._first = Exact(self._endpoint, self._rank, 0, started_at)
        self.is_open = False
        self._forget()

    def note(self, change: Change | Emptied) -> bool:
        """Take in what the chain has just changed; False when too much waits, and all is told anew instead."""
        if not self.is_open:
            return True
        if isinstance(change, Emptied):
            self._anew()
            return True
        waiting = self._waiting[change.tier]
        before = len(waiting)
        waiting.update(dict.fromkeys(change.blocks, change.held))
        self._count += len(waiting) - before
        if self._count <= _MOST_WAITING:
            return True
        self._anew()
        return False

    def take(self, most: int) -> list[Delta]:
        """The next deltas, of about `most` blocks in all; they count as told."""
        deltas: list[Delta] = []
        if self._first is not None:
            deltas.append(self._first)
            self._first = None
        while most > 0 and self._rest is not None:
            change = next(self._rest, None)
            if change is None:
                self._rest = None
            else:
                deltas += self._told(change)
                most -= len(change.blocks)
        for tier, waiting in self._waiting.items():
            if waiting and most > 0:
                some = list(islice(waiting.items(), most))
                most -= len(some)
                self._count -= len(some)
                if len(some) == len(waiting):
                    waiting.clear()
                else:
                    for block, _ in some:
                        del waiting[block]
                for held in (False, True):
                    blocks = [block for block, now in some if now is held]
                    deltas += self._told(Change(tier, held, blocks))
        return deltas

    def _anew(self) -> None:
        self._forget()
        self._first = Exact(self._endpoint, self._rank, self._chain.block_tokens, self._started_at)
        self._rest = self._chain.held()

    def _forget(self) -> None:
        self._rest = None
        for waiting in self._waiting.values():
            waiting.clear()
        self._count = 0

    def _told(self, change: Change) -> Iterator[Delta]:
        kind = Cached if change.held else Evicted
        for start in range(0, len(change.blocks), _MOST_IN_DELTA):
            packed = pack(change.blocks[start : start + _MOST_IN_DELTA])
            yield kind(self._endpoint, self._rank, change.tier, packed, self._started_at)

"""What one endpoint is believed to hold: the last use of each of its blocks, in the order of its engine's eviction."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from extproc.state.blocktable import BlockTable, Sorted, Words, leading, sort
from extproc.state.image import ProfileImage
from extproc.state.uses import Uses

_SHARES = 32
"""A prompt is stamped in pieces of at most a 32nd of the capacity, since stamps are evicted whole; and so much is
evicted in excess, at most, to make room for the next prompts. Thus a full profile holds 30/32 of its capacity or more;
of less than 32 blocks all of it."""
_MOST_SPARE = 4096
"""Blocks evicted in excess, at most."""
PIECES = 64
"""A stamp is the use counter times 64, plus the number of the piece, the highest for the head. In 64 bits the counter
lasts for 2**58 prompts of one endpoint: nine million years at 1,000 a second."""


class Profile(BlockTable):
    """What one endpoint holds: the stamps of its blocks, and how many blocks have which.

    Attributes:
        name: the endpoint.
        number: what `_Heads` gave it, -1 for none.
        clock: number of prompts added, counted from what it began with.
        uses: counts of the stamps; its floor is `least`.
    """

    def __init__(self, name: str, clock: int) -> None:
        super().__init__(least=(clock + 1) * PIECES)
        self.name = name
        self.number = -1
        self.clock = clock
        self.uses = Uses(self.least)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots and of the counts."""
        return super().nbytes + self.uses.nbytes

    def holds(self, block: int) -> bool:
        """Whether it holds this block."""
        return self.get(block) >= self.least

    def depth(self, blocks: Sequence[int]) -> int:
        """How many leading blocks of a prompt it holds."""
        return leading((self,), blocks)[0]

    def add(self, blocks: Sequence[int], capacity: int) -> tuple[bool, int]:
        """Whether the first block was not held before, and how many entries were evicted."""
        self.clock += 1
        uses, least = self.uses, self.least
        piece = max(1, -(-capacity // _SHARES))
        stamp = self.clock * PIECES
        runs: list[tuple[int, int]] = []
        for start in reversed(range(0, min(len(blocks), capacity), piece)):
            part = blocks[start : min(start + piece, capacity)]
            uses.count(stamp, len(part))
            runs = self.put(part, stamp)
            for old, entries in runs:
                if old >= least:
                    uses.discount(old, entries)
            stamp += 1
        evicted = 0
        if uses.held > capacity:
            evicted = uses.shrink(capacity - min(capacity // _SHARES, _MOST_SPARE))
            self.least = uses.floor
        return bool(runs) and runs[0][0] < least, evicted

    def remove(self, blocks: Iterable[int]) -> None:
        """Hold these blocks no longer."""
        for block in blocks:
            stamp = self.get(block)
            if stamp >= self.least:
                self.change(block, 0)
                self.uses.discount(stamp, 1)

    def drop(self, stamp: int) -> int:
        """Evict every entry with a lower stamp; returns how many."""
        evicted = self.uses.drop(stamp)
        self.least = self.uses.floor
        return evicted

    def stamps(self, blocks: Sequence[int]) -> list[int]:
        """Last uses of the leading blocks it holds; the same stamp at two places is that of all between them."""
        found: list[int] = []
        depth = self.depth(blocks)
        held = blocks[:depth]
        while len(found) < depth:
            stamp = self.get(held[len(found)])
            same = leading((self,), held, stamp)[0] - len(found)
            found += [stamp // PIECES] * max(1, same)
        return found

    def become(self, image: ProfileImage, entries: Sorted) -> Iterator[None]:
        """Hold what an image holds, when it is through; `entries` are `entries_of` it at this profile's clock."""
        base = (self.clock + 1) * PIECES
        yield from self.fill(entries)
        self.uses = Uses.of(base, image.stamps + np.uint64(base), image.counts)
        self.least = base
        self.clock += 1 + image.clock


def entries_of(image: ProfileImage, clock: int) -> Sorted:
    """Entries of an image for a profile that begins at `clock`."""
    base = np.uint64((clock + 1) * PIECES)
    values: Words = np.repeat(image.stamps + base, image.counts)
    return sort(image.blocks, values)

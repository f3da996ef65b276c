"""How many entries of one profile were last used when: the order of eviction without a list of the entries."""

from array import array
from bisect import bisect_left
from typing import Self

import numpy as np
import numpy.typing as npt

_FEWEST_ROWS = 64
_GRAINS = 1 << 14


class Uses:
    """Counts of entries by the stamp of their last use.

    An entry that is used again moves from the row of its old stamp to that of its new one. The rows ascend, so that
    evicting the oldest entries is raising `floor`: an entry with a lower stamp is no longer held, wherever it lies.

    Rows that count little are merged when there are many. All figures are exact below 32,768 entries; above, what is
    newer than a stamp may come out too high, by a few 16,384ths of the entries. A row takes 12 bytes, and the rows are
    at most twice as many as the entries and no more than 65,536.

    Attributes:
        held: number of entries.
        floor: stamp of the oldest entry that is held, or lower.
    """

    __slots__ = ("_counts", "_first", "_limit", "_stamps", "floor", "held")

    def __init__(self, floor: int) -> None:
        self._stamps = array("Q")  # the highest that the row counts
        self._counts = array("I")
        self._first = 0  # rows before it were evicted
        self._limit = _FEWEST_ROWS
        self.held = 0
        self.floor = floor

    @classmethod
    def of(cls, floor: int, stamps: npt.NDArray[np.uint64], counts: npt.NDArray[np.uint32]) -> Self:
        """Counts of entries by stamps that ascend, none below `floor`."""
        uses = cls(floor)
        uses._stamps, uses._counts = array("Q", stamps.tobytes()), array("I", counts.tobytes())
        uses.held = int(counts.sum())
        uses._merge()
        return uses

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return 12 * len(self._stamps)

    def count(self, stamp: int, entries: int) -> None:
        """Count entries with a stamp that is higher than all before."""
        if len(self._stamps) >= self._limit:
            self._merge()
        self._stamps.append(stamp)
        self._counts.append(entries)
        self.held += entries

    def discount(self, stamp: int, entries: int) -> None:
        """Take away entries that were counted with this stamp, which must be at least `floor`."""
        self._counts[bisect_left(self._stamps, stamp, self._first)] -= entries
        self.held -= entries

    def newer(self, stamp: int) -> int:
        """Number of entries with this stamp or a higher one."""
        return int(self._rows()[bisect_left(self._stamps, stamp, self._first) :].sum())

    def drop(self, stamp: int) -> int:
        """Evict every entry with a lower stamp; returns how many."""
        return self._evict(bisect_left(self._stamps, stamp, self._first))

    def shrink(self, most: int) -> int:
        """Evict rows from the oldest on until at most so many entries are held; returns how many were evicted."""
        surplus = self.held - most
        end, span = self._first, _FEWEST_ROWS
        while surplus > 0 and end == self._first:
            sums = self._rows()[end : end + span].cumsum()
            if sums[-1] >= surplus:
                end += int(sums.searchsorted(surplus)) + 1
            span *= 4
        return self._evict(end)

    def _evict(self, end: int) -> int:
        """Evict the rows before this one."""
        if end == self._first:
            return 0
        evicted = int(self._rows()[self._first : end].sum())
        self._first = end
        self.floor = self._stamps[end - 1] + 1
        self.held -= evicted
        return evicted

    def _merge(self) -> None:
        """Merge rows that count little into the one after them. At most 65,536 rows: 1 ms."""
        counts = self._rows()[self._first :]
        stamps = np.frombuffer(self._stamps, np.uint64)[self._first :]
        stamps, counts = stamps[counts != 0], counts[counts != 0]
        grain = max(1, self.held // _GRAINS)
        # A row belongs to the grain in which it begins: what is merged into a row is less than one.
        sizes = np.minimum(counts, np.uint32(grain)).astype(np.int64)
        grains = (sizes.cumsum() - sizes) // grain
        firsts = np.flatnonzero(np.diff(grains, prepend=-1))
        lasts = np.flatnonzero(np.diff(grains, append=-1))
        merged = np.add.reduceat(counts, firsts) if len(firsts) else counts
        self._counts = array("I", merged.astype(np.uint32).tobytes())
        self._stamps = array("Q", stamps[lasts].tobytes())
        self._first = 0
        self._limit = max(_FEWEST_ROWS, 2 * len(self._stamps))

    def _rows(self) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self._counts, np.uint32) if self._counts else np.empty(0, np.uint32)

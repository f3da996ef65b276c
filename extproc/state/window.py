"""How much of a feed is kept, and how far it has moved on."""

from bisect import bisect_right
from collections import deque

_MARKS = 64
"""Marks in a window: how far the feed has moved on is known to a 64th of it."""


class Window:
    """How many of the newest entries a feed may keep, so that they fill no more than so many bytes."""

    def __init__(self, most_entries: int, most_bytes: int) -> None:
        self._most_entries = most_entries
        self._most_bytes = most_bytes
        self._sizes: deque[int] = deque()
        self._bytes = 0
        self._full = False
        self._moved = 0.0
        self._marks: list[tuple[tuple[int, int], float]] = []

    @property
    def entries(self) -> int:
        """Entries to keep now, at least one."""
        return len(self._sizes) if self._full else self._most_entries

    def saw(self, key: tuple[int, int], entry_bytes: int) -> None:
        """Take in the id and the size of the next entry of the feed, whoever wrote it."""
        self._sizes.append(entry_bytes)
        self._bytes += entry_bytes
        while len(self._sizes) > 1 and (self._bytes > self._most_bytes or len(self._sizes) > self._most_entries):
            self._full = self._full or self._bytes > self._most_bytes
            self._bytes -= self._sizes.popleft()
        self._moved += max(entry_bytes / self._most_bytes, 1 / self._most_entries)
        if not self._marks or self._moved - self._marks[-1][1] >= 1 / _MARKS:
            self._marks = [*self._marks[-2 * _MARKS :], (key, self._moved)]

    def since(self, key: tuple[int, int]) -> float:
        """How far the feed has moved on since this entry, in windows; what was not seen is not counted."""
        at = bisect_right(self._marks, (key, float("inf")))
        return self._moved - (self._marks[at - 1][1] if at else 0.0)

    def started_over(self) -> None:
        """The feed was lost: what was seen of it is no longer kept anywhere."""
        self._sizes.clear()
        self._bytes = 0
        self._full = False
        self._marks.clear()

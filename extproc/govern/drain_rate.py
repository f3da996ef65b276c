"""How many requests a pool finishes in a second, and when one that is refused should come again."""

import math
from collections import deque
from typing import Final

LEAST_S: Final = 1
MOST_S: Final = 30
"""Bounds of `Retry-After`: clients that are told less come too early, and one that is told more is lost."""
_WINDOW_S: Final = 10


class DrainRate:
    """Counts what was finished in the last ten seconds. Times are seconds of any clock that never goes back."""

    def __init__(self) -> None:
        self._began = math.inf
        # Whole seconds, and what was finished in each.
        self._seconds: deque[list[int]] = deque()

    def note(self, now: float, count: int = 1) -> None:
        """So many requests were finished."""
        self._began = min(self._began, now)
        second = math.floor(now)
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1][1] += count
        else:
            self._forget(now)
            self._seconds.append([second, count])

    def per_s(self, now: float) -> float:
        """Requests a second, over the window or since the first one; 0 when none was finished."""
        self._forget(now)
        total = sum(count for _, count in self._seconds)
        since = max(self._began, math.ceil(now - _WINDOW_S))
        return total / max(1.0, now - since) if total else 0.0

    def _forget(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] < now - _WINDOW_S:
            self._seconds.popleft()


def retry_after_s(waiting: float, per_s: float) -> int:
    """Whole seconds until `waiting` requests are gone at this rate, from `LEAST_S` to `MOST_S`; the most at rate 0."""
    if per_s <= 0.0:
        return MOST_S if waiting > 0.0 else LEAST_S
    return min(MOST_S, max(LEAST_S, math.ceil(waiting / per_s)))

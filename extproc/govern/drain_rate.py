"""How many requests a pool finishes in a second, and when one that is refused should come again."""

import math
from collections import deque
from typing import Final

LEAST_S: Final = 1
MOST_S: Final = 30
"""Bounds of `Retry-After`: clients that are told less come too early, and one that is told more is lost."""
_WINDOW_S: Final = 10


class DrainRate:
    """Counts what was finished in the last ten seconds in which there was work to finish.

    Idle time is no part of them: a pool that rested for a minute is as fast as it was before. Until somebody says
    that there is no work, there is. Times are seconds of any clock that never goes back.
    """

    def __init__(self) -> None:
        self._began = math.inf
        self._ended = False
        self._idle_s = 0.0
        self._idle_since: float | None = None
        # Whole seconds, and what was finished in each.
        self._seconds: deque[list[int]] = deque()

    @property
    def idle(self) -> bool:
        """Whether there is no work, as far as anybody has said."""
        return self._idle_since is not None

    def at_work(self, now: float, *, working: bool) -> None:
        """From now on there is work, or none."""
        if not working:
            self._idle_since = now if self._idle_since is None else self._idle_since
            return
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = None
        self._began = min(self._began, self._worked(now))

    def note(self, now: float, count: int = 1) -> None:
        """So many requests were finished; there was work, then."""
        self.at_work(now, working=True)
        self._ended = True
        now = self._worked(now)
        second = math.floor(now)
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1][1] += count
        else:
            self._forget(now)
            self._seconds.append([second, count])

    def per_s(self, now: float) -> float:
        """Requests a second, over the window or since there was work; 0 when none was finished."""
        now = self._worked(now)
        self._forget(now)
        total = sum(count for _, count in self._seconds)
        since = max(self._began, math.ceil(now - _WINDOW_S))
        return total / max(1.0, now - since) if total else 0.0

    def retry_after_s(self, now: float, waiting: float, part: float = 1.0) -> int:
        """Whole seconds until `waiting` requests are gone at this part of the rate; see the function of this name.

        Before any request was finished no rate is known. The first may take as long again as there has been work: that
        is told, so it grows from a second while nothing ends.
        """
        if not self._ended:
            since = self._worked(now) - self._began
            return min(MOST_S, max(LEAST_S, math.ceil(max(0.0, since))))
        return retry_after_s(waiting, self.per_s(now) * part)

    def _worked(self, now: float) -> float:
        """The time, without what was idle."""
        return (now if self._idle_since is None else self._idle_since) - self._idle_s

    def _forget(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] < now - _WINDOW_S:
            self._seconds.popleft()


def retry_after_s(waiting: float, per_s: float) -> int:
    """Whole seconds until `waiting` requests are gone at this rate, from `LEAST_S` to `MOST_S`; the most at rate 0."""
    if per_s <= 0.0:
        return MOST_S if waiting > 0.0 else LEAST_S
    return min(MOST_S, max(LEAST_S, math.ceil(waiting / per_s)))

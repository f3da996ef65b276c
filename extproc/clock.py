"""Time as a value that is passed in: the system's clock, and one that tests turn by hand."""

import time
from typing import Protocol


class Clock(Protocol):
    """What a component may ask of time."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary origin; never goes back."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return time.monotonic()

    def wall(self) -> float:
        """See `Clock.wall`."""
        return time.time()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start: float = 1000.0) -> None:
        self.now = start

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return self.now

    def wall(self) -> float:
        """See `Clock.wall`."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` (not negative)."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self.now += seconds

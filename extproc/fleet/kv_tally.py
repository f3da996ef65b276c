"""What is counted of the order of KV events, and when a stream makes no sense any more."""

from collections import deque
from typing import Final

import msgspec

MOST: Final = 5
WITHIN_S: Final = 60.0


class Tally(msgspec.Struct, gc=False):
    """Counted since the start.

    Attributes:
        gaps: times that numbers were missing.
        replays: those that repaired a stream, or made sure of it after a new connection, and were answered to the end.
            That a stream begins with a replay is no fault, nor is a check.
        unanswered: those that were not answered in time.
        endless: those that were answered without an end.
        senseless: times that a stream was not listened to any more, because it was forgotten too often.
    """

    gaps: int = 0
    replays: int = 0
    unanswered: int = 0
    endless: int = 0
    senseless: int = 0


class Losses:
    """How often all that was known of a stream had to be forgotten lately.

    An engine whose process crashes over and over takes longer to start `MOST` times than `WITHIN_S`.
    """

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=MOST)

    def too_often(self, now: float) -> bool:
        """Note another time; whether that makes `MOST` within `WITHIN_S`, of which none is counted again."""
        self._at.append(now)
        if len(self._at) < MOST or now - self._at[0] > WITHIN_S:
            return False
        self._at.clear()
        return True

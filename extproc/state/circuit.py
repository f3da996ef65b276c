"""When to stop asking the shared store for one pool, and when to try again: a state machine without I/O."""

from typing import Final

from extproc.state.trouble import Trouble

_FIRST_S: Final = 0.01
_STEADY_S: Final = 5.0
"""Closed for this long, it may be probed at once when it opens again. A store that answers one call and misses the next
would cost a deadline every few milliseconds otherwise: each time that it opens again sooner, the wait doubles."""


class Circuit:
    """Whether calls are sent. It opens at the first missed deadline or lost connection: one stall costs one wait.

    Args:
        longest_s: longest wait between two probes, seconds, before half of it is added or taken by chance.

    Attributes:
        open: no calls are sent.
        trouble: why it opened last; None before it did.
        opened_at: when it opened last.
    """

    def __init__(self, longest_s: float = 0.5) -> None:
        self._longest_s = longest_s
        self._tries = 0
        self._closed_at = float("-inf")
        self.open = False
        self.trouble: Trouble | None = None
        self.opened_at = 0.0

    def trip(self, trouble: Trouble, now: float) -> bool:
        """A call failed for this reason; True when that opened it."""
        self.trouble = trouble
        if self.open:
            return False
        self._tries = 0 if now - self._closed_at >= _STEADY_S else self._tries + 1
        self.open, self.opened_at = True, now
        return True

    def missed(self, trouble: Trouble) -> None:
        """A probe failed."""
        self.trouble = trouble
        self._tries += 1

    def close(self, now: float) -> float:
        """A probe was answered; returns for how many seconds it was open."""
        self.open, self._closed_at = False, now
        return now - self.opened_at

    def wait_s(self, chance: float) -> float:
        """Seconds until the next probe: none for the first one, then twice as long each time.

        Args:
            chance: evenly spread from 0 to 1, so that workers that lost the store together do not ask it together.
        """
        return pause_s(self._tries, self._longest_s, chance)


def pause_s(failures: int, longest_s: float, chance: float) -> float:
    """Seconds to wait after so many failures in a row: none, then doubling up to `longest_s`, half more or less."""
    if failures == 0:
        return 0.0
    return float(min(longest_s, _FIRST_S * 2 ** min(failures, 20)) * (0.5 + chance))

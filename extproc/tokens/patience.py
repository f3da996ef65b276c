"""When a source of token ids is left alone for a while: a state machine without I/O."""

from typing import Final

STRIKES: Final = 3
"""Late or failed answers in a row after which a source is left alone."""
FIRST_S: Final = 0.5
LONGEST_S: Final = 30.0


class Patience:
    """Whether a source is worth waiting for. One that is dead or slow costs a few budgets, not one for each request.

    A late answer that comes soon after its budget is taken back: such a source is slow with long new prompts only,
    which the cache answers from their next turn on.
    """

    def __init__(self) -> None:
        self._strikes = 0
        self._rest_s = FIRST_S
        self._again_at = 0.0

    def allows(self, now: float) -> bool:
        """Whether to ask now. While the source rests, one question goes through each time that a rest is over."""
        if self._strikes < STRIKES:
            return True
        if now < self._again_at:
            return False
        self._rest_s = min(LONGEST_S, 2 * self._rest_s)
        self._again_at = now + self._rest_s
        return True

    def answered(self) -> None:
        """An answer came in time."""
        self._strikes, self._rest_s = 0, FIRST_S

    def strike(self, now: float) -> None:
        """An answer did not come in time, or was none."""
        self._strikes = min(STRIKES, self._strikes + 1)
        if self._strikes == STRIKES and now >= self._again_at:
            self._again_at = now + self._rest_s

    def forgive(self) -> None:
        """An answer that was late came after all, and soon enough."""
        if self._strikes:
            self._strikes -= 1

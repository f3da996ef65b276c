"""How often the beginnings of prompts are used: what is hot should be on many endpoints, what is rare on one."""

import math
from collections import OrderedDict

_GAIN = 0.25
_REMEMBERED = 32_768


class Heat:
    """Mean gap between the uses of a block, by the block; those used longest ago are forgotten.

    Args:
        limit: number of blocks that are remembered.
    """

    def __init__(self, limit: int = _REMEMBERED) -> None:
        self._limit = limit
        self._uses: OrderedDict[int, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._uses)

    def gap_s(self, block: int, now: float) -> float:
        """Seconds between uses, a use at `now` included; infinite for a block that was used once at most.

        An exponential mean over about four gaps. Changes nothing.
        """
        last, mean = self._uses.get(block, (-math.inf, math.inf))
        gap = now - last
        return gap if math.isinf(mean) else mean + _GAIN * (gap - mean)

    def used(self, block: int, now: float) -> None:
        """Note a use at `now`, in seconds of a clock that never goes back; one before the last that is known is old."""
        last, _ = self._uses.get(block, (-math.inf, math.inf))
        if now < last:
            return
        self._uses[block] = (now, self.gap_s(block, now))
        self._uses.move_to_end(block)
        if len(self._uses) > self._limit:
            self._uses.popitem(last=False)

"""Histograms whose sum is the histogram of both: percentiles of what many workers measured."""

import math
from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta

_STEP: Final = math.log(1.04)
"""Width of a bucket: a percentile is known to 2 %."""
_LEAST: Final = 1e-6
_MOST: Final = 1e9
BUCKETS: Final = range(math.floor(math.log(_LEAST) / _STEP), math.floor(math.log(_MOST) / _STEP) + 1)
"""Numbers that buckets may have."""
Histogram = dict[Annotated[int, Meta(ge=BUCKETS.start, lt=BUCKETS.stop)], Annotated[int, Meta(ge=0, le=1 << 48)]]
"""Numbers of values by bucket."""
Histograms = tuple[Histogram, Histogram]
"""The canary's and the baseline's."""


def bucket(value: float) -> int:
    """Number of the bucket of a value; 0 and less are in the lowest one."""
    return math.floor(math.log(min(_MOST, max(_LEAST, value))) / _STEP)


def percentile(counts: Mapping[int, int], at: float) -> float:
    """The percentile, 0 to 100, of what was counted by bucket; -1 without anything."""
    total = sum(counts.values())
    wanted, passed = at / 100.0 * total, 0
    for number in sorted(counts):
        if counts[number] and passed + counts[number] >= wanted:
            inside = min(1.0, max(0.0, (wanted - passed) / counts[number]))
            return math.exp((number + inside) * _STEP)
        passed += counts[number]
    return -1.0


def combined(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    """The sum of both."""
    return {number: one.get(number, 0) + other.get(number, 0) for number in one.keys() | other.keys()}

"""Units that come more than once: which of them were seen, and how often the same one counts."""

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

UNITS: Final = 1 << 32
"""Units are told apart by their first 32 bits."""
_Unit = Annotated[int, Meta(ge=0, le=UNITS)]
_Count = Annotated[int, Meta(ge=1, le=1 << 48)]
_KEPT: Final = 64
"""Units that a sample keeps: the mean of how often one counts is known to an eighth or so of its spread."""
_REMEMBERED: Final = 1 << 15


class Seen:
    """Units that were seen; those of long ago are forgotten when there are very many."""

    __slots__ = ("_before", "_now")

    def __init__(self) -> None:
        self._now: set[int] = set()
        self._before: set[int] = set()

    def __contains__(self, unit: int) -> bool:
        return unit in self._now or unit in self._before

    def add(self, unit: int) -> None:
        """Remember a unit."""
        self._now.add(unit)
        if len(self._now) >= _REMEMBERED:
            self._before, self._now = self._now, set()


class Repeats(msgspec.Struct, array_like=True):
    """How often single units count: of the lowest units only, so that all workers keep the same ones.

    Attributes:
        limit: units below it are all here.
        counts: how often, by unit.
    """

    limit: _Unit = UNITS
    counts: dict[_Unit, _Count] = {}

    def add(self, unit: int) -> None:
        """Count a unit."""
        if unit >= self.limit:
            return
        self.counts[unit] = self.counts.get(unit, 0) + 1
        if len(self.counts) > _KEPT:
            self.limit = max(self.counts)
            del self.counts[self.limit]


def combined(one: Repeats, other: Repeats) -> Repeats:
    """What both together say."""
    limit = min(one.limit, other.limit)
    counts: dict[int, int] = {}
    for each in (one, other):
        for unit, count in each.counts.items():
            if unit < limit:
                counts[unit] = counts.get(unit, 0) + count
    return Repeats(limit, counts)


def overlap(repeats: Repeats) -> float:
    """How many times over units count, 1 or more: what the sum of their logs is divided by.

    With `m` the number of times that a unit counts, the mean of `m` as a unit in hand sees it, sum(m^2) / sum(m): the
    design effect of samples in clusters (Kish 1965) when those of one cluster are all alike. Where every unit counts
    `m` times, the root of a product of e-values is one however the factors depend on one another (Hölder's inequality;
    for units in some of the factors, Finner 1992).
    """
    counts: Mapping[int, int] = repeats.counts
    total = sum(counts.values())
    return max(1.0, sum(count * count for count in counts.values()) / total) if total else 1.0

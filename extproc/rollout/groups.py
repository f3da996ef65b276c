"""Groups of units that were seen together, out of which bets on the canary's labels are won or lost."""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from extproc.rollout.e_values import RANK_BETS, RATE_BETS, events_log, rank_steps, ranks_log_mean
from extproc.rollout.kinds import Ranked
from extproc.rollout.repeats import Repeats, Seen

_LEAST_UNITS: Final = 20
_MOST_UNITS: Final = 100
_CANARY_UNITS: Final = 4.0
"""Canary's units in a group of events, about: with fewer beside them, one event more of its own tells less."""
_OLD_S: Final = 30.0
_OLD_UNITS: Final = 8
"""Where traffic is low, a group of so many units is full when it is so old: errors must not wait for minutes."""

Won = Callable[[str, int, Sequence[float]], None]
"""Takes a gate, the window of time, and what each of its bets won: natural logs."""


class RankGroups:
    """Values of one measure in one stratum, ranked group by group. Whoever adds them adds one of each unit."""

    __slots__ = ("_gates", "_group", "_size", "_won")

    def __init__(self, gates: Sequence[Ranked], size: int, won: Won) -> None:
        """`gates` are those that rank groups of this size; `won` is told of each group."""
        self._gates = gates
        self._size = size
        self._won = won
        self._group: list[tuple[float, bool]] = []

    def add(self, value: float, canary: bool, window: int) -> None:
        """Add a value."""
        self._group.append((value, canary))
        if len(self._group) < self._size:
            return
        group, self._group = self._group, []
        of_canary = sum(canary for _, canary in group)
        if 0 < of_canary < len(group):
            for gate in self._gates:
                self._won(gate.name, window, _ranked(gate, group, of_canary))


def _ranked(gate: Ranked, group: Sequence[tuple[float, bool]], of_canary: int) -> list[float]:
    """Log of what each bet wins. Of equal values the canary's come first: ties never speak against it."""
    sign = -1.0 if gate.falling else 1.0
    order = sorted((sign * (value * gate.scale if canary else value), not canary) for value, canary in group)
    steps = rank_steps(len(group), gate.percentile)
    mass = sum(step for step, (_, baseline) in zip(steps, order, strict=True) if not baseline)
    return [bet * mass - ranks_log_mean(len(group), of_canary, gate.percentile, bet) for bet in RANK_BETS]


class EventSums(msgspec.Struct):
    """Sums over groups, which live in what is published.

    Attributes:
        exposed: by window: units of the canary at risk, those with an event.
        others: units of the baseline at risk, those with an event.
        repeats: how often single units had an event.
    """

    exposed: list[list[int]]
    others: list[int]
    repeats: Repeats


class EventGroups:
    """Units at risk of one kind of event, counted group by group.

    A unit is at risk until its first event, as in the logrank test; it counts once a group, however many requests it
    has there. A session that always fails is one event, and one that goes well for long is a unit at risk each time.

    """

    __slots__ = ("_began", "_group", "_had", "_name", "_size", "_sums", "_won")

    def __init__(self, name: str, share: float, sums: EventSums, won: Won) -> None:
        """`share` is the canary's; `sums` grow, and `won` is told of groups with events."""
        wanted = _CANARY_UNITS / share if 0.0 < share < 1.0 else 0.0
        self._name = name
        self._size = round(min(_MOST_UNITS, max(_LEAST_UNITS, wanted)))
        self._won = won
        self._had = Seen()
        self._group: dict[int, tuple[bool, bool]] = {}
        self._began = 0.0
        self._sums = sums

    def add(self, unit: int, canary: bool, event: bool, at: tuple[int, float]) -> None:
        """Add a request that was at risk; `at` is the window and the time now."""
        window, now_s = at
        if unit in self._had:
            return
        group = self._group
        if not group:
            self._began = now_s
        before = group.get(unit)
        group[unit] = canary, event or (before is not None and before[1])
        if len(group) >= self._size or (len(group) >= _OLD_UNITS and now_s - self._began >= _OLD_S):
            self._close(window)

    def _close(self, window: int) -> None:
        group, self._group = self._group, {}
        events = found = of_canary = 0
        for unit, (canary, event) in group.items():
            of_canary += canary
            if event:
                events += 1
                found += canary
                self._had.add(unit)
                self._sums.repeats.add(unit)
        exposed, others = self._sums.exposed, self._sums.others
        while len(exposed) <= window:
            exposed.append([0, 0])
        exposed[window][0] += of_canary
        exposed[window][1] += found
        others[0] += len(group) - of_canary
        others[1] += events - found
        if events and 0 < of_canary < len(group):
            self._won(
                self._name, window, [events_log(len(group), of_canary, events, found, odds) for odds in RATE_BETS]
            )

"""What goes wrong when: a schedule of faults as a pure function of a seed."""

import random
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

CALM_S = 5.0
"""No fault before: the first requests of a run meet cold caches."""


class Part(StrEnum):
    """What faults happen to."""

    WORKER = "worker"
    KEEPER = "keeper"
    ENGINE = "engine"
    STORE = "store"
    SENTINEL = "sentinel"
    CLOCK = "clock"


class Kind(StrEnum):
    """What happens."""

    KILL = "kill"
    """SIGKILL. Workers and keepers are started again by their parent, others when the fault ends."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT when the fault ends."""
    JUMP = "jump"
    """The wall clock of one host jumps, and back when the fault ends."""


class Rule(msgspec.Struct, frozen=True):
    """What may happen to one kind of part.

    Attributes:
        parts: how many there are.
        most: how many of them are hit at once.
        settle_s: seconds after the end of a fault in which its part still counts as hit: it starts, is found by
            health checks, or copies a store.
        kill_s: shortest and longest time until a killed one may be back.
        weight: how often it is hit, against the others.
    """

    parts: int
    most: int
    settle_s: float
    kill_s: tuple[float, float]
    weight: int = 1


RULES: Mapping[Part, Rule] = {
    Part.WORKER: Rule(parts=4, most=2, settle_s=4.0, kill_s=(2.0, 2.0), weight=2),
    Part.KEEPER: Rule(parts=2, most=2, settle_s=2.0, kill_s=(2.0, 2.0)),
    Part.ENGINE: Rule(parts=4, most=1, settle_s=8.0, kill_s=(2.0, 6.0), weight=2),
    Part.STORE: Rule(parts=1, most=1, settle_s=14.0, kill_s=(4.0, 8.0), weight=2),
    Part.SENTINEL: Rule(parts=3, most=1, settle_s=4.0, kill_s=(2.0, 6.0)),
    Part.CLOCK: Rule(parts=1, most=1, settle_s=5.0, kill_s=(0.0, 0.0)),
}
"""Of four engines three always serve; of four workers two; both keepers may be gone. The store is its master."""

STOP_S = (1.0, 8.0)
JUMP_S = (5.0, 20.0)
JUMPS = (-86_400, -3600, -60, -2, 2, 60, 3600, 86_400)
"""Seconds that a clock jumps by."""
GAP_S = (1.5, 4.5)
"""Shortest and longest time between the beginnings of two faults."""


class Fault(msgspec.Struct, frozen=True):
    """One fault to come.

    Attributes:
        at_s: when it begins, in seconds from the start of the load.
        kind: what happens.
        part: to what.
        number: to which of them, from 0.
        lasts_s: when it ends, after its beginning.
        jump_s: seconds that the clock jumps by; 0 for other kinds.
    """

    at_s: float
    kind: Kind
    part: Part
    number: int
    lasts_s: float
    jump_s: int = 0

    @property
    def until_s(self) -> float:
        """When its part counts as well again."""
        return self.at_s + self.lasts_s + RULES[self.part].settle_s

    @property
    def name(self) -> str:
        """Kind and part, for people."""
        return f"{self.kind} {self.part}"


def schedule(seed: int, seconds: float, parts: Sequence[Part]) -> tuple[Fault, ...]:
    """The faults of a run, in order; the last of them has settled by `seconds`.

    Each kind of fault comes up as often as its weight says before any comes up again, in an order drawn anew each
    time; one that its rule forbids at the moment waits until it may.

    Args:
        seed: equal seeds give equal faults.
        seconds: length of the load.
        parts: what there is to hit.
    """
    rng = random.Random(seed)
    deck = _deck(rng, parts)
    waiting: list[tuple[Kind, Part]] = []
    faults: list[Fault] = []
    at_s = CALM_S
    while at_s < seconds:
        if len(waiting) < len(parts):
            waiting.append(next(deck))
        for kind, part in waiting:
            fault = _drawn(rng, at_s, kind, part, [one for one in faults if one.part is part and one.until_s > at_s])
            if fault is not None and fault.until_s <= seconds:
                faults.append(fault)
                waiting.remove((kind, part))
                break
        at_s += rng.uniform(*GAP_S)
    return tuple(faults)


def _deck(rng: random.Random, parts: Sequence[Part]) -> Iterator[tuple[Kind, Part]]:
    every = [
        (kind, part)
        for part in parts
        for kind in ([Kind.JUMP] if part is Part.CLOCK else [Kind.KILL, Kind.STOP])
        for _ in range(RULES[part].weight)
    ]
    while True:
        yield from rng.sample(every, len(every))


def _drawn(rng: random.Random, at_s: float, kind: Kind, part: Part, unwell: Sequence[Fault]) -> Fault | None:
    """One fault, or None when as many of the part are unwell as may be."""
    rule = RULES[part]
    well = sorted(set(range(rule.parts)) - {one.number for one in unwell})
    if len(unwell) >= rule.most or not well:
        return None
    number = rng.choice(well)
    if kind is Kind.JUMP:
        return Fault(at_s, kind, part, number, rng.uniform(*JUMP_S), rng.choice(JUMPS))
    return Fault(at_s, kind, part, number, rng.uniform(*(STOP_S if kind is Kind.STOP else rule.kill_s)))


def rules() -> list[str]:
    """The rules in words, one line each."""
    lines = [
        f"{rule.most} of {rule.parts} {part}{'s' if rule.parts > 1 else ''} at once, "
        f"{rule.settle_s:.0f} s after each before it counts as well"
        for part, rule in RULES.items()
    ]
    stop, jump, gap = ("{:.1f} to {:.1f} s".format(*span) for span in (STOP_S, JUMP_S, GAP_S))
    return [*lines, f"stops last {stop}, jumps of a clock {jump}; one fault every {gap}; Envoy itself is left alone"]

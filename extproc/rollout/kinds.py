"""Which gates a plan has, and what each looks at."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from extproc.config_rollouts import Gates, Latency, Rate

Measure = Literal["ttft", "tpot", "length"]
"""What is ranked: seconds to the first token, seconds of each further token, output tokens."""
RATES: Final = ("errors", "abandons", "broken")
"""What is counted, by the names of their gates."""
_GROUP: Final = 20
"""Values that are ranked together. More of them would see a percentile sharper, and wait longer for each other: beside
one canary value, 19 others lose a twentieth of what endless ones would tell."""


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """A gate that ranks values of the canary among those of the baseline.

    Attributes:
        name: the gate's.
        measure: what is ranked.
        percentile: where the ranks count most.
        tolerance: how much greater the canary's values may be; less, by the same factor, where they fall.
        falling: whether low values speak against the canary.
    """

    name: str
    measure: Measure
    percentile: float
    tolerance: float
    falling: bool = False

    @property
    def scale(self) -> float:
        """What values of the canary are multiplied by before they are ranked."""
        return 1.0 + self.tolerance if self.falling else 1.0 / (1.0 + self.tolerance)

    @property
    def group(self) -> int:
        """Values that are ranked together: some of them lie beyond the percentile."""
        beyond = min(self.percentile, 100.0 - self.percentile)
        return max(_GROUP, round(200.0 / beyond))


def ranked(gates: Gates) -> tuple[Ranked, ...]:
    """Gates that rank."""
    found: list[Ranked] = []
    latencies: tuple[tuple[Measure, Latency], ...] = (("ttft", gates.ttft), ("tpot", gates.tpot))
    for measure, latency in latencies:
        found += [
            Ranked(name=f"{measure}_p{each:g}", measure=measure, percentile=each, tolerance=latency.tolerance)
            for each in dict.fromkeys(latency.percentiles)
        ]
    if gates.length.enabled:
        for name, falling in (("length_longer", False), ("length_shorter", True)):
            each = Ranked(
                name=name, measure="length", percentile=50.0, tolerance=gates.length.tolerance, falling=falling
            )
            found.append(each)
    return tuple(found)


def by_measure(gates: Gates) -> Mapping[Measure, Mapping[int, Sequence[Ranked]]]:
    """Gates that rank, by measure and by how many values they rank together."""
    found: dict[Measure, dict[int, list[Ranked]]] = {}
    for gate in ranked(gates):
        found.setdefault(gate.measure, {}).setdefault(gate.group, []).append(gate)
    return found


def rates(gates: Gates) -> Mapping[str, Rate]:
    """Gates that count, by name."""
    every = {"errors": gates.errors, "abandons": gates.abandons, "broken": gates.broken}
    return {name: every[name] for name in RATES if every[name].enabled}


def names(gates: Gates) -> tuple[str, ...]:
    """All gates of a plan, those that count first."""
    return (*rates(gates), *(each.name for each in ranked(gates)))

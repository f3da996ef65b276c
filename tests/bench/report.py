"""What a bench found: a table, checks against budgets, and the same as JSON."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from tests.bench.machine import Machine, load_average, machine, versions

FOLDER = Path("bench-results")

Cell = str | int | float
Row = Mapping[str, Cell]


class Check(msgspec.Struct, frozen=True):
    """One budget of the design and what was measured.

    Attributes:
        what: the budget, in words.
        measured: the figure.
        budget: the limit.
        unit: unit of both.
        at_least: whether the figure must reach the limit; otherwise it must not pass it.
    """

    what: str
    measured: float
    budget: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the budget holds."""
        return self.measured >= self.budget if self.at_least else self.measured <= self.budget

    def line(self) -> str:
        """One line of text."""
        sign = ">=" if self.at_least else "<="
        verdict = "met" if self.met else "MISSED"
        return f"{verdict:>6}  {self.what}: {_shown(self.measured)} {self.unit} (budget {sign} {_shown(self.budget)})"


class Findings(msgspec.Struct):
    """What a bench returns.

    Attributes:
        question: what was asked, and of what the figures are.
        rows: one for each thing measured; all have the same columns.
        checks: budgets against figures.
        notes: what a reader must know to judge the figures.
    """

    question: str
    rows: list[Row] = msgspec.field(default_factory=list)
    checks: list[Check] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)


class Scale(msgspec.Struct, frozen=True):
    """How much is measured.

    Attributes:
        quick: short runs, for a first look; figures scatter more.
    """

    quick: bool = False

    def pick(self, full: int, quick: int) -> int:
        """The number for this scale."""
        return quick if self.quick else full


Bench = Callable[[Scale], Findings]


def middle(values: Sequence[float]) -> float:
    """Median; raises StatisticsError for no values."""
    return float(median(values))


def spread(values: Sequence[float]) -> str:
    """Least and greatest value, as text."""
    return f"{_shown(min(values))}..{_shown(max(values))}"


def write(name: str, scale: Scale, findings: Findings, load_before: Sequence[float]) -> Path:
    """Write `bench-results/<name>.json` and return its path."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    document = {
        "bench": name,
        "quick": scale.quick,
        "machine": msgspec.to_builtins(machine()),
        "versions": versions(),
        "load_before": list(load_before),
        "load_after": list(load_average()),
        "question": findings.question,
        "rows": [dict(row) for row in findings.rows],
        "checks": [msgspec.to_builtins(check) | {"met": check.met} for check in findings.checks],
        "notes": findings.notes,
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return path


def text(name: str, findings: Findings, load_before: Sequence[float]) -> str:
    """The findings as a page of text."""
    lines = [f"== {name}: {findings.question}", "", *table(findings.rows), ""]
    lines += [check.line() for check in findings.checks]
    lines += [f"        {note}" for note in findings.notes]
    lines.append(
        f"        load average {load_before[0]:.1f} before, {load_average()[0]:.1f} after, {os.cpu_count()} cores"
    )
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Row]) -> list[str]:
    """Rows in columns, numbers to the right."""
    if not rows:
        return []
    names = list(rows[0])
    cells = [[_shown(row[name]) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[at]) for line in cells)) for at, name in enumerate(names)]
    right = [not isinstance(rows[0][name], str) for name in names]

    def line(parts: Sequence[str]) -> str:
        padded = (p.rjust(w) if r else p.ljust(w) for p, w, r in zip(parts, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    return [line(names), line(["-" * width for width in widths]), *map(line, cells)]


def summary(host: Machine) -> str:
    """The machine in one line."""
    return f"{host.cpu}, {host.cores} cores, Linux {host.kernel}, Python {host.python}"


def _shown(value: Cell) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 10 else f"{value:.1f}"

"""What a person sees of a comparison: progress while it runs, a table at the end. Needs the extra `demo` (rich)."""

from collections.abc import Callable, Mapping
from typing import Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from extproc.sim.load import Outcome
from extproc.sim.report import Summary

_LINES = 4
"""Lines of progress for one run when no terminal shows a bar."""


class Bar:
    """Progress of one run: a bar on a terminal, a few plain lines elsewhere. Use as a context manager.

    Args:
        console: where it shows.
        name: what runs.
        total: requests of the run.
    """

    def __init__(self, console: Console, name: str, total: int) -> None:
        self._console = console
        self._name = name
        self._total = total
        self._ended = 0
        self._failed = 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[errors]}"), console=console)
        self._task = self._progress.add_task(name, total=total, errors="")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def note(self, outcome: Outcome) -> None:
        """Count one ended request; fits the `watch` of `load.run`."""
        self._ended += 1
        self._failed += outcome.failure is not None
        errors = f"{self._failed} failed" if self._failed else ""
        if self._console.is_terminal:
            self._progress.update(self._task, completed=self._ended, errors=errors)
        elif self._ended * _LINES // self._total > (self._ended - 1) * _LINES // self._total:
            line = f"{self._name}: {self._ended} of {self._total} requests"
            self._console.print(f"{line}, {errors}" if errors else line, highlight=False)


def table(policies: Mapping[str, Summary]) -> Table:
    """Return the runs side by side, and the last as a multiple of the first."""
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("")
    for name in policies:
        shown.add_column(name, justify="right")
    columns = list(policies.values())
    compare = len(columns) > 1
    if compare:
        shown.add_column("ratio", justify="right")
    for label, measure, write in _ROWS:
        values = [measure(summary) for summary in columns]
        cells = ["-" if value is None else write(value) for value in values]
        shown.add_row(label, *cells, *([_ratio(values[0], values[-1])] if compare else []))
    return shown


def _ratio(first: float | None, last: float | None) -> str:
    return f"{last / first:.2f}" if first and last is not None else "-"


def _ms(value: float) -> str:
    return f"{value:,.1f} ms" if value < 100 else f"{value:,.0f} ms"


_ROWS: tuple[tuple[str, Callable[[Summary], float | None], Callable[[float], str]], ...] = (
    ("prompt tokens cached", lambda one: one.cached_share, "{:.1%}".format),
    ("TTFT p50", lambda one: one.ttft_ms.p50, _ms),
    ("TTFT p90", lambda one: one.ttft_ms.p90, _ms),
    ("TTFT p99", lambda one: one.ttft_ms.p99, _ms),
    ("TTFT mean", lambda one: one.ttft_ms.mean, _ms),
    ("time per token p50", lambda one: one.tpot_ms.p50, _ms),
    ("busiest engine / mean", lambda one: one.busy_imbalance, "{:.2f}".format),
    ("total time", lambda one: one.seconds, "{:.1f} s".format),
    ("requests", lambda one: one.requests, "{:,.0f}".format),
    ("errors", lambda one: one.errors, "{:,.0f}".format),
)

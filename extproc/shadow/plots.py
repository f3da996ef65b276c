"""The pictures of a report: how alike answers are, how long, and how fast. The same results give the same bytes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from extproc.shadow.compare import Comparison
from extproc.shadow.figures import MEASURES
from extproc.shadow.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI: Final = 110
_BINS: Final = 40
_MS: Final = 1000.0


def draw(results: Sequence[Result], folder: Path, stem: str) -> list[str]:
    """Write the pictures of one pair of versions into a folder; returns their names. Nothing to draw gives none.

    Raises:
        ImportError: Matplotlib is not installed.
        OSError: a file cannot be written.
    """
    whole = [one.compared for one in results if one.compared.outcome == "compared"]
    if not whole:
        return []
    pictures: dict[str, Callable[[Figure, Sequence[Comparison]], None]] = {
        "similarity": _similarity,
        "length": _length,
        "latency": _latency,
    }
    names = []
    for kind, fill in pictures.items():
        figure = _figure()
        fill(figure, whole)
        name = f"{stem}-{kind}.png"
        # Without its name and version, a newer Matplotlib that draws alike writes the same file.
        figure.savefig(folder / name, dpi=_DPI, format="png", metadata={"Software": None})
        names.append(name)
    return names


def _figure() -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _similarity(figure: "Figure", whole: Sequence[Comparison]) -> None:
    axes = figure.subplots()
    values = [one.similarity for one in whole if one.similarity is not None]
    axes.hist(values, bins=_BINS, range=(0.0, 1.0))
    axes.set_xlim(0.0, 1.0)
    axes.set_xlabel("edit similarity of both texts")
    axes.set_ylabel("comparisons")
    axes.grid(alpha=0.3)


def _length(figure: "Figure", whole: Sequence[Comparison]) -> None:
    axes = figure.subplots()
    ours, theirs = [one.primary.characters for one in whole], [one.shadow.characters for one in whole]
    longest = max(1, *ours, *theirs)
    axes.plot([0, longest], [0, longest], color="grey", linewidth=0.8)
    axes.scatter(ours, theirs, s=8, alpha=0.4)
    axes.set_xlabel("characters of the client's answer")
    axes.set_ylabel("of the shadow's")
    axes.grid(alpha=0.3)


def _latency(figure: "Figure", whole: Sequence[Comparison]) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    _cdf(left, whole, "ttft_s", "TTFT, ms")
    _cdf(right, whole, "duration_s", "whole answer, ms")
    left.set_ylabel("share of answers")


def _cdf(axes: "Axes", whole: Sequence[Comparison], measure: str, label: str) -> None:
    read = MEASURES[measure]
    for name, sides in (("client", [one.primary for one in whole]), ("shadow", [one.shadow for one in whole])):
        values = sorted(_MS * value for side in sides if (value := read(side)) is not None)
        axes.step(values, [(at + 1) / len(values) for at in range(len(values))], where="post", label=name)
    axes.set_xlabel(label)
    axes.set_ylim(0.0, 1.0)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")

"""The trade-off curve: what a weight on cache hits buys, and what it costs in balance, as numbers and as a picture."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from extproc.errors import ConfigError
from extproc.replay.compare import Compared, replay
from extproc.replay.rows import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WEIGHTS = (0.0, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0)
"""Weights of a hit that the curve goes through, in seconds of load."""
_DPI = 120
_LEAST_UNEVEN = 1.2
"""The axis of imbalance goes so far at least, so that differences that mean nothing look like none."""
_LINEAR = 10.0
"""Greatest ratio of times that a linear axis shows."""
_NO_MATPLOTLIB = "--curve needs Matplotlib: pip install 'warmpath[demo]'"


class Point(msgspec.Struct, frozen=True):
    """Policy `weighted` with one weight.

    Attributes:
        hit_weight: what a wholly cached prompt is worth, in seconds of load.
        cached_share: prompt tokens found cached, by all prompt tokens.
        busy_imbalance: busy time of the busiest engine by the mean of all.
        ttft_p90_ms: time to the first token.
    """

    hit_weight: float
    cached_share: float
    busy_imbalance: float
    ttft_p90_ms: float | None


def curve(trace: Trace, wanted: Compared, weights: Sequence[float] = WEIGHTS) -> list[Point]:
    """Replay a trace under policy `weighted` once for each weight."""
    points = []
    for weight in weights:
        routing = msgspec.structs.replace(wanted.routing, hit_weight=weight)
        ran = replay(trace, "weighted", msgspec.structs.replace(wanted, routing=routing, regret=False))
        points.append(Point(weight, ran.cached_share, ran.busy_imbalance, ran.ttft_ms.p90))
    return points


def check(path: Path) -> None:
    """Find out whether `draw` can work, before minutes are spent on its points.

    Raises:
        ConfigError: Matplotlib is not installed, or the file's folder does not exist.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(_NO_MATPLOTLIB)
    if not path.parent.is_dir():
        raise ConfigError(f"--curve {path}: cannot be written: there is no such folder")


def draw(points: Sequence[Point], title: str, path: Path) -> None:
    """Write the curve as a PNG.

    Raises:
        ConfigError: Matplotlib is not installed, or the file cannot be written.
    """
    try:
        figure = picture(points, title)
    except ImportError as error:
        raise ConfigError(_NO_MATPLOTLIB) from error
    try:
        figure.savefig(path, dpi=_DPI, format="png")
    except OSError as error:
        raise ConfigError(f"--curve {path}: cannot be written: {error.strerror}") from error


def picture(points: Sequence[Point], title: str) -> "Figure":
    """Return what is found cached, how uneven engines are and how long first tokens take, each over the weight.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)
    cached, uneven, first = figure.subplots(3, 1, sharex=True)
    at = range(len(points))
    cached.plot(at, [100 * point.cached_share for point in points], marker="o")
    uneven.plot(at, [point.busy_imbalance for point in points], marker="o", color="tab:red")
    first.plot(at, [point.ttft_p90_ms for point in points], marker="o", color="tab:green")
    cached.set_ylabel("prompt tokens\nfound cached, %")
    uneven.set_ylabel("busiest engine\n/ mean")
    first.set_ylabel("TTFT p90, ms")
    first.set_xlabel("weight on a cache hit, in seconds of load")
    first.set_xticks(at, [f"{point.hit_weight:g}" for point in points])
    uneven.set_ylim(1.0, max(_LEAST_UNEVEN, *(1.05 * point.busy_imbalance for point in points)))
    cached.set_ylim(0.0, 100.0)
    times = [point.ttft_p90_ms for point in points if point.ttft_p90_ms]
    if times and max(times) > _LINEAR * min(times):
        first.set_yscale("log")
        first.yaxis.set_major_formatter("{x:,.0f}")
    else:
        first.set_ylim(bottom=0.0)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.suptitle(f"{title}: policy weighted", fontsize=10)
    return figure

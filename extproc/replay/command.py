"""The command `warmpath replay`: reads a trace, replays it under several policies, prints what came of each."""

import argparse
import sys
from collections.abc import Mapping, Sequence

import msgspec

from extproc.replay import asked, printed
from extproc.replay import curve as tradeoff
from extproc.replay.arguments import POLICIES
from extproc.replay.compare import compare
from extproc.replay.rows import Trace
from extproc.replay.summary import Replayed


def run(arguments: argparse.Namespace) -> int:
    """Replay; returns 0.

    Raises:
        ConfigError: an argument or the configuration cannot be used.
        TraceError: the trace cannot be read.
    """
    if arguments.curve:
        tradeoff.check(arguments.curve)
    wanted = msgspec.structs.replace(
        asked.compared(arguments, POLICIES),
        profiles=arguments.profiles,
        event_delay_s=arguments.event_delay_ms / 1000.0,
    )
    trace, factor = asked.trace_at_pace(arguments, wanted)
    watch = _unheard if arguments.json else _say
    watch(printed.introduction(trace, wanted))
    results = compare(trace, wanted, lambda policy: watch(f"replaying {policy} ..."))
    points = tradeoff.curve(trace, wanted) if arguments.curve else []
    if arguments.curve:
        tradeoff.draw(points, trace.name, arguments.curve)
        watch(f"{arguments.curve}: the trade-off curve")
    text = to_json(trace, factor, results, points)
    if arguments.output:
        printed.save(arguments.output, text)
    sys.stdout.write(text if arguments.json else table(results, precise="precise" in wanted.profiles))
    return 0


def to_json(trace: Trace, factor: float, results: Mapping[str, Replayed], points: Sequence[tradeoff.Point]) -> str:
    """Return `printed.to_json` of a replay, with the trade-off curve as `curve` if there is one."""
    return printed.to_json(trace, factor, results, **({"curve": points} if points else {}))


def table(results: Mapping[str, Replayed], *, precise: bool = False) -> str:
    """Return the policies side by side, one line each; with precise profiles, how much was matched by them."""
    return printed.table(results, [one for one in _COLUMNS if precise or one is not _PRECISE])


_PRECISE: printed.Column[Replayed] = ("precise", lambda one: one.precise_share, printed.percent)
_COLUMNS: Sequence[printed.Column[Replayed]] = (
    ("cached", lambda one: one.cached_share, printed.percent),
    ("TTFT mean", lambda one: one.ttft_ms.mean, printed.ms),
    ("p50", lambda one: one.ttft_ms.p50, printed.ms),
    ("p90", lambda one: one.ttft_ms.p90, printed.ms),
    ("p99 ms", lambda one: one.ttft_ms.p99, printed.ms),
    ("TPOT p50", lambda one: one.tpot_ms.p50, "{:.1f}".format),
    ("p99 ms", lambda one: one.tpot_ms.p99, "{:.1f}".format),
    ("whole ms", lambda one: one.whole_ms, printed.ms),
    ("busiest/mean", lambda one: one.busy_imbalance, "{:.2f}".format),
    ("busy", lambda one: one.busy_share, printed.percent),
    ("out tok/s", lambda one: one.output_tokens_per_s, printed.ms),
    ("moved", lambda one: one.moved_sessions, "{:,}".format),
    ("regret ms", lambda one: one.regret_ms, "{:.1f}".format),
    ("cached err", lambda one: one.cached_error, printed.percent),
    ("TTFT err", lambda one: one.ttft_error, printed.percent),
    _PRECISE,
    ("errors", lambda one: one.errors, "{:,}".format),
)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _unheard(_text: str) -> None:
    """With --json nothing but the object is printed."""

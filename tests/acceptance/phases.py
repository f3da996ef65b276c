"""What a fault cost: latency and hits before it, while it lasted, and after, as a table for people."""

from collections.abc import Iterable, Sequence

import msgspec

from extproc.sim.load import Outcome, Run
from extproc.sim.report import percentile

_COLUMNS = ("fault", "phase", "requests", "failed", "TTFT p50", "p99", "answer p50", "p99", "cached")
_FORMAT = "{:<28} {:<7} {:>8} {:>6} {:>9} {:>7} {:>10} {:>7} {:>7}"


class Fault(msgspec.Struct, frozen=True):
    """A fault under load. Moments are monotonic seconds.

    Attributes:
        name: for people.
        struck_s: the moment before it was struck.
        began_s: the moment from which the part was gone.
        ended_s: when it was back, or what is shown as `during` ends.
        run: what clients saw.
    """

    name: str
    struck_s: float
    began_s: float
    ended_s: float
    run: Run


def table(faults: Iterable[Fault]) -> str:
    """All faults, three lines each; times in milliseconds, TTFT of streams alone."""
    lines = [_FORMAT.format(*_COLUMNS)]
    for fault in faults:
        outcomes = fault.run.outcomes
        spans = {
            "before": [one for one in outcomes if one.end_s <= fault.struck_s],
            "during": [one for one in outcomes if one.end_s > fault.struck_s and one.sent_s < fault.ended_s],
            "after": [one for one in outcomes if one.sent_s >= fault.ended_s],
        }
        lines += [_line(fault.name, phase, members) for phase, members in spans.items()]
    return "\n".join(lines)


def said(outcomes: Iterable[Outcome], moment_s: float) -> str:
    """Outcomes one a line, with times relative to a moment; for the text of a failed assertion."""
    return "\n".join(
        f"sent {one.sent_s - moment_s:+.3f} s, first byte "
        + ("none" if one.first_byte_s is None else f"{one.first_byte_s - moment_s:+.3f} s")
        + f", ended {one.end_s - moment_s:+.3f} s: {one.failure} status={one.status} stream={one.stream}"
        for one in outcomes
    )


def _line(name: str, phase: str, outcomes: Sequence[Outcome]) -> str:
    answered = [one for one in outcomes if one.failure is None]
    first = sorted(1000 * one.ttft_s for one in answered if one.ttft_s is not None)
    whole = sorted(1000 * (one.end_s - one.sent_s) for one in answered)
    tokens = sum(one.prompt_tokens for one in answered)
    cached = f"{sum(one.cached_tokens for one in answered) / tokens:.0%}" if tokens else "-"
    times = [_ms(percentile(values, share)) for values in (first, whole) for share in (0.5, 0.99)]
    return _FORMAT.format(name, phase, len(outcomes), len(outcomes) - len(answered), *times, cached)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"

"""What a run amounts to, as numbers that can be compared and printed as JSON."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from extproc.sim.load import Run


class Ttft(msgspec.Struct, frozen=True):
    """Time to the first token of answered streams, in milliseconds; None when there were none."""

    p50: float | None
    p90: float | None
    p99: float | None
    mean: float | None


class Tpot(msgspec.Struct, frozen=True):
    """Time per output token after the first, in milliseconds; None when there were none."""

    p50: float | None
    p99: float | None


class Summary(msgspec.Struct, frozen=True):
    """One run under one policy.

    Attributes:
        requests: requests of the workload, failed ones included.
        errors: requests that failed, in any way.
        failures: the same by `client.Failure`; kinds that did not occur are absent.
        cached_share: cached tokens by prompt tokens over all answered requests; 0 when none was answered.
        ttft_ms: times to the first token.
        tpot_ms: times per output token.
        busy_imbalance: tokens the busiest engine prefilled, by the mean of all engines; 1 is even, and what is
            said when none prefilled anything.
        seconds: duration of the run.
    """

    requests: int
    errors: int
    failures: dict[str, int]
    cached_share: float
    ttft_ms: Ttft
    tpot_ms: Tpot
    busy_imbalance: float
    seconds: float


def summarize(run: Run, prefilled: Mapping[str, float]) -> Summary:
    """Sum up a run.

    Args:
        run: what was sent.
        prefilled: tokens each engine computed for prompts during the run, by its address; see `counters`.
    """
    answered = [one for one in run.outcomes if one.failure is None]
    prompt_tokens = sum(one.prompt_tokens for one in answered)
    first = sorted(1000 * one.ttft_s for one in answered if one.ttft_s is not None)
    each = sorted(1000 * one.tpot_s for one in answered if one.tpot_s is not None)
    return Summary(
        requests=len(run.outcomes),
        errors=len(run.failed),
        failures=dict(Counter(str(one.failure) for one in run.failed)),
        cached_share=sum(one.cached_tokens for one in answered) / prompt_tokens if prompt_tokens else 0.0,
        ttft_ms=Ttft(
            p50=percentile(first, 0.5),
            p90=percentile(first, 0.9),
            p99=percentile(first, 0.99),
            mean=sum(first) / len(first) if first else None,
        ),
        tpot_ms=Tpot(p50=percentile(each, 0.5), p99=percentile(each, 0.99)),
        busy_imbalance=imbalance(list(prefilled.values())),
        seconds=run.seconds,
    )


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Return the value below which `share` of `ordered` lies; None for no values.

    Between two values it interpolates linearly by rank `share * (n - 1)`: method 7 of Hyndman and Fan, "Sample
    Quantiles in Statistical Packages" (1996), the default of NumPy.

    Args:
        ordered: values in ascending order.
        share: from 0 to 1.
    """
    if not ordered:
        return None
    rank = share * (len(ordered) - 1)
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def imbalance(loads: Sequence[float]) -> float:
    """Return the largest load by the mean; 1 when there is no load."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total > 0 else 1.0


def to_json(policies: Mapping[str, Summary]) -> str:
    """Return `{"policies": {name: …}}` in one line, numbers rounded to four decimals."""
    return json.dumps({"policies": _rounded(msgspec.to_builtins(dict(policies)))})


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return round(value, 4) if isinstance(value, float) else value

"""What a replay amounts to: the figures of `warmpath demo` by the same names, and those that only a replay can know."""

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from extproc.replay.world import Ended, Result
from extproc.sim.report import Tpot, Ttft, imbalance, percentile


class Replayed(msgspec.Struct, frozen=True):
    """One policy on one trace.

    Attributes:
        requests: rows of the trace.
        errors: rows that were not answered.
        failures: the same by reason, of which there is one, `too_long`: prompt and answer pass an engine's whole cache.
        cached_share: prompt tokens found cached, by all prompt tokens.
        ttft_ms: time to the first token.
        tpot_ms: time per output token after the first.
        whole_ms: mean time to the last token.
        busy_imbalance: busy time of the busiest engine by the mean of all; 1 is even.
        busy_share: mean share of the run that engines spent in steps.
        seconds: virtual time from the first arrival to the last token.
        output_tokens_per_s: generated tokens by `seconds`.
        moved_sessions: times a session left the endpoint that it was pinned to.
        regret_ms: mean of how much sooner another engine would have given the first token, as things stood; over every
            fourth row.
        cached_error: median of |predicted - real| cached tokens by prompt tokens, in steady state: of the requests that
            arrived behind the first third. None when nothing was predicted.
        ttft_error: median of |predicted - real| TTFT by the real one, in steady state; None when nothing was predicted.
        precise_share: share of the answered rows whose pick was matched by what its engine had told; None without rows.
    """

    requests: int
    errors: int
    failures: Mapping[str, int]
    cached_share: float
    ttft_ms: Ttft
    tpot_ms: Tpot
    whole_ms: float | None
    busy_imbalance: float
    busy_share: float
    seconds: float
    output_tokens_per_s: float
    moved_sessions: int
    regret_ms: float | None
    cached_error: float | None
    ttft_error: float | None
    precise_share: float | None


def summarize(result: Result) -> Replayed:
    """Sum up a replay."""
    ended = result.ended
    steady = sorted(ended, key=lambda one: one.at_s)[len(ended) // 3 :]
    prompt_tokens = sum(one.row.prompt_tokens for one in ended)
    busy = [engine.busy_s for engine in result.engines]
    first = sorted(one.ttft_s * 1000.0 for one in ended)
    each = sorted(tpot for one in ended if (tpot := _tpot_ms(one)) is not None)
    seconds = result.seconds
    return Replayed(
        requests=len(ended) + result.refused,
        errors=result.refused,
        failures={"too_long": result.refused} if result.refused else {},
        cached_share=sum(one.cached_tokens for one in ended) / prompt_tokens if prompt_tokens else 0.0,
        ttft_ms=Ttft(
            p50=percentile(first, 0.5),
            p90=percentile(first, 0.9),
            p99=percentile(first, 0.99),
            mean=_mean(first),
        ),
        tpot_ms=Tpot(p50=percentile(each, 0.5), p99=percentile(each, 0.99)),
        whole_ms=_mean([(one.finished_s - one.at_s) * 1000.0 for one in ended]),
        busy_imbalance=imbalance(busy),
        busy_share=sum(busy) / len(busy) / seconds if seconds > 0 else 0.0,
        seconds=seconds,
        output_tokens_per_s=sum(one.row.output_tokens * one.row.n for one in ended) / seconds if seconds > 0 else 0.0,
        moved_sessions=sum(one.picked.moved for one in ended),
        regret_ms=_mean([one.regret_ms for one in ended if one.regret_ms is not None]),
        cached_error=_median([e for one in steady if (e := _cached_error(one)) is not None]),
        ttft_error=_median([e for one in steady if (e := _ttft_error(one)) is not None]),
        precise_share=_mean([float(one.picked.precise) for one in ended]),
    )


def _tpot_ms(one: Ended) -> float | None:
    job = one.jobs[0]
    return (job.finished_at - job.first_token_at) / (job.produced - 1) * 1000.0 if job.produced > 1 else None


def _cached_error(one: Ended) -> float | None:
    if one.picked.cached_tokens < 0:
        return None
    return abs(one.picked.cached_tokens - one.cached_tokens) / one.row.prompt_tokens


def _ttft_error(one: Ended) -> float | None:
    if one.picked.ttft_ms < 0 or one.ttft_s <= 0:
        return None
    return abs(one.picked.ttft_ms / 1000.0 - one.ttft_s) / one.ttft_s


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None

"""What a replay amounts to, on results made by hand."""

import msgspec
import pytest

from extproc.replay.rows import Row
from extproc.replay.summary import Replayed, summarize
from extproc.replay.world import Ended, Picked, Result
from extproc.sim.report import Summary
from extproc.sim.sequence import Sequence as Job
from extproc.sim.settings import EngineSettings
from extproc.sim.virtual import VirtualEngine


def ended(
    at_s: float,
    first_s: float,
    last_s: float,
    *,
    prompt: int = 100,
    cached: int = 0,
    output: int = 11,
    picked: Picked | None = None,
    regret_ms: float | None = None,
    n: int = 1,
) -> Ended:
    """A row whose answers had their first and last tokens so many seconds after it came."""
    jobs = [Job(prompt, output, ()) for _ in range(n)]
    for late, job in enumerate(jobs):
        job.first_token_at, job.finished_at = at_s + first_s + late, at_s + last_s + late
        job.cached_tokens, job.produced, job.finished = cached, output, "length"
    return Ended(Row(at_s, -1, prompt, output, (), n=n), picked or Picked(0), jobs, at_s, regret_ms)


def summary(*rows: Ended, refused: int = 0, seconds: float = 10.0, busy: tuple[int, ...] = (1,)) -> Replayed:
    """The summary of these rows; engine by engine, `busy` is how many steps of half a second it made."""
    engines = []
    for steps in busy:
        engine = VirtualEngine(EngineSettings(step_s=0.5, per_seq_s=0.0, prefill_tokens_per_s=1e6))
        if steps:
            engine.submit([Job(16, steps, ())], 0.0)
            engine.advance(100.0)
        engines.append(engine)
    return summarize(Result(list(rows), engines, refused, seconds))


def test_every_figure_of_the_demo_is_there_by_the_same_name() -> None:
    """Whoever reads `warmpath demo --json` reads this too; regret and moved sessions come on top."""
    demo = set(Summary.__struct_fields__)
    assert demo <= set(Replayed.__struct_fields__)
    assert {"regret_ms", "moved_sessions"} <= set(Replayed.__struct_fields__) - demo
    one = summary(ended(0.0, 0.1, 0.2))
    assert set(msgspec.to_builtins(one)["ttft_ms"]) == {"p50", "p90", "p99", "mean"}
    assert set(msgspec.to_builtins(one)["tpot_ms"]) == {"p50", "p99"}


def test_times_are_those_of_the_rows() -> None:
    """First tokens, times per further token, and whole answers, in ms from the arrival of each."""
    rows = [ended(5.0 * n, 0.1 * n, 0.1 * n + 0.01 * n * 10) for n in range(1, 12)]
    one = summary(*rows)
    assert one.ttft_ms.mean == pytest.approx(600)
    assert one.ttft_ms.p50 == pytest.approx(600)
    assert one.ttft_ms.p90 == pytest.approx(1000)
    assert one.tpot_ms.p50 == pytest.approx(60)
    assert one.tpot_ms.p99 == pytest.approx(109)
    assert one.whole_ms == pytest.approx(1200)


def test_several_answers_have_one_first_token_and_one_end() -> None:
    """The first token of the first one, the last token of the last one; all their tokens count as generated."""
    one = summary(ended(1.0, 0.5, 2.5, n=3, output=21), seconds=10.0)
    assert (one.ttft_ms.mean, one.whole_ms) == (500, 4500)
    assert one.tpot_ms.p50 == 100
    assert one.output_tokens_per_s == 6.3


def test_an_answer_of_one_token_has_no_time_per_further_token() -> None:
    """It is left out of those figures, not counted as 0."""
    one = summary(ended(0.0, 0.1, 0.1, output=1), ended(0.0, 0.1, 0.3, output=3))
    assert one.tpot_ms.p50 == pytest.approx(100)
    assert summary(ended(0.0, 0.1, 0.1, output=1)).tpot_ms.p50 is None


def test_cached_share_is_by_tokens() -> None:
    """A long prompt weighs as much as it is long."""
    assert summary(ended(0, 1, 2, prompt=900, cached=600), ended(0, 1, 2, prompt=100)).cached_share == 0.6


def test_balance_is_of_the_time_that_engines_are_busy() -> None:
    """Busiest by mean, and the mean share of the run; idle engines count."""
    one = summary(ended(0, 1, 2), busy=(6, 2, 0, 0), seconds=4.0)
    assert (one.busy_imbalance, one.busy_share) == (3.0, 0.25)
    assert summary(busy=(0, 0)).busy_imbalance == 1.0


def test_moves_and_regret_are_of_the_decisions() -> None:
    """Moves are counted, regret is averaged over those that were held against the truth."""
    rows = [ended(0, 1, 2, picked=Picked(0, moved=n % 2 == 0), regret_ms=10.0 * n) for n in range(3)]
    one = summary(*rows)
    assert (one.moved_sessions, one.regret_ms) == (2, 10.0)
    assert summary(ended(0, 1, 2)).regret_ms is None


def test_errors_of_predictions_are_medians() -> None:
    """Cached tokens by the prompt, TTFT by the real one, in either direction; who predicts nothing has none.

    The first third of the requests, by arrival, is not counted: nothing was learnt yet.
    """
    wrong = [(100.0, 300.0), (40.0, 2000.0), (0.0, 900.0)]
    rows = [ended(1, 1.0, 2.0, prompt=200, cached=80, picked=Picked(0, None, c, t)) for c, t in wrong]
    early = [ended(0, 1.0, 2.0, prompt=200, cached=0, picked=Picked(0, None, 200.0, 9000.0)) for _ in range(2)]
    one = summary(*rows, *early, ended(1, 1, 2))
    assert (one.cached_error, one.ttft_error) == (0.2, 0.7)
    none = summary(ended(0, 1, 2))
    assert (none.cached_error, none.ttft_error) == (None, None)


def test_the_share_that_was_matched_precisely_is_one_of_answered_rows() -> None:
    """One of four; without rows there is none."""
    rows = [ended(1.0 * n, 0.1, 0.2, picked=Picked(0, precise=n == 2)) for n in range(4)]
    assert summary(*rows).precise_share == 0.25
    assert summary().precise_share is None


def test_refused_rows_are_errors_with_a_reason() -> None:
    """They count as requests, and in nothing else."""
    one = summary(ended(0, 1, 2), refused=2)
    assert (one.requests, one.errors, one.failures) == (3, 2, {"too_long": 2})
    assert summary(ended(0, 1, 2)).failures == {}


def test_a_replay_without_answers_has_no_times() -> None:
    """Nothing is divided by nothing."""
    one = summary(refused=1, seconds=0.0, busy=(0,))
    assert (one.ttft_ms.mean, one.tpot_ms.p99, one.whole_ms, one.regret_ms) == (None, None, None, None)
    assert (one.cached_share, one.busy_share, one.output_tokens_per_s) == (0.0, 0.0, 0.0)

"""A run is summed up by stated formulas, failures included."""

import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from extproc.errors import EngineError
from extproc.sim.client import Failure
from extproc.sim.counters import prefilled_tokens, since
from extproc.sim.display import Bar, table
from extproc.sim.load import Outcome, Run, in_flight
from extproc.sim.report import imbalance, percentile, summarize, to_json


def outcome(sent_s: float = 0.0, end_s: float = 1.0, **changes: object) -> Outcome:
    """An answered stream, first token half a second after it was sent."""
    values: dict[str, object] = {
        "kind": "steady",
        "session": "",
        "turn": 0,
        "stream": True,
        "sent_s": sent_s,
        "first_byte_s": sent_s + 0.5,
        "first_s": sent_s + 0.5,
        "end_s": end_s,
        "status": 200,
        "failure": None,
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "output_tokens": 6,
    }
    return Outcome(**(values | changes))  # type: ignore[arg-type]


def test_percentiles_of_known_data() -> None:
    """Linear interpolation by rank share * (n - 1); the published example values of that method."""
    assert percentile([], 0.5) is None
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([float(n) for n in range(1, 101)], 0.9) == pytest.approx(90.1)
    assert percentile([float(n) for n in range(1, 101)], 0.99) == pytest.approx(99.01)


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_percentiles_agree_with_the_standard_library(values: list[float]) -> None:
    """The method is the one `statistics.quantiles` calls inclusive."""
    expected = statistics.quantiles(values, n=10, method="inclusive")
    assert [percentile(sorted(values), n / 10) for n in range(1, 10)] == pytest.approx(expected, abs=1e-6)


def test_a_summary_counts_answered_requests_and_names_failures() -> None:
    """Shares and times are of answered requests; streams alone have a time to the first token."""
    run = Run(
        started_s=10.0,
        ended_s=14.0,
        outcomes=(
            outcome(),
            outcome(cached_tokens=80, first_s=0.1),
            outcome(stream=False, first_s=1.0),
            outcome(failure=Failure.STATUS, status=503, first_s=None, prompt_tokens=0, cached_tokens=0),
            outcome(failure=Failure.BROKEN, first_s=0.001, prompt_tokens=0, cached_tokens=0),
        ),
    )
    summary = summarize(run, {"a": 300.0, "b": 100.0})
    assert (summary.requests, summary.errors) == (5, 2)
    assert summary.failures == {"status": 1, "broken": 1}
    assert summary.cached_share == pytest.approx(160 / 300)
    assert summary.ttft_ms.p50 == pytest.approx(300.0)
    assert summary.ttft_ms.mean == pytest.approx(300.0)
    assert summary.tpot_ms.p50 == pytest.approx(140.0)  # (1.0 - 0.5) / 5 and (1.0 - 0.1) / 5 seconds
    assert summary.busy_imbalance == pytest.approx(1.5)
    assert summary.seconds == 4.0


def test_a_run_without_answers_still_has_a_summary() -> None:
    """Where there is nothing to measure it says so, and does not fail or show a zero latency."""
    run = Run(0.0, 1.0, (outcome(failure=Failure.CONNECT, first_s=None),))
    summary = summarize(run, {})
    assert summary.ttft_ms.p50 is None
    assert summary.tpot_ms.p99 is None
    assert summary.cached_share == 0.0
    assert summary.busy_imbalance == 1.0


def test_the_json_has_the_promised_shape() -> None:
    """Tools read `policies.<name>`; absent measures are null."""
    shown = json.loads(to_json({"round_robin": summarize(Run(0.0, 1.0, (outcome(),)), {"a": 1.0})}))
    one = shown["policies"]["round_robin"]
    assert set(one) >= {"requests", "errors", "cached_share", "ttft_ms", "tpot_ms", "busy_imbalance", "seconds"}
    assert set(one["ttft_ms"]) == {"p50", "p90", "p99", "mean"}
    assert set(one["tpot_ms"]) == {"p50", "p99"}
    assert one["ttft_ms"]["p50"] == 500.0


def test_imbalance_is_the_busiest_over_the_mean() -> None:
    """1 is even; n is everything on one of n engines."""
    assert imbalance([5.0, 5.0]) == 1.0
    assert imbalance([0.0, 0.0, 0.0, 8.0]) == 4.0
    assert imbalance([]) == 1.0


def test_requests_in_flight_at_a_moment() -> None:
    """A request is in flight from the moment it is sent until just before it ends."""
    early, late = outcome(0.0, 2.0), outcome(1.5, 3.0)
    assert in_flight([early, late], 1.0) == [early]
    assert in_flight([early, late], 1.5) == [early, late]
    assert in_flight([early, late], 2.0) == [late]


def test_prefilled_tokens_are_all_prompt_tokens_less_the_cached() -> None:
    """Counters are summed over an engine's label sets; a page without them is refused."""
    page = (
        "# TYPE vllm:prompt_tokens_total counter\n"
        'vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0\n'
        'vllm:prompt_tokens_total{engine="1",model_name="m"} 50.0\n'
        'vllm:prompt_tokens_cached_total{engine="0",model_name="m"} 300.0\n'
        "vllm:prompt_tokens_created 1e9\n"
    )
    assert prefilled_tokens(page) == 750.0
    with pytest.raises(EngineError, match="prompt_tokens_cached_total"):
        prefilled_tokens("vllm:prompt_tokens_total 5.0\n")


def test_growth_between_two_readings() -> None:
    """An engine that restarted in between counts from 0 again."""
    assert since({"a": 10.0, "b": 10.0}, {"a": 25.0, "b": 4.0}) == {"a": 15.0, "b": 4.0}


def test_the_table_compares_the_last_policy_with_the_first() -> None:
    """Every policy has a column; the ratio is last by first, and one policy alone has no ratio."""
    slow = summarize(Run(0.0, 1.0, (outcome(),)), {"a": 1.0})
    fast = summarize(Run(0.0, 1.0, (outcome(first_s=0.1),)), {"a": 1.0})
    console = Console(width=100, force_terminal=False)
    with console.capture() as shown:
        console.print(table({"round_robin": slow, "predicted_ttft": fast}))
    row = next(line for line in shown.get().splitlines() if "TTFT p90" in line)
    assert row.split()[2:] == ["500", "ms", "100", "ms", "0.20"]
    with console.capture() as alone:
        console.print(table({"round_robin": slow}))
    assert "ratio" not in alone.get()


def test_progress_is_a_few_plain_lines_where_no_terminal_is() -> None:
    """Four lines a run, the last at the end, with the failures so far."""
    console = Console(width=100, force_terminal=False)
    with console.capture() as shown, Bar(console, "round_robin", 10) as bar:
        for _ in range(9):
            bar.note(outcome())
        bar.note(outcome(failure=Failure.STATUS))
    lines = shown.get().splitlines()
    assert len(lines) == 4
    assert lines[-1] == "round_robin: 10 of 10 requests, 1 failed"

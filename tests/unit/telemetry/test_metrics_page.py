"""What is recorded stands on the page, under stable names, with bounded labels."""

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.telemetry import families as module
from extproc.telemetry.metrics import Decided, EngineView, Finished, Metrics, outcome_of

_Series = tuple[str, tuple[tuple[str, str], ...]]


def _samples(metrics: Metrics) -> dict[_Series, float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.page().decode())
        for sample in family.samples
    }


def _at(metrics: Metrics, name: str, **labels: str) -> float:
    return _samples(metrics)[f"warmpath_{name}", tuple(sorted(labels.items()))]


def _first_bucket(metrics: Metrics, name: str) -> str:
    """Upper bound of the bucket that the only observation of a histogram fell into."""
    buckets = [
        (float(dict(labels)["le"]), dict(labels)["le"])
        for (sample, labels), value in _samples(metrics).items()
        if sample == f"warmpath_{name}_bucket" and value == 1.0
    ]
    return min(buckets)[1]


def _view(queries: float = 100.0) -> EngineView:
    return EngineView(
        reachable=True,
        asleep=False,
        running=3,
        waiting=2,
        kv_usage=0.5,
        scraped_at=7.0,
        prefix_queries=queries,
        prefix_hits=25.0,
    )


def test_a_decision_is_counted_timed_and_in_flight_until_settled() -> None:
    """`decided` and `settled` move every metric of the request path."""
    metrics = Metrics()
    metrics.decided(Decided("chat", "predicted_ttft", "pinned", 0.0003, 512.0, 768.0))
    metrics.decided(Decided("chat", "predicted_ttft", "new", 0.0003))
    metrics.settled("chat")
    assert _at(metrics, "decisions_total", pool="chat", policy="predicted_ttft") == 2
    assert _at(metrics, "sessions_total", pool="chat", outcome="pinned") == 1
    assert _at(metrics, "predicted_cached_tokens_total", pool="chat") == 512
    assert _at(metrics, "best_cached_tokens_total", pool="chat") == 768
    assert _at(metrics, "forgone_cached_tokens_total", pool="chat") == 256
    assert _at(metrics, "decision_seconds_bucket", pool="chat", le="0.00025") == 0
    assert _at(metrics, "decision_seconds_bucket", pool="chat", le="0.0004") == 2
    assert _at(metrics, "in_flight", pool="chat") == 1


@pytest.mark.parametrize(
    ("prompt", "cached", "expected"),
    [(100, 30, (30, 70)), (100, -1, (0, 100)), (100, 300, (100, 0)), (100, 0, (0, 100))],
)
def test_cached_and_uncached_tokens_add_up_to_the_prompt(prompt: int, cached: int, expected: tuple[int, int]) -> None:
    """An engine that tells nothing of its cache, or too much, never makes a counter go back."""
    metrics = Metrics()
    metrics.finished(Finished("chat", "e:1", "ok", 0.1, 1.0, prompt, cached, 7))
    labels = {"pool": "chat", "endpoint": "e:1"}
    assert _at(metrics, "cached_tokens_total", **labels) == expected[0]
    assert _at(metrics, "uncached_tokens_total", **labels) == expected[1]
    assert _at(metrics, "prompt_tokens_total", **labels) == prompt
    assert _at(metrics, "output_tokens_total", **labels) == 7


def test_a_body_that_could_not_be_read_is_counted_by_reason() -> None:
    """Only those: a decision without a flaw leaves no series."""
    metrics = Metrics()
    metrics.decided(Decided("chat", "predicted_ttft", "none", 0.0003))
    metrics.decided(Decided("chat", "predicted_ttft", "none", 0.0003, unread="too_deep"))
    unread = {labels: value for (name, labels), value in _samples(metrics).items() if "unread" in name}
    assert unread == {(("pool", "chat"), ("reason", "too_deep")): 1.0}


@pytest.mark.parametrize(
    ("predicted", "reported", "at_most"),
    [
        (500.0, 500, 0.01),
        (450.0, 500, 0.05),
        (550.0, 500, 0.05),
        (0.0, 200, 0.2),
        (1000.0, 0, 1.0),
        (4000.0, 0, "+Inf"),
    ],
)
def test_predictions_of_cached_tokens_are_held_against_reports(
    predicted: float, reported: int, at_most: float | str
) -> None:
    """The error, too much or too little, is a share of the prompt of 1,000 tokens."""
    metrics = Metrics()
    metrics.finished(
        Finished("chat", "e", "ok", prompt_tokens=1000, cached_tokens=reported, predicted_cached_tokens=predicted)
    )
    assert _first_bucket(metrics, "cached_tokens_error_share") == str(at_most)


@pytest.mark.parametrize(
    ("real", "predicted", "at_most"), [(0.1, 0.1, "1.0"), (0.19, 0.1, "2.0"), (0.1, 1.0, "0.2"), (9, 1, "+Inf")]
)
def test_real_times_to_the_first_token_are_held_against_predicted_ones(
    real: float, predicted: float, at_most: str
) -> None:
    """The ratio is real by predicted: 2 is twice as late as expected."""
    metrics = Metrics()
    metrics.finished(Finished("chat", "e", "ok", real, predicted_ttft_s=predicted))
    assert _first_bucket(metrics, "ttft_ratio") == at_most


def test_what_is_unknown_is_not_recorded() -> None:
    """Negative times and tokens mean "not told": only the request itself is counted."""
    metrics = Metrics()
    metrics.finished(Finished("chat", "", "no_answer"))
    recorded = {name for name, _ in _samples(metrics) if not name.startswith("warmpath_store_")}
    recorded -= {"warmpath_build_info"}
    assert recorded == {"warmpath_requests_total"}
    metrics.finished(Finished("chat", "e:1", "ok", 0.1, 1.0, prompt_tokens=100, cached_tokens=5))
    metrics.finished(Finished("chat", "e:1", "ok", prompt_tokens=0, cached_tokens=0, predicted_cached_tokens=0.0))
    metrics.finished(Finished("chat", "e:1", "ok", prompt_tokens=9, predicted_cached_tokens=4.0, predicted_ttft_s=0.1))
    assert not [name for name, _ in _samples(metrics) if "error_share" in name or "ttft_ratio" in name]


def test_every_other_recorder_reaches_the_page() -> None:
    """Refusals, stages, anomalies, access-log entries, scrapes and rates are on the page."""
    metrics = Metrics("0.1.0")
    metrics.refused("no_endpoint")
    metrics.stage("match", 0.0001)
    metrics.fell_back("chat", "load")
    metrics.anomaly("late_body")
    metrics.access_log("learnt", 3)
    metrics.prefill_rate("chat", "e:1", 8000.0)
    metrics.scraped("chat", "read")
    metrics.engine("chat", "e:1", _view())
    assert _at(metrics, "refusals_total", reason="no_endpoint") == 1
    assert _at(metrics, "decision_stage_seconds_count", stage="match") == 1
    assert _at(metrics, "fallbacks_total", pool="chat", rung="load") == 1
    assert _at(metrics, "exchange_anomalies_total", kind="late_body") == 1
    assert _at(metrics, "access_log_entries_total", outcome="learnt") == 3
    assert _at(metrics, "prefill_tokens_per_second", pool="chat", endpoint="e:1") == 8000
    assert _at(metrics, "scrapes_total", pool="chat", outcome="read") == 1
    assert _at(metrics, "engine_hit_share", pool="chat", endpoint="e:1") == 0.25
    assert _at(metrics, "engine_waiting", pool="chat", endpoint="e:1") == 2
    assert _at(metrics, "build_info", version="0.1.0") == 1


def test_an_endpoint_that_left_leaves_counters_alone() -> None:
    """`forget` drops the gauges of one endpoint, once or twice, and nothing else."""
    metrics = Metrics()
    metrics.engine("chat", "e:1", _view())
    metrics.engine("chat", "e:2", _view(queries=0.0))
    metrics.finished(Finished("chat", "e:1", "ok", prompt_tokens=1))
    metrics.forget("chat", "e:1")
    metrics.forget("chat", "e:1")
    gauges = {labels for name, labels in _samples(metrics) if name.startswith(("warmpath_engine", "warmpath_endpoint"))}
    assert gauges == {(("endpoint", "e:2"), ("pool", "chat"))}
    assert _at(metrics, "prompt_tokens_total", pool="chat", endpoint="e:1") == 1


def test_label_sets_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the cap new label values are counted under `other`, and the page stops growing."""
    monkeypatch.setattr(module, "MAX_SERIES", 3)
    metrics = Metrics()
    for number in range(10):
        metrics.refused(f"reason-{number}")
    reasons = {
        dict(labels)["reason"]: value for (name, labels), value in _samples(metrics).items() if "refusals" in name
    }
    assert reasons == {"reason-0": 1, "reason-1": 1, "reason-2": 1, "other": 7}


def test_two_objects_share_nothing_and_touch_no_global_registry() -> None:
    """Metrics of two components in one process are apart, and the library's own registry stays as it was."""
    before = prometheus_client.generate_latest()
    one, two = Metrics(), Metrics()
    one.refused("internal")
    assert b"internal" not in two.page()
    assert b"warmpath" not in prometheus_client.generate_latest()
    assert before.count(b"# TYPE") == prometheus_client.generate_latest().count(b"# TYPE")


def test_the_page_has_no_creation_times() -> None:
    """`_created` series would double the page; they are left out, and every family keeps its own name prefix."""
    metrics = Metrics()
    metrics.decided(Decided("chat", "round_robin", "none", 0.1))
    page = metrics.page()
    assert b"_created" not in page
    assert all(line.startswith((b"#", b"warmpath_")) for line in page.splitlines())


@pytest.mark.parametrize(
    ("status", "flags", "expected"),
    [
        (200, (), "ok"),
        (302, (), "ok"),
        (404, (), "client_error"),
        (429, (), "client_error"),
        (503, ("UF",), "engine_error"),
        (0, (), "no_answer"),
        (200, ("UC",), "cut"),
        (200, ("UR",), "cut"),
        (200, ("UPE", "DC"), "disconnected"),
        (200, ("DC",), "disconnected"),
        (0, ("DC",), "disconnected"),
        (0, ("DPE",), "disconnected"),
        (200, ("DR",), "disconnected"),
        (0, ("DR",), "disconnected"),
    ],
)
def test_outcomes(status: int, flags: tuple[str, ...], expected: str) -> None:
    """A client that left is the client's doing whatever status was sent; else the status decides."""
    assert outcome_of(status, flags) == expected


@pytest.mark.parametrize("status", [200, 504])
def test_a_time_limit_is_an_outcome_of_its_own(status: int) -> None:
    """A stream that a limit broke off had status 200 long before: it is not well for that."""
    assert outcome_of(status, (), "stall") == "time_limit"

"""One worker watches what it is told of: it names what ran out, forgets what is over, and counts."""

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from extproc import watching
from extproc.clock import ManualClock
from extproc.envoy.contract import Running, Served
from extproc.govern.stages import Stage
from extproc.telemetry.families import Families
from extproc.telemetry.limit_metrics import LimitMetrics
from extproc.watching import Watching


class Bench:
    """A worker's watch, with a clock that is turned by hand."""

    def __init__(self) -> None:
        self.clock = ManualClock(0.0)
        self.named: list[tuple[str, Stage]] = []
        self.registry = CollectorRegistry()
        metrics = LimitMetrics(Families(self.registry))
        self.watching = Watching(self.clock, lambda charge, stage: self.named.append((charge, stage)), metrics)

    def sees(self, at: float, charge: str, sent_bytes: int, **fields: object) -> None:
        """One entry of a request that its endpoint has since 0."""
        self.clock.now = at
        running = Running(charge, "main", "chat", 1, sent_bytes, 1e9 + at, at, 5.0, 2.0)
        self.watching.running(msgspec.structs.replace(running, **fields))

    def metric(self, name: str, **labels: str) -> float | None:
        """One sample."""
        return self.registry.get_sample_value(name, labels)


def test_what_ran_out_is_named_until_it_is_over() -> None:
    """Each of its entries names it again, as a call to its worker may have been lost."""
    bench = Bench()
    for at in (0.5, 4.5, 5.0, 5.5):
        bench.sees(at, "r-1", 0)
        bench.sees(at, "r-2", int(100 * at))
    assert bench.named == [("r-1", "first_token"), ("r-1", "first_token")]


def test_a_stall_is_named() -> None:
    """Silence after the first token."""
    bench = Bench()
    for at, sent in ((0.5, 10), (1.0, 20), (2.5, 20), (3.0, 20)):
        bench.sees(at, "r-1", sent)
    assert bench.named == [("r-1", "stall")]


def test_a_request_without_an_endpoint_is_not_judged() -> None:
    """While Envoy connects, the time to the first token has not begun."""
    bench = Bench()
    for at in (0.5, 6.0, 12.0):
        bench.sees(at, "r-1", 0, age_s=-1.0)
    assert bench.named == []


def test_responses_open_their_streams_before_the_prefill() -> None:
    """The first events of that API are no token: an early stall is none."""
    bench = Bench()
    for at in (0.5, 3.0, 4.9):
        bench.sees(at, "r-1", 900, kind="responses")
    assert bench.named == []
    bench.sees(5.0, "r-1", 900, kind="responses")
    assert bench.named == [("r-1", "first_token")]


def test_what_is_over_is_counted_and_forgotten() -> None:
    """The stage and the model that ended it, and the longest silence."""
    bench = Bench()
    for at, sent in ((0.5, 10), (1.5, 10), (2.0, 20)):
        bench.sees(at, "r-1", sent)
    bench.watching.over(Served(charge_id="r-1", pool="main", stage="stall", metadata={"model": "m"}))
    assert bench.metric("warmpath_time_limits_total", pool="main", stage="stall", model="m") == 1.0
    assert bench.metric("warmpath_answer_silence_seconds_sum", pool="main") == 1.0
    bench.watching.over(Served(charge_id="r-1", pool="main"))
    assert bench.metric("warmpath_answer_silence_seconds_count", pool="main") == 1.0
    bench.sees(10.0, "r-1", 20)
    assert bench.named == []


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of which nothing was heard for longest make room."""
    monkeypatch.setattr(watching, "_MOST", 3)
    bench = Bench()
    for at, charge in enumerate(("r-1", "r-2", "r-3", "r-1", "r-4")):
        bench.sees(0.1 * at, charge, 10)
    assert list(bench.watching._seen) == ["r-3", "r-1", "r-4"]

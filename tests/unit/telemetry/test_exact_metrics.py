"""What a page shows of exact profiles."""

from prometheus_client import CollectorRegistry, generate_latest

from extproc.telemetry.exact_metrics import ExactMetrics
from extproc.telemetry.families import Families


def test_decisions_by_rung_and_blocks_by_endpoint() -> None:
    """Each decision counts under how its prompt was matched; an endpoint whose profile ended has no series."""
    registry = CollectorRegistry(auto_describe=False)
    metrics = ExactMetrics(Families(registry))
    for _ in range(2):
        metrics.matched("chat", "precise")
    metrics.matched("chat", "load")
    metrics.holds("chat", "a", 7)
    metrics.holds("chat", "b", 9)
    metrics.holds("chat", "b", None)
    metrics.holds("chat", "c", None)
    lines = generate_latest(registry).decode().splitlines()
    assert [line for line in lines if line[0] != "#" and "_created" not in line] == [
        'warmpath_matched_total{pool="chat",rung="precise"} 2.0',
        'warmpath_matched_total{pool="chat",rung="load"} 1.0',
        'warmpath_exact_profile_blocks{endpoint="a",pool="chat"} 7.0',
    ]

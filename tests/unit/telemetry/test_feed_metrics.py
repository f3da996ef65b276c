"""The feed's part of a metrics page."""

import msgspec

from extproc.follower import Counts
from extproc.telemetry.metrics import Metrics


def shown(metrics: Metrics) -> set[str]:
    """Its samples."""
    page = metrics.page().decode().splitlines()
    return {line.removeprefix("warmpath_feed_") for line in page if line.startswith("warmpath_feed_")}


def test_totals_are_shown_as_they_are() -> None:
    """Telling the same totals twice counts once; every count of a follower has a series."""
    metrics, counts = Metrics(), Counts(other_version=3, gaps=1, restored=5)
    for _ in range(2):
        metrics.feed.tell(msgspec.structs.asdict(counts))
    counts.written += 2
    metrics.feed.tell(msgspec.structs.asdict(counts))
    assert shown(metrics) == {
        'anomalies_total{kind="other_version"} 3.0',
        'anomalies_total{kind="damaged"} 0.0',
        'anomalies_total{kind="lost"} 0.0',
        'anomalies_total{kind="gaps"} 1.0',
        'anomalies_total{kind="started_over"} 0.0',
        'snapshots_total{action="read"} 5.0',
        'snapshots_total{action="written"} 2.0',
    }


def test_nothing_is_shown_before_anything_is_told() -> None:
    """A keeper has no feed."""
    assert shown(Metrics()) == set()

"""Metrics of the feed of profiles: what of it was skipped, lost or missed, and how often snapshots went round."""

from collections.abc import Mapping

from extproc.telemetry.families import Families

_SNAPSHOTS = {"restored": "read", "written": "written"}


class FeedMetrics:
    """The feed's part of a worker's metrics. Totals are taken over as they are: telling one twice counts once."""

    def __init__(self, families: Families) -> None:
        self._anomalies = families.counter(
            "feed_anomalies_total", "Entries and snapshots skipped, deltas lost, gaps met.", ("kind",)
        )
        self._snapshots = families.counter("feed_snapshots_total", "Snapshots of profiles.", ("action",))
        self._told: dict[str, int] = {}

    def tell(self, counts: Mapping[str, int]) -> None:
        """What was counted since the start of the process, by its name in `follower.Counts`."""
        for name, total in counts.items():
            grown = total - self._told.get(name, 0)
            self._told[name] = total
            if name in _SNAPSHOTS:
                self._snapshots.at(_SNAPSHOTS[name]).inc(grown)
            else:
                self._anomalies.at(name).inc(grown)

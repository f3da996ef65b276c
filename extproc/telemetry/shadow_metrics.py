"""Metrics of shadow traffic: what was sent again, and why not."""

from typing import Literal

from extproc.telemetry.families import Families

ShadowOutcome = Literal[
    "mirrored",
    "compared",
    "primary_failed",
    "shadow_failed",
    "both_failed",
    "unfit",
    "cut",
    "no_copy",
    "overrun",
    "not_kept",
    "failed",
    "over_cap",
    "late",
    "queued",
    "primary_busy",
    "shadow_busy",
    "no_endpoint",
]
"""What became of a request that was drawn: it was sent to be mirrored; a result was kept; or why there is none."""


class ShadowMetrics:
    """Shadows' part of a worker's metrics."""

    def __init__(self, families: Families) -> None:
        self._requests = families.counter(
            "shadow_requests_total", "Requests drawn for a shadow.", ("model", "mode", "outcome")
        )
        self._under_way = families.gauge("shadow_under_way", "Comparisons under way.", ("model",))

    def ended(self, model: str, mode: str, outcome: ShadowOutcome) -> None:
        """A request that was drawn is done with; names are those of the configuration."""
        self._requests.at(model, mode, outcome).inc()

    def under_way(self, model: str, count: int) -> None:
        """So many comparisons of a model are under way."""
        self._under_way.at(model).set(count)

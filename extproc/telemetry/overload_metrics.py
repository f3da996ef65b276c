"""Metrics of overload: what waits, for how long, who was turned away, and how full pools are."""

from collections.abc import Mapping
from typing import Final, Literal

from extproc.telemetry.families import Families

Left = Literal["granted", "timeout", "full", "displaced", "client_left", "shutting_down"]
"""How a request left the queue, or why it did not come in."""
Shed = Literal["rejected", "fell_back"]

_WAITS_S: Final = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)


class OverloadMetrics:
    """Overload's part of a worker's metrics."""

    def __init__(self, families: Families) -> None:
        counter, gauge = families.counter, families.gauge
        self._requests = gauge("queue_requests", "Requests that wait for a saturated pool.", ("pool", "class"))
        self._tokens = gauge("queue_tokens", "Tokens of work that they stand for.", ("pool",))
        self._wait = families.histogram(
            "queue_wait_seconds", "Time in the queue of requests that were let through.", ("pool", "class"), _WAITS_S
        )
        self._left = counter("queue_left_total", "Requests that left the queue.", ("pool", "class", "outcome"))
        self._shed = counter("overload_shed_total", "Requests kept from a saturated pool.", ("pool", "action"))
        self._saturated = gauge("saturated_endpoints", "Endpoints without room, of those that may serve.", ("pool",))
        self._drain = gauge("drain_rate", "Requests a second that all replicas finish while at work.", ("pool",))

    def left(self, pool: str, band: str, outcome: Left, waited_s: float = 0.0) -> None:
        """A request is in the queue no more; `waited_s` is how long one that was granted had waited."""
        self._left.at(pool, band, outcome).inc()
        if outcome == "granted":
            self._wait.at(pool, band).observe(waited_s)

    def shed(self, pool: str, action: Shed) -> None:
        """A request was turned away, or sent to another model."""
        self._shed.at(pool, action).inc()

    def queue(self, pool: str, requests: Mapping[str, int], tokens: float) -> None:
        """What waits: requests by class, and their tokens."""
        for band, count in requests.items():
            self._requests.at(pool, band).set(count)
        self._tokens.at(pool).set(tokens)

    def pool(self, pool: str, saturated: int, drain_per_s: float) -> None:
        """How full a pool is."""
        self._saturated.at(pool).set(saturated)
        self._drain.at(pool).set(drain_per_s)

"""Metrics of breakers: what struck them, and which endpoints are left alone."""

from extproc.telemetry.families import Families


class BreakerMetrics:
    """Breakers' part of a worker's metrics."""

    def __init__(self, families: Families) -> None:
        at = ("pool", "endpoint")
        self._strikes = families.counter("breaker_strikes_total", "Answers that count against their endpoint.", at)
        self._slow = families.counter("breaker_slow_total", "Strikes for first tokens that were far too late.", at)
        self._openings = families.counter("breaker_openings_total", "Times that a breaker was seen to open.", at)
        self._probes = families.counter("breaker_probes_total", "Requests sent to try an endpoint again.", at)
        self._lost = families.counter("breaker_verdicts_lost_total", "Verdicts that the store was not told.", ())
        self._open = families.gauge("breaker_open", "1 while an endpoint's breaker is open, 0.5 half open, else 0.", at)

    def strike(self, pool: str, endpoint: str) -> None:
        """An answer counts against its endpoint."""
        self._strikes.at(pool, endpoint).inc()

    def slow(self, pool: str, endpoint: str) -> None:
        """It does for being late."""
        self._slow.at(pool, endpoint).inc()

    def lost(self) -> None:
        """A verdict could not be told."""
        self._lost.at().inc()

    def probe(self, pool: str, endpoint: str) -> None:
        """This worker tries an endpoint whose breaker is half open."""
        self._probes.at(pool, endpoint).inc()

    def changed(self, pool: str, endpoint: str, state: str) -> None:
        """A breaker is in another state than before: `closed`, `open` or `half_open`."""
        if state == "open":
            self._openings.at(pool, endpoint).inc()
        self._open.at(pool, endpoint).set({"open": 1.0, "half_open": 0.5}.get(state, 0.0))

    def forget(self, pool: str, endpoint: str) -> None:
        """Drop the gauge of an endpoint that left; its counters stay, as counters must."""
        self._open.drop(pool, endpoint)

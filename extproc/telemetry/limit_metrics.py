"""Metrics of time limits: which ran out, how long answers stood still, and whether workers can tell each other."""

from typing import Literal

from extproc.telemetry.families import Families

Told = Literal["told", "unreachable"]

# Entries come twice a second: shorter silences are not seen.
_SILENCE_S = (0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0)


class LimitMetrics:
    """Time limits' part of a worker's metrics."""

    def __init__(self, families: Families) -> None:
        self._ran_out = families.counter(
            "time_limits_total", "Requests that a time limit ended.", ("pool", "stage", "model")
        )
        self._silence = families.histogram(
            "answer_silence_seconds", "Longest silence after the first token of watched answers.", ("pool",), _SILENCE_S
        )
        self._told = families.counter("time_limit_calls_total", "Calls to workers to end requests.", ("outcome",))

    def ran_out(self, pool: str, stage: str, model: str) -> None:
        """A limit ended a request; `stage` as `govern.stages.Stage`, `model` of the configuration or empty."""
        self._ran_out.at(pool, stage, model).inc()

    def silence(self, pool: str, seconds: float) -> None:
        """A watched answer is over."""
        self._silence.at(pool).observe(seconds)

    def told(self, outcome: Told) -> None:
        """Another worker was asked to end requests."""
        self._told.at(outcome).inc()

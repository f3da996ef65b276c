"""Metrics of a relay: what became of the answers that passed through it, and of the engines that gave them."""

from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest

from extproc.telemetry.families import Families, WithoutCreated

RelayOutcome = Literal["whole", "moved", "continued", "failed", "passed", "refused", "gone"]
"""What became of a relayed request: answered by the first engine; moved to another one before anything of it was sent;
continued on another one; given up; answered as an engine or the gateway answered, with another status than 200; refused
by the relay itself; left by its client."""


class RelayMetrics:
    """The metrics of one relay process."""

    def __init__(self, version: str) -> None:
        """Declare them on a registry of this object's own; `version` is shown as `warmpath_build_info`."""
        self._registry = registry = CollectorRegistry(auto_describe=False)
        families = Families(registry)
        families.gauge("build_info", "1, with the version as label.", ("version",)).at(version).set(1)
        self._requests = families.counter(
            "relay_requests_total", "Relayed requests, by what became of them.", ("outcome",)
        )
        self._deaths = families.counter(
            "relay_deaths_total", "Engines lost while a relayed request was at them, by how it showed.", ("how",)
        )
        self._resumed = families.counter(
            "relay_resumed_total", "Requests sent to another engine: whole, or continued by ids or text.", ("form",)
        )
        self._failures = families.counter("relay_failures_total", "Relayed answers given up, by reason.", ("reason",))
        self._bytes = families.counter("relay_bytes_total", "Bytes of answers received from engines.", ()).at()
        self._open = families.gauge("relay_open", "Requests in the relay now.", ()).at()
        self._held = families.gauge(
            "relay_held_bytes", "Bodies of requests and answers that the relay holds now.", ()
        ).at()

    def opened(self) -> None:
        """A request came."""
        self._open.inc()

    def closed(self, outcome: RelayOutcome) -> None:
        """A request is over."""
        self._open.dec()
        self._requests.at(outcome).inc()

    def died(self, how: str) -> None:
        """An engine was lost."""
        self._deaths.at(how).inc()

    def resumed(self, form: str) -> None:
        """A request goes to another engine."""
        self._resumed.at(form).inc()

    def failed(self, reason: str) -> None:
        """An answer was given up."""
        self._failures.at(reason).inc()

    def received(self, size: int) -> None:
        """So many bytes came from an engine."""
        self._bytes.inc(size)

    def held(self, size: int) -> None:
        """So many bytes more are held, or less."""
        self._held.inc(size)

    def page(self) -> bytes:
        """This process's metrics as a Prometheus text page, format 0.0.4, UTF-8."""
        return generate_latest(WithoutCreated(self._registry))

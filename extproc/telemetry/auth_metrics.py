"""Metrics of who was let in."""

from extproc.telemetry.families import Families


class AuthMetrics:
    """Keys' part of a worker's metrics."""

    def __init__(self, families: Families) -> None:
        text = "Requests that asked to be let in, by what let them in, or `refused`."
        self._requests = families.counter("auth_requests_total", text, ("outcome",))
        self._clients = families.gauge("auth_keys", "API keys that this worker knows.", ())

    def asked(self, outcome: str) -> None:
        """One request was let in by `key` or `token`, or was `refused`."""
        self._requests.at(outcome).inc()

    def known(self, keys: int) -> None:
        """So many keys are known."""
        self._clients.at().set(keys)

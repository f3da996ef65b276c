"""Metrics of limits of use: what was taken, refused, corrected and not told, and keys that were repeated.

Tenants and models are labels as the rules name them, so that a client cannot add to them.
"""

from typing import Literal

from extproc.telemetry.families import Families

Unknown = Literal["usage", "unreadable", "lost"]
"""Why what was taken was not corrected: nobody told what was used, the decision's metadata cannot be read, or the store
did not answer."""


class QuotaMetrics:
    """Limits' part of a worker's metrics."""

    def __init__(self, families: Families) -> None:
        counter = families.counter
        self._taken = counter("quota_taken_total", "Requests and estimated tokens taken of limits.", ("unit",))
        self._refused = counter(
            "quota_refused_total", "Requests that a limit refused, by its rule.", ("limit", "tenant", "model")
        )
        self._local = counter("quota_local_total", "Requests held against this process' share of limits.", ())
        self._corrected = counter(
            "quota_corrected_tokens_total", "Tokens used beyond what was taken, or less.", ("way",)
        )
        self._given_back = counter("quota_given_back_total", "Requests that gave back all they took.", ())
        self._unknown = counter("quota_unknown_total", "Requests whose use stays as it was estimated.", ("reason",))
        self._duplicates = counter("idempotency_duplicates_total", "Requests whose key was in use.", ())

    def taken(self, unit: str, amount: float) -> None:
        """A request took so much; of several limits of one unit once."""
        self._taken.at(unit).inc(amount)

    def refused(self, limit: str, tenant: str | None, model: str | None) -> None:
        """A request was refused.

        Args:
            limit: key of the limit.
            tenant: as the rule names it.
            model: as the rule names it.
        """
        self._refused.at(limit, tenant or "", model or "").inc()

    def local(self) -> None:
        """A request was decided on without the shared store."""
        self._local.at().inc()

    def corrected(self, tokens: float) -> None:
        """What was used differs by so many tokens from what was taken."""
        if tokens:
            self._corrected.at("more" if tokens > 0 else "less").inc(abs(tokens))

    def given_back(self) -> None:
        """A request used nothing."""
        self._given_back.at().inc()

    def unknown(self, reason: Unknown) -> None:
        """What a request took stays taken."""
        self._unknown.at(reason).inc()

    def duplicate(self) -> None:
        """A key was in use."""
        self._duplicates.at().inc()

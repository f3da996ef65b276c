"""Metrics of token ids: how prompts got them or why not, how long requests waited, and what caches spared."""

from extproc.telemetry.families import Families

# A warm turn takes a millisecond or two, budgets are tens of milliseconds.
_WAITED_S = (0.5e-3, 1e-3, 2e-3, 4e-3, 8e-3, 15e-3, 30e-3, 50e-3, 100e-3, 250e-3, 1.0, 10.0)


class TokenMetrics:
    """The part of a worker's metrics that tells of token ids."""

    def __init__(self, families: Families) -> None:
        self._asked = families.counter(
            "token_prompts_total",
            "Prompts that token ids were wanted of: ok, or why there are none.",
            ("pool", "outcome"),
        )
        self._waited_s = families.histogram(
            "token_wait_seconds", "Time a request waited for ids.", ("pool",), _WAITED_S
        )
        self._ids = families.counter(
            "token_ids_total", "Token ids of prompts, by whether a cache had them.", ("pool", "made")
        )

    def asked(self, pool: str, outcome: str, seconds: float) -> None:
        """A request waited so long for token ids; `outcome` is `ok`, or why it goes without them."""
        self._asked.at(pool, outcome).inc()
        self._waited_s.at(pool).observe(seconds)

    def reused(self, pool: str, found: int, made: int) -> None:
        """Of one prompt, so many token ids were found in the cache and so many made."""
        self._ids.at(pool, "found").inc(found)
        self._ids.at(pool, "made").inc(made)

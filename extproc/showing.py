"""What a worker shows of itself: decisions and counts of its parts, gathered into its metrics page."""

import msgspec

from extproc.deciding import Outcome
from extproc.envoy.access_log import LogCounts
from extproc.envoy.processor import Counts
from extproc.follower import Counts as FeedCounts
from extproc.router import Surroundings
from extproc.state.resilient import ResilientStore
from extproc.store_shown import StoreShown
from extproc.telemetry.metrics import Decided, Metrics, SessionOutcome


class Showing:
    """Implements `router.Recorder`, and fills the gauges when the page is asked for."""

    def __init__(self, metrics: Metrics, around: Surroundings, store: ResilientStore) -> None:
        self._metrics = metrics
        self._around = around
        self._store = store
        self._store_shown = StoreShown(metrics.store, store)
        self._counts: Counts | None = None
        self._log: LogCounts | None = None
        self._feed: FeedCounts | None = None
        self._told: dict[str, int] = {}
        self._shown: set[tuple[str, str]] = set()

    def watch(self, counts: Counts) -> None:
        """Show these counts of the ext_proc service too."""
        self._counts = counts

    def watch_log(self, counts: LogCounts) -> None:
        """Show these counts of the access log too."""
        self._log = counts

    def watch_feed(self, counts: FeedCounts) -> None:
        """Show these counts of the feed too."""
        self._feed = counts

    def decided(self, outcome: Outcome) -> None:
        """See `router.Recorder.decided`."""
        metrics = self._metrics
        metrics.decided(
            Decided(
                pool=outcome.pool,
                policy=outcome.policy,
                session=_session(outcome),
                seconds=outcome.local_s + outcome.store_s + outcome.tokens_s,
                predicted_cached_tokens=outcome.cached_tokens,
                best_cached_tokens=outcome.best_cached_tokens,
                unread=outcome.flaw,
                rung=outcome.rung,
            )
        )
        metrics.stage("local", outcome.local_s)
        metrics.stage("store", outcome.store_s)
        if outcome.tokens_s:
            metrics.stage("tokens", outcome.tokens_s)
        if outcome.flaw:
            metrics.fell_back(outcome.pool, "load_only")
        if self._store.degraded_in(outcome.pool):
            metrics.fell_back(outcome.pool, "local_ledger")

    def settled(self, pool: str) -> None:
        """See `router.Recorder.settled`."""
        self._metrics.settled(pool)

    def page(self) -> bytes:
        """This worker's metrics as Prometheus text."""
        self._store_shown.tell(self._around.config.pools)
        self._tell_rates()
        self._tell_counts()
        for (pool, change), total in self._around.changes.items():
            self._metrics.fitted(pool, change, self._since_last(f"fitted {pool} {change}", total))
        if self._feed is not None:
            self._metrics.feed.tell(msgspec.structs.asdict(self._feed))
        return self._metrics.page()

    def _tell_rates(self) -> None:
        pools = self._around.fleet.pools.values()
        current = {(pool.name, endpoint.id) for pool in pools for endpoint in pool.endpoints}
        for gone in self._shown - current:
            self._metrics.forget(*gone)
            self._metrics.exact.holds(*gone, None)
        for pool in pools:
            for endpoint, rate in self._around.knowledge[pool.name].rates(each.id for each in pool.endpoints).items():
                self._metrics.prefill_rate(pool.name, endpoint, rate)
                exact = self._around.knowledge[pool.name].caches.exact
                held = exact.index.held(endpoint) if exact.counts(endpoint) else None
                self._metrics.exact.holds(pool.name, endpoint, held)
        self._shown = current

    def _tell_counts(self) -> None:
        if self._log is not None:
            for kind, total in (
                ("log_unreadable", self._log.malformed),
                ("usage_unreadable", self._log.usage_unreadable),
            ):
                self._metrics.anomaly(kind, self._since_last(kind, total))
        if self._counts is None:
            return
        for reason, total in self._counts.refused.items():
            self._metrics.refused(reason, self._since_last(f"refused {reason}", total))
        for kind in ("failed_open", "abandoned", "unexpected", "unreadable"):
            self._metrics.anomaly(kind, self._since_last(kind, getattr(self._counts, kind)))

    def _since_last(self, name: str, total: int) -> int:
        grown = total - self._told.get(name, 0)
        self._told[name] = total
        return grown


def _session(outcome: Outcome) -> SessionOutcome:
    if not outcome.session:
        return "none"
    if outcome.moved:
        return "moved"
    return "pinned" if outcome.pinned else "new"

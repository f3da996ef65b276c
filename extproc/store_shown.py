"""What a process shows of its dealings with the shared store, on its metrics page."""

from collections.abc import Collection

from extproc.state.resilient import ResilientStore
from extproc.telemetry.store_metrics import Dealings, StoreMetrics


class StoreShown:
    """Takes over what a `ResilientStore` counted, whenever the page is asked for."""

    def __init__(self, metrics: StoreMetrics, store: ResilientStore) -> None:
        self._metrics = metrics
        self._store = store
        self._pools: set[str] = set()

    def tell(self, pools: Collection[str]) -> None:
        """Bring the metrics up to date; those of pools that are not among `pools` any more go."""
        store, metrics, waiting = self._store, self._metrics, self._store.undelivered()
        for gone in self._pools.difference(pools):
            metrics.forget(gone)
        self._pools = set(pools)
        for pool in pools:
            metrics.pool(pool, degraded=store.degraded_in(pool), waiting=waiting.get(pool, 0))
        metrics.troubles([(pool, str(kind)) for pool, kind in store.troubles().items()])
        counted = {name: getattr(store.stats, name) for name in Dealings.__struct_fields__}
        metrics.dealt(Dealings(**counted), {str(kind): total for kind, total in store.stats.failures.items()})

"""The keeper's eye on the shared store: what it tells of itself, one word for its health, and a log line per change."""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Final, Protocol

import msgspec

from extproc.clock import Clock
from extproc.errors import StoreError
from extproc.state.report import Report, findings, words
from extproc.state.resilient import ResilientStore
from extproc.state.trouble import Trouble, trouble_of
from extproc.store_shown import StoreShown
from extproc.telemetry.store_metrics import NodeView, StoreMetrics

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0
_TROUBLED_LOOK_S: Final = 1.0
# Evictions come in bursts; between two of them the store is no healthier.
_EVICTING_S: Final = 60.0
# The worst first.
_WORDS: Final = ("old_version", "read_only", "nearly_full", "evicting", "bad_policy")


class Reporting(Protocol):
    """The one verb of `state.redis.RedisStore` that is needed here."""

    async def report(self, pool: str = "") -> Report:
        """What the node that has the pool tells of itself. Raises `StoreError` when it does not."""
        ...


class _Seen(msgspec.Struct):
    """What was last seen of the node that has a pool."""

    report: Report
    evicting_until: float = float("-inf")


class StoreWatch:
    """Looks at the store every few seconds; on a standalone one all pools' nodes are the same.

    Args:
        reports: who asks the store.
        store: the keeper's own store, whose failures count too.
        pools: names of the pools of the configuration in use.
        metrics: where the nodes' numbers, and the keeper's own dealings, are shown.
        clock: tells how long ago keys were evicted.
    """

    def __init__(
        self,
        reports: Reporting,
        store: ResilientStore,
        pools: Callable[[], Collection[str]],
        metrics: StoreMetrics,
        clock: Clock,
    ) -> None:
        self._reports = reports
        self._store = store
        self._pools = pools
        self._metrics = metrics
        self._clock = clock
        self._shown = StoreShown(metrics, store)
        self._seen: dict[str, _Seen] = {}
        self._failed: dict[str, Trouble] = {}
        self._said: dict[str, str] = {}

    async def run(self) -> None:
        """Look until cancelled, more often while something is wrong."""
        while True:
            await self.look()
            await asyncio.sleep(_TROUBLED_LOOK_S if self._failed else LOOK_S)

    async def look(self) -> None:
        """Ask every pool's node for its report once."""
        pools = list(self._pools())
        reports = await asyncio.gather(*(self._ask(pool) for pool in pools))
        for gone in self._seen.keys() - set(pools):
            del self._seen[gone]
        self._failed = {pool: found for pool, found in zip(pools, reports, strict=True) if isinstance(found, Trouble)}
        for pool, found in zip(pools, reports, strict=True):
            if isinstance(found, Report):
                self._note(pool, found)
        self._say()

    async def _ask(self, pool: str) -> Report | Trouble:
        try:
            return await self._reports.report(pool)
        except StoreError as error:
            return trouble_of(error)

    def _note(self, pool: str, report: Report) -> None:
        seen = self._seen.get(pool)
        known = seen.report.evicted_keys if seen else report.evicted_keys
        until = seen.evicting_until if seen else float("-inf")
        if report.evicted_keys > known:
            until = self._clock.monotonic() + _EVICTING_S
        self._seen[pool] = _Seen(report, until)
        self._metrics.node(
            pool,
            NodeView(
                used_bytes=report.used_bytes,
                max_bytes=report.max_bytes,
                evicted_keys=report.evicted_keys,
                connected_clients=report.connected_clients,
                is_master=report.role == "master",
            ),
        )

    def tell(self) -> None:
        """Bring the keeper's own dealings with the store up to date on its metrics page."""
        self._shown.tell(self._pools())

    def component(self) -> str:
        """The store's health in one word: `ok`, or what is wrong; the worst, where pools' nodes differ.

        `down` and `slow` are what the circuits of this host's processes open for, and the other troubles of calls are
        those of `state.trouble`. By its own account the store may be of an `old_version`, `read_only`, `evicting` keys
        (within the last minute), `nearly_full` with a policy that refuses writes then, or have a `bad_policy` that may
        evict the ledger. What exactly, and what to do, stands in the log.
        """
        # A store need not let us ask for its report.
        untold = {trouble for trouble in self._failed.values() if trouble is not Trouble.NO_PERMISSION}
        troubles = untold.union(self._store.troubles().values())
        for trouble in Trouble:
            if trouble in troubles:
                return "down" if trouble is Trouble.GONE else str(trouble)
        told = {word for seen in self._seen.values() for word in words(seen.report)}
        if any(map(self._evicting, self._seen.values())):
            told.add("evicting")
        return next((word for word in _WORDS if word in told), "ok")

    def _evicting(self, seen: _Seen) -> bool:
        return self._clock.monotonic() < seen.evicting_until

    def _say(self) -> None:
        """Log what is found, once when it appears and once when it has gone."""
        found: dict[str, str] = {}
        for seen in self._seen.values():
            for text in findings(seen.report):
                # The remedy names the finding: what stands before it may count up from look to look.
                found.setdefault(text.partition(": ")[2] or text, text)
            if self._evicting(seen):
                found["evicting"] = "it evicts keys: raise maxmemory, or lower routing.session.max and redis.feed_cap"
        for trouble in self._failed.values():
            found[trouble] = f"it does not tell of itself: {trouble}"
        for key in found.keys() - self._said.keys():
            log.warning("something is wrong with the shared store", extra={"finding": found[key]})
        for key in self._said.keys() - found.keys():
            log.info("the shared store is rid of this", extra={"finding": self._said[key]})
        self._said = found

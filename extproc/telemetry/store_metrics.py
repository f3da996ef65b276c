"""Metrics of the shared store: what calls to it ended with, what it was told late, and what it tells of itself."""

from collections.abc import Collection, Mapping

import msgspec
from prometheus_client import Counter, Gauge

from extproc.telemetry.families import Families, Family


class Dealings(msgspec.Struct, frozen=True, gc=False):
    """What one process counted of its dealings with the shared store, since its start.

    Attributes:
        calls: calls sent.
        opens: times a circuit opened.
        replayed: settles delivered late.
        dropped: settles given up.
        asserted: open charges told again.
        lost: open charges found missing.
        emptied: times it was found to have lost everything.
        strays: charges found in it that are not open.
        pins_merged: pins made without it and written later.
        pins_dropped: pins made without it and given up.
    """

    calls: int = 0
    opens: int = 0
    replayed: int = 0
    dropped: int = 0
    asserted: int = 0
    lost: int = 0
    emptied: int = 0
    strays: int = 0
    pins_merged: int = 0
    pins_dropped: int = 0


class NodeView(msgspec.Struct, frozen=True, gc=False):
    """What is shown of the node that has a pool; fields as in `state.report.Report`."""

    used_bytes: int
    max_bytes: int
    evicted_keys: int
    connected_clients: int
    is_master: bool


class StoreMetrics:
    """The store's part of a process' metrics. Totals are taken over as they are: telling one twice counts once."""

    def __init__(self, families: Families) -> None:
        counter, gauge = families.counter, families.gauge
        self._failures = counter("store_failures_total", "Calls to the shared store that failed.", ("kind",))
        self._degraded = gauge("store_degraded", "1 while deciding on local knowledge alone.", ("pool",))
        self._trouble = gauge("store_trouble", "1 for what is wrong with the shared store now.", ("pool", "kind"))
        self._waiting = gauge("store_settles_waiting", "Settles that wait for the shared store.", ("pool",))
        self._dealings = {
            "calls": counter("store_calls_total", "Calls sent to the shared store.", ()),
            "opens": counter("store_circuit_openings_total", "Times that a pool's circuit opened.", ()),
            "replayed": counter("store_late_settles_total", "Settles delivered late.", ()),
            "dropped": counter("store_dropped_settles_total", "Settles given up.", ()),
            "asserted": counter("store_reasserted_charges_total", "Open charges told again.", ()),
            "lost": counter("store_lost_charges_total", "Open charges that the store was found to lack.", ()),
            "emptied": counter("store_emptied_total", "Times that the store was found to have lost everything.", ()),
            "strays": counter("store_stray_charges_total", "Charges found in the store that are not open.", ()),
            "pins_merged": counter("store_merged_pins_total", "Pins made without the store, written later.", ()),
            "pins_dropped": counter("store_dropped_pins_total", "Pins made without the store, given up.", ()),
        }
        self._used = gauge("store_used_bytes", "Memory taken by the node that has the pool.", ("pool",))
        self._max = gauge("store_max_bytes", "Memory it may take; 0 for no limit.", ("pool",))
        self._evicted = gauge("store_evicted_keys", "Keys that it evicted since its start.", ("pool",))
        self._clients = gauge("store_clients", "Connections to it.", ("pool",))
        self._master = gauge("store_master", "1 when it takes writes, 0 for a replica.", ("pool",))
        self._told: dict[str, int] = {}
        self._troubles: set[tuple[str, str]] = set()

    def dealt(self, dealings: Dealings, failures: Mapping[str, int]) -> None:
        """What was counted of dealings with the store, and of its failures by kind, since the start of the process."""
        for name, family in self._dealings.items():
            self._add(family, getattr(dealings, name), name)
        for kind, total in failures.items():
            self._add(self._failures, total, f"failed {kind}", kind)

    def _add(self, family: Family[Counter], total: int, name: str, *labels: str) -> None:
        family.at(*labels).inc(total - self._told.get(name, 0))
        self._told[name] = total

    def pool(self, pool: str, *, degraded: bool, waiting: int) -> None:
        """Whether decisions of a pool are made without the store, and how many settles wait for it."""
        self._degraded.at(pool).set(float(degraded))
        self._waiting.at(pool).set(waiting)

    def troubles(self, found: Collection[tuple[str, str]]) -> None:
        """What is wrong now: pairs of pool and kind."""
        for gone in self._troubles.difference(found):
            self._trouble.drop(*gone)
        self._troubles = set(found)
        for pool, kind in self._troubles:
            self._trouble.at(pool, kind).set(1)

    def node(self, pool: str, view: NodeView) -> None:
        """What the node that has a pool tells of itself."""
        for gauge, value in self._shown_of(view):
            gauge.at(pool).set(value)

    def _shown_of(self, view: NodeView) -> tuple[tuple[Family[Gauge], float], ...]:
        return (
            (self._used, view.used_bytes),
            (self._max, view.max_bytes),
            (self._evicted, view.evicted_keys),
            (self._clients, view.connected_clients),
            (self._master, float(view.is_master)),
        )

    def forget(self, pool: str) -> None:
        """Drop the gauges of a pool that left."""
        for gauge in (
            self._degraded, self._waiting, self._used, self._max, self._evicted, self._clients, self._master,
        ):  # fmt: skip
            gauge.drop(pool)

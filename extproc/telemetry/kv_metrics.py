"""Metrics of KV events: how many came, what was lost or left out, and which precise profiles are kept up."""

from collections.abc import Mapping

import msgspec
from prometheus_client import Counter

from extproc.telemetry.families import Families, Family


class ProfileView(msgspec.Struct, frozen=True, gc=False):
    """What is shown of the precise profiles of one endpoint, all ranks together.

    Attributes:
        in_step: nothing of any rank is missing, as far as is known.
        used: the workers were told of every rank.
        partial: blocks may be cached of which nobody told.
        blocks: blocks known to be cached.
        lag_s: from the engine's clock when it published the last batch to ours when it was taken in; 0 when not told.
    """

    in_step: bool
    used: bool
    partial: bool
    blocks: int
    lag_s: float = 0.0


class KvMetrics:
    """KV events' part of a keeper's metrics. Totals are taken over as they are: telling one twice counts once."""

    def __init__(self, families: Families) -> None:
        counter, gauge = families.counter, families.gauge
        self._events = counter("kv_events_total", "KV events taken in.", ("pool", "kind"))
        self._faults = counter(
            "kv_event_faults_total", "Messages and batches of KV events missed, lost or not read.", ("pool", "kind")
        )
        self._left_out = counter(
            "kv_blocks_left_out_total", "Blocks of KV events that no profile could take in.", ("pool", "reason")
        )
        at = ("pool", "endpoint")
        self._in_step = gauge("kv_events_in_step", "1 while no batch of events is missing.", at)
        self._used = gauge("kv_profile_used", "1 while workers use the precise profile.", at)
        self._partial = gauge("kv_profile_partial", "1 while blocks may be cached that no event told of.", at)
        self._blocks = gauge("kv_profile_blocks", "Blocks in the precise profile, all tiers.", at)
        self._lag = gauge("kv_event_lag_seconds", "Engine's clock at the last batch to ours when it was read.", at)
        self._of_endpoint = (self._in_step, self._used, self._partial, self._blocks, self._lag)
        self._told: dict[tuple[Family[Counter], str, str], int] = {}

    def tell(
        self, pool: str, events: Mapping[str, int], faults: Mapping[str, int], left_out: Mapping[str, int]
    ) -> None:
        """What was counted of a pool since the start of the process.

        Args:
            pool: pool name.
            events: events by kind.
            faults: what went wrong, by its name in `kv_profile.Counts` and `kv_tally.Tally`.
            left_out: blocks by the reason, as in `kv_chain.LeftOut`.
        """
        for family, totals in ((self._events, events), (self._faults, faults), (self._left_out, left_out)):
            for name, total in totals.items():
                key = (family, pool, name)
                family.at(pool, name).inc(total - self._told.get(key, 0))
                self._told[key] = total

    def endpoint(self, pool: str, endpoint: str, view: ProfileView) -> None:
        """How the profiles of an endpoint stand."""
        self._in_step.at(pool, endpoint).set(float(view.in_step))
        self._used.at(pool, endpoint).set(float(view.used))
        self._partial.at(pool, endpoint).set(float(view.partial))
        self._blocks.at(pool, endpoint).set(view.blocks)
        self._lag.at(pool, endpoint).set(view.lag_s)

    def forget(self, pool: str, endpoint: str) -> None:
        """Drop the gauges of an endpoint that this keeper does not read any more."""
        for gauge in self._of_endpoint:
            gauge.drop(pool, endpoint)

"""Builds the frozen `Fleet` that decisions see, from configuration, membership, engine states and learnt numbers."""

import math
from collections.abc import Mapping

import msgspec

from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.config import Config
from extproc.rollout.split import Split
from extproc.sightings import MOST_RUNNING, Sighting
from extproc.splits import fleet_of, splits_of
from extproc.state.facts import DEFAULT_BLOCK_TOKENS
from extproc.state.knowledge import PoolKnowledge

_STALE_SCRAPES = 3
_LEAST_STALE_S = 2.0
_STALE_RATE = 0.5
"""Share of its speed that an endpoint is believed to have while nobody could read it: it may be struggling."""
_SILENT_S = 10.0
"""From then on it counts as silent. When a keeper dies, another takes its endpoints over within five seconds: until
then their states stand still for a reason that is not theirs."""
_LEAST_RAMP = 0.1
"""Share of its speed that an endpoint is believed to have in the moment it joins."""

Joined = Mapping[str, Mapping[str, float]]
"""By pool, when an endpoint joined or restarted, by the worker's clock that never goes back; endpoints that are absent
joined long ago."""


def build(
    config: Config,
    members: Mapping[str, Mapping[str, str]],
    seen: Mapping[str, Mapping[str, Sighting]],
    knowledge: Mapping[str, PoolKnowledge],
    now: float,
    joined: Joined | None = None,
    splits: Mapping[str, Split] | None = None,
) -> Fleet:
    """Join what is configured, resolved, read and learnt.

    Args:
        config: pools, models and weights.
        members: by pool, destination (`ip:port`) by endpoint id.
        seen: by pool, the last published state by endpoint id; endpoints without one are taken as healthy.
        knowledge: by pool, what was learnt.
        now: the time by the clock that `seen` and `joined` go by, which is no wall clock.
        joined: which endpoints joined lately; None for none.
        splits: by model, its versions as they are now; None for those of the configuration.
    """
    stale_s = max(_LEAST_STALE_S, _STALE_SCRAPES * config.telemetry.scrape_ms / 1000.0)
    pools = {}
    for name in config.pools:
        since = (joined or {}).get(name, {})
        known, addresses = knowledge[name], members.get(name, {})
        sightings = seen.get(name, {})
        view = _View(
            known,
            known.rates(addresses),
            config.routing.rate_factor,
            now,
            max((each.since for each in sightings.values()), default=now),
            stale_s,
            any_read=any(not each.state.stale for each in sightings.values()),
        )
        endpoints = tuple(
            _endpoint(
                view,
                endpoint,
                destination,
                sightings.get(endpoint),
                ramp(now - since.get(endpoint, -math.inf), config.routing.ramp_s),
            )
            for endpoint, destination in addresses.items()
        )
        pools[name] = Pool(name, config.policy_of(name), endpoints)
    return fleet_of(pools, config, splits_of(config, {}) if splits is None else splits)


def ramp(age_s: float, ramp_s: float) -> float:
    """Share of its speed that an endpoint is believed to have `age_s` after it joined: a tenth at first, then more.

    Its caches are cold and its kernels perhaps not compiled yet, and an empty backlog would draw all cold prompts.
    """
    return 1.0 if ramp_s <= 0.0 or age_s >= ramp_s else max(_LEAST_RAMP, age_s / ramp_s)


class _View(msgspec.Struct, frozen=True):
    """What the endpoints of a pool are seen with.

    Attributes:
        known: what was learnt of the pool.
        rates: learnt speeds.
        rate_factor: the share of them that is believed.
        now: present time.
        newest: when a state of the pool changed last.
        stale_s: a state that has not changed for so long is old.
        any_read: some endpoint of the pool can be read.
    """

    known: PoolKnowledge
    rates: Mapping[str, float]
    rate_factor: float
    now: float
    newest: float
    stale_s: float
    any_read: bool


def _endpoint(view: _View, id_: str, destination: str, sighting: Sighting | None, ramped: float) -> Endpoint:
    usual = view.rates[id_] * view.rate_factor
    overhead_ms = view.known.overhead_s(id_) * 1000.0
    if sighting is None:
        return Endpoint(
            id_,
            destination,
            usual * ramped,
            block_tokens=DEFAULT_BLOCK_TOKENS,
            overhead_ms=overhead_ms,
            slowed=ramped,
        )
    state = sighting.state
    # Numbers that lag behind what the engine does are a hint for seconds: from then on the fleet's own counts govern.
    fresh = view.now - sighting.since <= view.stale_s and not state.stale and not state.frozen
    silent_s = _silent_s(view, sighting)
    # Where nobody can read any endpoint of the pool, that is no sign against one of them.
    unread = view.newest - sighting.since > view.stale_s or (state.stale and view.any_read)
    slowed = ramped * _STALE_RATE if unread else ramped
    in_engine = min(state.running + state.waiting, MOST_RUNNING) if fresh or silent_s > 0.0 else 0
    return Endpoint(
        id=id_,
        destination=destination,
        rate=usual * slowed,
        running=state.running if fresh else 0,
        waiting=state.waiting if fresh else 0,
        kv_usage=state.kv_usage if fresh and 0.0 <= state.kv_usage <= 1.0 else 0.0,
        block_tokens=state.block_tokens or DEFAULT_BLOCK_TOKENS,
        floor_tokens=view.known.queue_tokens(id_, state.waiting) if fresh and state.waiting else 0.0,
        floor_running=in_engine if sighting.foreign or silent_s > 0.0 else 0,
        silent_ms=silent_s * 1000.0,
        stalled_tokens=_mean_uncached(view, id_) if silent_s > 0.0 else 0.0,
        overhead_ms=overhead_ms,
        slowed=slowed,
        reachable=state.reachable,
        asleep=state.asleep,
        draining=state.draining,
        kind=state.kind,
        adapters=state.adapters,
    )


def _silent_s(view: _View, sighting: Sighting) -> float:
    """For how long an endpoint has stood still, by its keeper's word; or has not been read while others were."""
    if view.now - view.newest > view.stale_s:
        return 0.0
    stalled_s, unread_s = sighting.state.stalled_s, view.newest - sighting.since
    # A page that does not come is waited for: the keeper's word is some seconds old then, and still true.
    if stalled_s > 0.0:
        return stalled_s + unread_s
    return unread_s if unread_s > _SILENT_S else 0.0


def _mean_uncached(view: _View, id_: str) -> float:
    """Mean uncached tokens of the requests that an endpoint answered; of one that never did, of the pool's requests."""
    own = view.known.queue_tokens(id_, 1)
    others = [tokens for each in view.rates if (tokens := view.known.queue_tokens(each, 1)) > 0.0]
    return own if own > 0.0 or not others else sum(others) / len(others)

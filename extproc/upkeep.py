"""A worker's background work: the fleet snapshot, the lease, and what its metrics page shows."""

import asyncio
import logging
import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from extproc import snapshot
from extproc.clock import Clock
from extproc.config import Config
from extproc.errors import StoreError
from extproc.fleet.membership import Membership
from extproc.judging import Judging
from extproc.router import Surroundings
from extproc.sightings import Sighting, Sightings
from extproc.splits import splits_of
from extproc.state import endpoint as endpoint_state
from extproc.state.endpoint import EndpointState
from extproc.state.knowledge import PoolKnowledge
from extproc.state.values import Load

log = logging.getLogger(__name__)

_BEHIND_S = 5.0
_BEHIND_SCRAPES = 3
"""An engine whose published state has not changed for so long, and over so many scrapes, is kept up by nobody: keepers
take over from one that died within that time."""
_CATCH_UP_S = 1.0
"""How long it is still not believed after that, and all others not after this worker itself stood still for as long.
What happened meanwhile is on its way then: keepers flush it every 50 ms, and workers read it as it comes."""


class Arrivals:
    """When endpoints joined a pool or restarted, as one worker sees it.

    Whoever is there when a worker first looks is taken to have been there long: a worker that starts must not believe
    that a whole fleet does.
    """

    def __init__(self) -> None:
        self._started: dict[str, dict[str, float]] = {}
        self.joined: dict[str, dict[str, float]] = {}
        """By pool, when an endpoint joined or restarted; see `snapshot.build`."""

    def look(self, pool: str, endpoints: Collection[str], states: Mapping[str, EndpointState], now: float) -> None:
        """Note who is there.

        Args:
            pool: pool name.
            endpoints: ids of its endpoints.
            states: their last states; start times that differ from those of the last look are restarts.
            now: present time, by a clock that never goes back.
        """
        before = self._started.get(pool)
        joined, started = self.joined.setdefault(pool, {}), dict[str, float]()
        for name in endpoints:
            last = (before or {}).get(name, 0.0)
            state = states.get(name)
            started[name] = state.started_at if state and state.started_at > 0.0 else last
            arrived = before is not None and name not in before
            if arrived or 0.0 < last != started[name]:
                joined[name] = now
        for gone in joined.keys() - started.keys():
            del joined[gone]
        self._started[pool] = started


class _Look(NamedTuple):
    """What the store had of a pool: the published states, what they say, and the ledger's loads a moment later."""

    payloads: Mapping[str, bytes]
    states: Mapping[str, EndpointState]
    loads: Mapping[str, Load]


class Upkeep:
    """Keeps one worker's surroundings current. Never needed by a decision: what is old stays in use."""

    def __init__(
        self, around: Surroundings, membership: Membership, clock: Clock, judging: Judging | None = None
    ) -> None:
        """`judging` says which endpoints get requests, by how they answered; None where nobody does."""
        self._around = around
        self._membership = membership
        self._clock = clock
        self._judging = judging
        self._sightings: dict[str, Sightings] = {}
        self._unreadable: dict[str, set[str]] = {}
        self._arrivals = Arrivals()
        self._late: dict[str, dict[str, float]] = {}
        self._refreshed_at = math.inf

    async def apply(self, config: Config) -> None:
        """Take a changed configuration."""
        self._around.config = config
        await self._membership.apply(config)
        await self.refresh()

    async def refresh(self) -> None:
        """Read the endpoints' states and build a new snapshot; without a store the last states stay."""
        read = {pool: await self._read(pool) for pool in self._around.config.pools}
        # From here on nothing is awaited: a refresh that overlaps another cannot bring old members back.
        members, now = self._membership.current(), self._clock.monotonic()
        seen: dict[str, Mapping[str, Sighting]] = {}
        for pool, endpoints in members.items():
            known = self._around.knowledge[pool]
            known.retain(endpoints)
            sightings = self._sightings.setdefault(pool, Sightings())
            look = read.get(pool)
            if look is not None:
                sightings.saw(look.payloads, look.states, look.loads, now)
            sightings.keep(endpoints)
            seen[pool] = sightings.all
            states = {name: each.state for name, each in seen[pool].items()}
            self._note(known, states)
            known.caches.exact.kept(behind=self._behind(pool, seen[pool], now))
            self._arrivals.look(pool, endpoints, states, now)
        self._refreshed_at, self._around.believed_until = now, now + self._most_s
        around = self._around
        around.fleet = snapshot.build(
            around.config,
            members,
            seen,
            around.knowledge,
            now,
            self._arrivals.joined,
            splits_of(around.config, around.rollouts, around.fleet.splits),
        )
        if self._judging is not None:
            self._judging.mark()
            await self._judging.refresh(
                {
                    pool: {name for name, at in joined.items() if at == now}
                    for pool, joined in self._arrivals.joined.items()
                }
            )

    @property
    def _most_s(self) -> float:
        """Longest silence that is believed."""
        return _BEHIND_S + _BEHIND_SCRAPES * self._around.config.telemetry.scrape_ms / 1000

    def _behind(self, pool: str, seen: Mapping[str, Sighting], now: float) -> set[str]:
        """Endpoints whose exact profiles may promise blocks that are gone."""
        stood_still = now - self._refreshed_at > self._most_s
        late = self._late.get(pool, {})
        late |= {name: now for name, each in seen.items() if stood_still or now - each.since > self._most_s}
        self._late[pool] = {name: at for name, at in late.items() if now - at <= _CATCH_UP_S}
        return set(self._late[pool])

    def _note(self, known: PoolKnowledge, states: Mapping[str, EndpointState]) -> None:
        """Let what the engines tell, and the time, empty the profiles that are no longer true."""
        for name, state in states.items():
            known.engine_seen(
                name,
                state.kv_blocks * state.block_tokens,
                state.started_at,
                state.block_tokens,
                caching=state.prefix_caching and not state.asleep,
            )
        unreachable = {name for name, state in states.items() if not state.reachable}
        known.age(self._clock.monotonic(), self._around.config.routing.profile_ttl_s, unreachable)

    async def run(self) -> None:
        """Refresh and renew the lease until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._membership.run())
            tasks.create_task(self._refresh_forever())
            tasks.create_task(self._renew_forever())

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(self._around.config.telemetry.scrape_ms / 1000)
            await self.refresh()

    async def _renew_forever(self) -> None:
        while True:
            lease_ms = self._around.config.redis.lease_ms
            for pool in self._around.config.pools:
                try:
                    await self._around.store.heartbeat(pool, self._around.replica, lease_ms)
                except StoreError as error:
                    log.warning("the lease is not renewed", extra={"pool": pool, "error": str(error)})
            await asyncio.sleep(lease_ms / 3000)

    async def _read(self, pool: str) -> _Look | None:
        try:
            published = await self._around.store.states(pool)
            loads = await self._around.store.loads(pool)
        except StoreError:
            return None
        states: dict[str, EndpointState] = {}
        said, unreadable = self._unreadable.get(pool, set()), set[str]()
        for name, payload in published.items():
            try:
                states[name] = endpoint_state.decode(payload)
            except StoreError as error:
                if name not in said:
                    log.warning("an endpoint's state is left out", extra={"endpoint": name, "error": str(error)})
                unreadable.add(name)
        self._unreadable[pool] = unreadable
        return _Look(published, states, loads)

"""Reads the endpoints that this keeper holds again and again; publishes their numbers, one write a pool and round."""

import asyncio
import logging
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, Protocol

import aiohttp

from extproc.clock import Clock
from extproc.config import Config
from extproc.engines.adapter import Adapter
from extproc.errors import StoreError
from extproc.fleet.asking import new_session
from extproc.fleet.health import Failure, Health, after, described, first, resumed
from extproc.fleet.holding import Holding
from extproc.fleet.inquiries import Inquiries, Key
from extproc.fleet.membership import Membership
from extproc.fleet.published import Published
from extproc.fleet.reader import Described, Told, changes
from extproc.state.endpoint import EndpointState, encode
from extproc.telemetry.metrics import EngineView, Metrics

JITTER: Final = 0.1
"""Rounds are spread by this share of the interval, so that keepers do not beat in step."""
ALONE_EVERY_S: Final = 2.0
"""Pause between two scrapes of an endpoint by a keeper that is alone (see `holding`). At eight times the default pace,
eight hosts whose keepers never met a store ask an engine no more often than one keeper with a store does."""

TIDY_EVERY_S: Final = 60.0
LEFT_S: Final = 600.0
"""An endpoint whose state did not change for so long has left; another keeper may still have one that this one lost."""

WORK: Final = "scrape"
"""Name of this work in the store."""

_log = logging.getLogger(__name__)

_Members = Mapping[str, Mapping[str, str]]


class Publisher(Protocol):
    """The verbs of `state.store.Store` that are needed here."""

    async def put_states(self, pool: str, states: Mapping[str, bytes]) -> None:
        """See `Store.put_states`."""
        ...

    async def drop_states(self, pool: str, endpoints: Collection[str]) -> None:
        """See `Store.drop_states`."""
        ...

    async def states(self, pool: str) -> Mapping[str, bytes]:
        """See `Store.states`."""
        ...


class Scraper:
    """Keeps the state of those endpoints of a `Membership` that this keeper holds, and knows that of the others.

    `run` makes a round every `telemetry.scrape_ms`. A round asks each held endpoint that is not being asked already,
    waits for the answers, asks for slow pages whose turn it is, and publishes. A slow endpoint does not hold up the
    others: after half an interval the round publishes what came, and the late answer goes out with a later round.
    """

    def __init__(
        self,
        membership: Membership,
        store: Publisher,
        holding: Holding,
        adapters: Sequence[Adapter],
        metrics: Metrics,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        """Make a scraper; call `apply` before `run`.

        Args:
            membership: whom to scrape, all keepers together.
            store: where states are published.
            holding: which of them this keeper scrapes.
            adapters: how to read each kind of engine; see `engines.detect.all_adapters`.
            metrics: where states are shown.
            clock: dates the states, by wall time.
            rng: spreads the rounds.
        """
        self._membership = membership
        self._store = store
        self._holding = holding
        self._inquiries = Inquiries(adapters, clock, rng)
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self._interval_s = 0.25
        self._pools: frozenset[str] = frozenset()
        self._health: dict[Key, Health] = {}
        self._published: dict[str, Published] = {}
        self._unsaid = True
        self._tidied = -TIDY_EVERY_S
        self._asked_alone = -ALONE_EVERY_S

    def apply(self, config: Config) -> None:
        """Take the interval and the kinds of engines from a configuration; holds from the next round on."""
        self._interval_s = config.telemetry.scrape_ms / 1000
        self._pools = frozenset(config.pools)
        self._inquiries.apply({name: pool.engine for name, pool in config.pools.items()})
        self._holding.apply(config)

    def states(self) -> dict[str, dict[str, EndpointState]]:
        """Latest state by endpoint id, by pool, of endpoints that some keeper asked at least once."""
        known: dict[str, dict[str, EndpointState]] = {}
        for pool, endpoint, _ in _each(self._members()):
            health, published = self._health.get((pool, endpoint)), self._published.get(pool)
            state = health.state if health else published.state(endpoint) if published else None
            if state is not None:
                known.setdefault(pool, {})[endpoint] = state
        return known

    async def run(self) -> None:
        """Make rounds until cancelled; no connection, no task and no lease outlives it."""
        async with new_session(self._holding.holder) as session:
            try:
                while True:
                    pause = self._interval_s * self._rng.uniform(1 - JITTER, 1 + JITTER)
                    begun = self._clock.monotonic()
                    await self.round(session)
                    await asyncio.sleep(max(0.0, pause - (self._clock.monotonic() - begun)))
            finally:
                await self.close()

    async def round(self, session: aiohttp.ClientSession) -> None:
        """Ask every held endpoint once, wait at most half an interval, publish what came."""
        members = self._members()
        if self._holding.due(members):
            await self._share(members)
        await self._forget(members)
        until = self._clock.monotonic() + self._interval_s / 2
        for pool, endpoint, destination in self._to_ask(members):
            self._inquiries.ask(session, (pool, endpoint), destination)
        answered = await self._inquiries.loads(until)
        told_more = await self._inquiries.abouts(session, answered, until)
        # Leases are looked at again: time has passed, and this process may have been frozen meanwhile.
        held = {pool: self._holding.held(pool) for pool in members}
        learns = {
            pool: names | self._holding.own(pool) if self._holding.alone(pool) else names
            for pool, names in held.items()
        }
        for (pool, endpoint), told in answered.items():
            if endpoint in learns[pool]:
                self._learn(pool, endpoint, members[pool][endpoint], told)
        for (pool, endpoint), more in told_more.items():
            if endpoint in learns[pool]:
                self._learn_more(pool, endpoint, more)
        fresh = {key for key in {*answered, *told_more} if key[1] in held[key[0]]}
        await self._publish(fresh & self._health.keys())

    def _members(self) -> _Members:
        # A reload reaches membership and scraper one after the other.
        return {pool: ids for pool, ids in self._membership.current().items() if pool in self._pools}

    async def _share(self, members: _Members) -> None:
        """Renew the leases, read what the others published, and go on from there with what was taken over."""
        taken = await self._holding.renew(members)
        tidy = self._clock.monotonic() - self._tidied >= TIDY_EVERY_S
        if tidy:
            self._tidied = self._clock.monotonic()
        heard = [pool for pool in members if not self._holding.deaf(pool)]
        await asyncio.gather(*(self._read(pool, members[pool], tidy=tidy) for pool in heard))
        for gone in self._published.keys() - members.keys():
            del self._published[gone]
            self._metrics.held(gone, 0)
        for pool in members:
            self._metrics.held(pool, len(self._holding.held(pool)))
        await self._inquiries.drop({(pool, endpoint) for pool, endpoints in taken.items() for endpoint in endpoints})
        for pool in members:
            for endpoint in taken.get(pool, ()):
                self._resume(pool, endpoint)

    async def _read(self, pool: str, members: Collection[str], *, tidy: bool) -> None:
        """Read all states of a pool, and take back those of endpoints that left: changing addresses fill the store."""
        published = self._published.setdefault(pool, Published())
        try:
            states = await self._store.states(pool)
            now = self._clock.monotonic()
            published.learn(states, now)
            if tidy:
                await self._store.drop_states(pool, published.stale(members, now - LEFT_S))
        except StoreError:
            return  # said by `Holding`, and tried again

    def _resume(self, pool: str, endpoint: str) -> None:
        """Go on from what the keeper published that had the endpoint before; this one's own memory may be older."""
        state = self._published[pool].state(endpoint) if pool in self._published else None
        if state is not None:
            self._health[pool, endpoint] = resumed(state, self._clock.monotonic())

    def _to_ask(self, members: _Members) -> Iterator[tuple[str, str, str]]:
        """Pool, id and destination of the endpoints whose turn it is."""
        now = self._clock.monotonic()
        alone = now - self._asked_alone >= ALONE_EVERY_S
        if alone:
            self._asked_alone = now
        turn = {
            pool: self._holding.own(pool) if alone and self._holding.alone(pool) else self._holding.held(pool)
            for pool in members
        }
        for pool, endpoint, destination in _each(members):
            if endpoint in turn[pool] and (pool, endpoint) not in self._inquiries:
                yield pool, endpoint, destination

    def _learn(self, pool: str, endpoint: str, destination: str, told: Told) -> None:
        now, previous, outcome = self._clock.monotonic(), self._health.get((pool, endpoint)), told.outcome
        if previous is None or previous.state.destination != destination:
            previous = first(destination, now)
        health = self._health[pool, endpoint] = after(previous, outcome, self._clock.wall(), now)
        state = health.state
        if state.started_at != previous.state.started_at:
            self._inquiries.restarted((pool, endpoint))
        for text, extra in changes(previous.state, state, told):
            _log.warning(text, extra={"pool": pool, "endpoint": endpoint, **extra})
        if told.fault:
            self._metrics.scrape_fault(pool, "load", told.fault)
        self._metrics.scraped(pool, outcome.value if isinstance(outcome, Failure) else "read")
        self._metrics.engine(pool, endpoint, _view(state))

    def _learn_more(self, pool: str, endpoint: str, more: Described) -> None:
        for fault in more.faults:
            self._metrics.scrape_fault(pool, "about", fault)
        health = self._health.get((pool, endpoint))
        if health:
            for about in more.abouts:
                health = described(health, about)
            self._health[pool, endpoint] = health

    async def _publish(self, fresh: Collection[Key]) -> None:
        """Write fresh states, each pool's at once. A store that fails is said once; newer states follow anyway."""
        states: dict[str, dict[str, bytes]] = {}
        for pool, endpoint in fresh:
            states.setdefault(pool, {})[endpoint] = encode(self._health[pool, endpoint].state)
        # One pool after the other, a node that stands still would hold up the leases of all for a deadline a pool.
        await asyncio.gather(*(self._put(pool, changed) for pool, changed in states.items()))

    async def _put(self, pool: str, states: Mapping[str, bytes]) -> None:
        try:
            await self._store.put_states(pool, states)
        except StoreError as error:
            if self._unsaid:
                _log.warning("engine states cannot be published", extra={"pool": pool, "error": str(error)})
            self._unsaid = False
        else:
            self._unsaid = True

    async def _forget(self, members: _Members) -> None:
        """Forget endpoints that left, or that another keeper has."""
        own = {(pool, endpoint) for pool in members for endpoint in self._holding.own(pool) & members[pool].keys()}
        for key in self._health.keys() - own:
            del self._health[key]
            self._metrics.forget(*key)
        await self._inquiries.drop(self._inquiries.keys() - own)

    async def close(self) -> None:
        """Give up every answer that is still out, then the leases: others take over at once."""
        await self._inquiries.drop(self._inquiries.keys())
        await self._holding.leave()


def _each(members: _Members) -> Iterator[tuple[str, str, str]]:
    for pool, endpoints in members.items():
        for endpoint, destination in endpoints.items():
            yield pool, endpoint, destination


def _view(state: EndpointState) -> EngineView:
    return EngineView(
        reachable=state.reachable,
        asleep=state.asleep,
        running=state.running,
        waiting=state.waiting,
        kv_usage=state.kv_usage,
        scraped_at=state.scraped_at,
        prefix_queries=state.prefix_queries,
        prefix_hits=state.prefix_hits,
        stalled_s=state.stalled_s,
    )

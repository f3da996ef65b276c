"""Reads the KV events of the endpoints that this keeper holds, and keeps the workers' precise profiles by them.

Each source is read by one keeper of the fleet, by leases of their own (`holding`, group `events`), so that this work is
spread apart from scraping. One task makes round after round: leases, what came, what is to be told. So nothing begins
while leases are renewed, and nothing is told of an endpoint that may be another keeper's.

Rules:
- Only pools of `precise` or `auto` profiles are read, and only endpoints that tell where their events are.
- A keeper that takes an endpoint over knows nothing: it asks for a replay, and tells the profile anew, in place of what
  the one before it told. It tells its own anew when a lease was broken, because another may have told one meanwhile.
- A keeper that cannot reach the store reads on, so that little is missing when it can; it tells nothing. What is taken
  out by reading (`kv_drain`) is read under a valid lease alone.
- An endpoint that has no events any more gets its estimated profile back.
- A keeper that stood still (its host did, or it was stopped) does not know what was evicted meanwhile. Workers noticed,
  and believe it again as soon as it says anything: so it puts its profiles aside first, until it has caught up.
- The event loop has other work: it gets its turn every `_SLICE_S`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final

import aiohttp
import msgspec

from extproc.clock import Clock
from extproc.config import Config, EventSettings, ProfileMode
from extproc.fleet.asking import new_session
from extproc.fleet.holding import Holding
from extproc.fleet.kv_endpoint import KvEndpoint, Wanted
from extproc.fleet.kv_places import sources_of
from extproc.fleet.kv_profile import Counts
from extproc.fleet.kv_publishing import Box, Feed, Publishing
from extproc.fleet.kv_telling import Telling
from extproc.fleet.kv_zmq import Sockets
from extproc.state.endpoint import EndpointState
from extproc.telemetry.kv_metrics import KvMetrics

_log = logging.getLogger(__name__)

WORK: Final = "events"
"""Name of this work in the store."""

ROUND_S: Final = 0.02
"""Pause between two rounds. Together with `FLUSH_S`, the longest that an event waits here."""
FLUSH_S: Final = 0.05
_LOOK_S: Final = 0.2
"""Pause between two looks at the endpoints' states: a new start, a new source."""
_SHOW_S: Final = 1.0
_SLICE_S: Final = 0.002
_STOOD_STILL_S: Final = 5.0
"""Between two rounds. Workers go by the same time (`upkeep`)."""
_TURN_S: Final = 0.01
"""How long one endpoint is taken in before it is the next one's turn. A batch of 180,000 removals takes seconds."""

_EVENTS: Final = ("stored", "removed", "moved", "cleared")

States = Mapping[str, Mapping[str, EndpointState]]


class KvReader:
    """All that one keeper reads of KV events."""

    def __init__(
        self,
        states: Callable[[], States],
        store: Feed,
        holding: Holding,
        new_box: Callable[[], Box],
        metrics: KvMetrics,
        clock: Clock,
    ) -> None:
        """Make a reader; call `apply` before `run`.

        Args:
            states: latest states by endpoint, by pool; of all keepers' endpoints.
            store: where the pools' feeds are.
            holding: which endpoints this keeper reads.
            new_box: makes an empty outbox, each under a name of its own.
            metrics: where it is shown.
            clock: time.
        """
        self._states = states
        self._store = store
        self._holding = holding
        self._new_box = new_box
        self._metrics = metrics
        self._clock = clock
        self._sockets = Sockets()
        self._modes: dict[str, ProfileMode] = {}
        self._events: dict[str, EventSettings] = {}
        self._adapted: set[str] = set()
        self._silent: set[tuple[str, str]] = set()
        self._cap = 1
        self._seen: dict[str, dict[str, EndpointState]] = {}
        self._endpoints: dict[tuple[str, str], KvEndpoint] = {}
        self._ended: dict[str, list[Telling]] = {}
        self._publishing: dict[str, Publishing] = {}
        self._counts: dict[str, Counts] = {}
        self._looked = self._shown = self._flushed = float("-inf")
        self._round_at = float("inf")

    def apply(self, config: Config) -> None:
        """Take modes and limits from a configuration; holds from the next round on."""
        self._modes = {name: pool.profiles for name, pool in config.pools.items() if pool.profiles != "estimated"}
        self._events = {name: pool.events for name, pool in config.pools.items()}
        self._adapted = {
            version.pool
            for model in config.models.values()
            for version in model.by_version.values()
            if version.adapter is not None
        }
        self._cap = config.redis.feed_cap
        self._holding.apply(config)
        self._looked = float("-inf")

    async def run(self) -> None:
        """Make rounds until cancelled; no socket, no task and no lease outlives it."""
        async with new_session(self._holding.holder) as session:
            try:
                while True:
                    await self.round(session)
                    behind = any(each.is_behind for each in self._endpoints.values())
                    await asyncio.sleep(0 if behind else ROUND_S if self._endpoints else _LOOK_S)
            finally:
                await self.close()

    def is_behind(self, pool: str, endpoint: str) -> bool:
        """Whether an endpoint that is read here has told more than was taken in."""
        known = self._endpoints.get((pool, endpoint))
        return known is not None and known.is_behind

    async def round(self, session: aiohttp.ClientSession) -> None:
        """Renew the leases when it is time, take in what came, tell what is to be told."""
        now = self._clock.monotonic()
        if now - self._looked >= _LOOK_S:
            self._looked = now
            self._look()
        if self._holding.due(self._seen):
            await self._share()
        await self._keep()
        if now - self._round_at > _STOOD_STILL_S:
            for each in self._endpoints.values():
                each.put_aside()
            await self._flush()
        self._round_at = self._clock.monotonic()
        held = {pool: self._holding.held(pool) for pool in self._seen}
        for (pool, endpoint), each in self._endpoints.items():
            each.drain(session, allowed=endpoint in held[pool])
        await _in_slices(self._steps())
        if now - self._flushed >= FLUSH_S:
            self._flushed = now
            await self._flush()
        if now - self._shown >= _SHOW_S:
            self._shown = now
            self._show()

    def _look(self) -> None:
        """See which endpoints have events, by their latest states."""
        states = self._states()
        self._seen = {
            pool: {
                name: state if sources is state.sources else msgspec.structs.replace(state, sources=sources)
                for name, state in states.get(pool, {}).items()
                if (sources := sources_of(name, state, self._events[pool], adapters=pool in self._adapted))
            }
            for pool in self._modes
        }
        # Its models are told by the same pages as its sources: what says the one and not the other has none.
        silent = {
            (pool, name)
            for pool, seen in self._seen.items()
            for name, state in states.get(pool, {}).items()
            if state.models and name not in seen
        }
        for pool, name in sorted(silent - self._silent):
            _log.warning(
                "an engine has no KV events that can be used: its profile stays estimated",
                extra={"pool": pool, "endpoint": name, "engine": states[pool][name].kind},
            )
        self._silent = silent

    async def _share(self) -> None:
        """Renew the leases. What another keeper may have had meanwhile is told anew."""
        taken = await self._holding.renew(self._seen)
        for pool, publishing in self._publishing.items():
            if self._holding.deaf(pool):
                continue
            again: Collection[str] = taken.get(pool, ())
            kept = self._holding.held(pool)
            lost = any(of == pool and endpoint not in kept for of, endpoint in self._endpoints)
            if (again or lost) and publishing.give_up():
                again = kept
            self._tell_anew(pool, again)

    def _tell_anew(self, pool: str, endpoints: Collection[str]) -> None:
        for (of, endpoint), each in self._endpoints.items():
            if of == pool and endpoint in endpoints:
                each.tell_anew()

    async def _keep(self) -> None:
        """Open what is this keeper's, close what is not, and let every endpoint see its newest state."""
        names = {pool: self._holding.own(pool) for pool in self._seen}
        own = {
            (pool, name): state
            for pool, seen in self._seen.items()
            for name, state in seen.items()
            if name in names[pool]
        }
        for key in self._endpoints.keys() - own.keys():
            ended = await self._leave(key)
            if key[0] in self._seen and key[1] not in self._seen[key[0]]:
                self._ended.setdefault(key[0], []).extend(ended)
        for key, state in own.items():
            endpoint, wanted = self._endpoints.get(key), Wanted(self._modes[key[0]], self._events[key[0]])
            if endpoint is not None:
                endpoint.see(state, wanted)
                continue
            counts = self._counts.setdefault(key[0], Counts())
            self._endpoints[key] = KvEndpoint(*key, state, wanted, self._sockets, counts, self._clock)

    async def _leave(self, key: tuple[str, str]) -> list[Telling]:
        self._metrics.forget(*key)
        return await self._endpoints.pop(key).close()

    def _steps(self) -> Iterator[None]:
        for each in list(self._endpoints.values()):
            yield from each.turn(_TURN_S)

    async def _flush(self) -> None:
        """Tell the workers. What is taken is this keeper's now, by its leases, or has no events any more."""
        now = self._clock.monotonic()
        for pool, seen in self._seen.items():
            held = self._holding.held(pool)
            if seen and not held:
                continue
            tellings = self._ended[pool] = [each for each in self._ended.get(pool, ()) if each.is_due]
            for (of, endpoint), each in self._endpoints.items():
                if of == pool and endpoint in held:
                    tellings = [*tellings, *each.tellings()]
            publishing = self._publishing.get(pool)
            if publishing is None:
                publishing = self._publishing[pool] = Publishing(pool, self._store, self._new_box, self._cap)
            if not await publishing.flush(tellings, now):
                self._tell_anew(pool, held)

    def _show(self) -> None:
        for pool, counts in self._counts.items():
            faults = msgspec.structs.asdict(counts) | msgspec.structs.asdict(counts.streams)
            del faults["streams"], faults["left_out"]
            events = {kind: faults.pop(kind) for kind in _EVENTS}
            self._metrics.tell(pool, events, faults, msgspec.structs.asdict(counts.left_out))
        for key, each in self._endpoints.items():
            self._metrics.endpoint(*key, each.view())

    async def close(self) -> None:
        """Close all sockets, give up all calls, then the leases: others take over at once."""
        for key in list(self._endpoints):
            await self._leave(key)
        self._sockets.close()
        await self._holding.leave()


async def _in_slices(steps: Iterable[None]) -> None:
    """Go through all steps; others get a turn every `_SLICE_S`."""
    until = time.perf_counter() + _SLICE_S
    for _ in steps:
        if time.perf_counter() >= until:
            await asyncio.sleep(0)
            until = time.perf_counter() + _SLICE_S

"""A worker's part in the breakers: verdicts go to the store, and what it says of endpoints into the fleet.

Strikes are told at once, whoever sees them; good answers only where a breaker counts strikes, so that a healthy pool
costs no call. Nothing here is waited for by a decision.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

import msgspec

from extproc.choose.fleet import Breaker, Endpoint, Pool
from extproc.clock import Clock
from extproc.config_breakers import Breakers
from extproc.envoy.contract import Attempt, Served
from extproc.errors import StoreError
from extproc.govern import breaker as rule
from extproc.govern.breaker import Pace, Verdict
from extproc.state import values
from extproc.surroundings import Surroundings
from extproc.telemetry.breaker_metrics import BreakerMetrics

PROBE_MS: Final = 2000.0
"""How long nobody else may try an endpoint whose breaker is half open, once a worker was allowed to."""
BUSY_S: Final = 1.0
"""How long an endpoint without room is dearer: some scrapes, after which its own gauges tell."""
_MOST_TASKS: Final = 64
"""Verdicts under way at once. More come only from a store that hangs; strikes follow each other anyway."""

Dead = Callable[[str], Awaitable[bool]]

_CLOSED: Final = values.Breaker()

log = logging.getLogger(__name__)


class _Seen(msgspec.Struct):
    """What a worker knows of one pool.

    Attributes:
        breakers: breakers that are not as good as new, as the store had them last.
        probes: endpoints that this worker may try, until when.
        busy: endpoints that had no room, until when.
        pace: how long their first tokens take.
        members: endpoints of the pool at the last look.
    """

    breakers: dict[str, values.Breaker] = msgspec.field(default_factory=dict)
    probes: dict[str, float] = msgspec.field(default_factory=dict)
    busy: dict[str, float] = msgspec.field(default_factory=dict)
    pace: Pace = msgspec.field(default_factory=Pace)
    members: set[str] = msgspec.field(default_factory=set)


class Judging:
    """The breakers as one worker sees and feeds them.

    Args:
        around: its fleet is marked with what the breakers say.
        metrics: who counts.
        clock: time.
        dead: asks the engine at an `ip:port` whether it is dead.
    """

    def __init__(self, around: Surroundings, metrics: BreakerMetrics, clock: Clock, dead: Dead) -> None:
        self._around = around
        self._metrics = metrics
        self._clock = clock
        self._dead = dead
        self._asking: set[tuple[str, str]] = set()
        self._seen: dict[str, _Seen] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def attempt(self, attempt: Attempt) -> None:
        """An attempt at an endpoint failed; whether the request was answered by another one does not matter."""
        pool = self._around.fleet.pools.get(attempt.pool)
        endpoint = pool.id_at(attempt.destination) if pool else ""
        if pool is None or not endpoint:
            return
        if rule.is_full(attempt.status):
            self._seen_in(pool.name).busy[endpoint] = self._clock.monotonic() + BUSY_S
            self._mark(pool.name)
        self._judge(pool.name, endpoint, rule.verdict(attempt.status, attempt.flags))

    def timed_out(self, pool: str, endpoint: str, verdict: Verdict = "strike") -> None:
        """A request ran into one of its time limits at this endpoint; neutral where that may be the client's doing."""
        self._judge(pool, endpoint, verdict)

    def answered(self, pool: Pool, work_tokens: float, served: Served, endpoint: str) -> None:
        """A request was answered to its end by this endpoint; where that failed, `attempt` tells.

        Args:
            pool: its pool.
            work_tokens: prompt tokens that had to be prefilled before its first token, those in front included; -1
                where its first byte tells nothing of that.
            served: the request.
            endpoint: who answered.
        """
        verdict = rule.verdict(served.status, served.flags)
        if verdict == "strike":
            return
        settings = self._around.config.breakers
        if verdict == "good" and work_tokens >= 0.0 and served.ttft_s > 0.0 and settings.slow_factor > 0.0:
            slower = self._slower(pool, endpoint, work_tokens, served.ttft_s)
            if slower >= settings.slow_factor and served.ttft_s > settings.slow_least_s:
                self._metrics.slow(pool.name, endpoint)
                verdict = "strike"
        self._judge(pool.name, endpoint, verdict)

    def _slower(self, pool: Pool, endpoint: str, work_tokens: float, ttft_s: float) -> float:
        """How many times longer than its peers an endpoint took."""
        known = self._around.knowledge[pool.name]
        names = [each.id for each in pool.endpoints]
        rates = known.rates(names)
        usual_s = rule.usual_s(work_tokens, list(rates.values()), [known.overhead_s(name) for name in names])
        return self._seen_in(pool.name).pace.took(endpoint, ttft_s, usual_s)

    def _judge(self, pool: str, endpoint: str, verdict: Verdict) -> None:
        if not self._around.config.breakers.strikes:
            return
        before = self._seen_in(pool).breakers.get(endpoint)
        if verdict == "strike":
            self._metrics.strike(pool, endpoint)
        elif before is None or (verdict == "neutral" and before.state == "closed"):
            return  # nothing that it could change
        if len(self._tasks) >= _MOST_TASKS:
            self._metrics.lost()
        else:
            task = asyncio.get_running_loop().create_task(self._tell(pool, endpoint, verdict))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _tell(self, pool: str, endpoint: str, verdict: Verdict) -> None:
        rules = rules_of(self._around.config.breakers)
        try:
            after = await self._around.store.judge(pool, endpoint, verdict, rules)
            self._took(pool, endpoint, after)
            if verdict == "strike" and after.state == "closed" and await self._is_dead(pool, endpoint):
                # Its own word needs no further strikes.
                at_once = msgspec.structs.replace(rules, strikes=1)
                self._took(pool, endpoint, await self._around.store.judge(pool, endpoint, verdict, at_once))
        except StoreError as error:
            self._metrics.lost()
            log.debug("a verdict is lost", extra={"pool": pool, "endpoint": endpoint, "error": str(error)})

    async def _is_dead(self, pool: str, endpoint: str) -> bool:
        """Ask an engine for its health; one question at a time is enough."""
        found = self._around.fleet.pools.get(pool)
        destination = next((each.destination for each in found.endpoints if each.id == endpoint), "") if found else ""
        if not destination or (pool, endpoint) in self._asking:
            return False
        self._asking.add((pool, endpoint))
        try:
            return await self._dead(destination)
        finally:
            self._asking.discard((pool, endpoint))

    def _took(self, pool: str, endpoint: str, after: values.Breaker) -> None:
        """See that decisions know what a breaker is now."""
        seen = self._seen_in(pool)
        self._note(pool, endpoint, after)
        if after.state == "closed" and not after.strikes:
            seen.breakers.pop(endpoint, None)
        else:
            seen.breakers[endpoint] = after
        if after.state != "half_open":
            seen.probes.pop(endpoint, None)
        self._mark(pool)

    def _note(self, pool: str, endpoint: str, after: values.Breaker) -> None:
        before = self._seen_in(pool).breakers.get(endpoint, _CLOSED)
        if before.state != after.state:
            self._metrics.changed(pool, endpoint, after.state)
            told = {"pool": pool, "endpoint": endpoint}
            if after.state == "open":
                log.warning("an endpoint's breaker opens", extra={**told, "for_ms": after.left_ms})
            elif after.state == "closed":
                log.info("an endpoint's breaker closes", extra=told)

    async def refresh(self, renewed: Mapping[str, Collection[str]] | None = None) -> None:
        """Read all breakers, ask for probes where they are due, and mark the fleet. Call it after each new fleet.

        Args:
            renewed: by pool, endpoints that have just joined or restarted: what another life did is forgotten.
        """
        for pool in tuple(self._around.fleet.pools.values()):
            members = {each.id for each in pool.endpoints}
            seen = self._seen_in(pool.name)
            seen.pace.keep(members)
            gone = (seen.members | seen.breakers.keys()) - members
            for left in gone:
                self._metrics.forget(pool.name, left)
            seen.members = members
            try:
                # Another replica may have endpoints already that this one has not heard of: those are not its to drop.
                if gone := gone | {*(renewed or {}).get(pool.name, ())}:
                    await self._around.store.drop_breakers(pool.name, gone)
                found = await self._around.store.breakers(pool.name) if self._around.config.breakers.strikes else {}
            except StoreError:
                continue
            for name in {*found, *seen.breakers} & members:
                self._note(pool.name, name, found.get(name, _CLOSED))
            seen.breakers = {name: each for name, each in found.items() if name in members}
            await self._ask_for_probes(pool.name, seen)
        self.mark()

    async def _ask_for_probes(self, pool: str, seen: _Seen) -> None:
        now = self._clock.monotonic()
        half_open = {name for name, each in seen.breakers.items() if each.state == "half_open"}
        seen.probes = {name: until for name, until in seen.probes.items() if name in half_open and until > now}
        for name in half_open - seen.probes.keys():
            try:
                allowed = await self._around.store.probe(pool, name, PROBE_MS)
                # It may have failed meanwhile.
                if allowed and seen.breakers.get(name, _CLOSED).state == "half_open":
                    seen.probes[name] = now + PROBE_MS / 1000
            except StoreError:
                return

    def picked(self, pool: str, endpoint: Endpoint) -> None:
        """A decision went to this endpoint: where it was this worker's probe, the next one does not."""
        if endpoint.breaker == "probe":
            self._seen_in(pool).probes.pop(endpoint.id, None)
            self._metrics.probe(pool, endpoint.id)
            self._mark(pool)

    def mark(self) -> None:
        """Say of every endpoint of the fleet whether it gets requests."""
        for pool in tuple(self._around.fleet.pools):
            self._mark(pool)

    def _mark(self, name: str) -> None:
        fleet, seen = self._around.fleet, self._seen_in(name)
        pool = fleet.pools.get(name)
        if pool is None:
            return
        settings, now = self._around.config.breakers, self._clock.monotonic()
        seen.busy = {endpoint: until for endpoint, until in seen.busy.items() if until > now}
        marked = marked_pool(pool, seen.breakers, seen.probes.keys(), seen.busy.keys(), settings)
        if marked is not pool:
            self._around.fleet = msgspec.structs.replace(fleet, pools={**fleet.pools, name: marked})

    def _seen_in(self, pool: str) -> _Seen:
        seen = self._seen.get(pool)
        if seen is None:
            seen = self._seen[pool] = _Seen()
        return seen

    async def idle(self) -> None:
        """Return once no verdict is under way."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)


def rules_of(settings: Breakers) -> values.BreakerRules:
    """The configured rules as the store takes them."""
    open_ms = settings.open_s * 1000.0
    return values.BreakerRules(settings.strikes, open_ms, max(open_ms, settings.max_open_s * 1000.0))


def marked_pool(
    pool: Pool,
    breakers: Mapping[str, values.Breaker],
    probes: Collection[str],
    busy: Collection[str],
    settings: Breakers,
) -> Pool:
    """The pool with its endpoints' breakers; the same object when nothing changed.

    Args:
        pool: the pool.
        breakers: those that are not as good as new.
        probes: endpoints that this worker may try once.
        busy: endpoints that had no room a moment ago.
        settings: how many may be left alone, and what it costs to have no room.
    """
    used = breakers if settings.strikes else {}
    tripped = {name: each.left_ms for name, each in used.items() if each.state != "closed"}
    alone = rule.left_alone(tripped, len(pool.endpoints), settings.max_open_share)
    endpoints, changed = [], False
    for each in pool.endpoints:
        state: Breaker = "closed"
        if each.id in alone:
            state = "probe" if each.id in probes else breakers[each.id].state
        busy_ms = settings.busy_ms if each.id in busy else 0.0
        if (state, busy_ms) != (each.breaker, each.busy_ms):
            each, changed = msgspec.structs.replace(each, breaker=state, busy_ms=busy_ms), True  # noqa: PLW2901
        endpoints.append(each)
    return msgspec.structs.replace(pool, endpoints=tuple(endpoints)) if changed else pool

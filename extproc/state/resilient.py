"""The store a worker uses: the shared one while it answers, the local ledger while it does not.

Every charge is kept in the local ledger too, so that it is warm when the shared store goes. The first missed deadline
or lost connection opens a pool's circuit; from then on its decisions are local and cost no waiting, and probes find the
moment when the shared store answers again. Then it is told what it missed: ends, charges still open, where those are
served, pins. A call that is refused (full, read-only, no permission) is answered by the local ledger too, but opens
nothing: a refusal costs no waiting, and the next call finds out whether it still is one.

How stale what is shared may be, to another replica:

| what | while the store answers | while it does not |
|---|---|---|
| charges, backlogs, pins | one round trip | not seen; told from half a second after the return on, 3,000 a second |
| charges that the store lost (flushed, failed over) | one heartbeat, a third of a lease | the same, after the return |
| charges of a replica that died | one lease and a heartbeat | the same, after the return |
| states of endpoints | one scrape and one refresh | those read last |
| breakers | one refresh; at once to who saw the last strike | own verdicts alone |
| queues of other workers | 50 ms, while somebody waits | not seen |
| profiles | one batch (50 ms) and one round trip | own decisions alone; the others' are told at the return |
| shared work (who scrapes what) | one lease | what one holds is kept, and nothing is taken |
| documents (rollouts) | one poll of whoever reads them | those read last, and nobody changes them |

A return takes up to a second to be noticed (probes wait half a second, half of it more or less), and another one where
a connection has to be made anew.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from random import Random
from typing import Concatenate, ParamSpec, TypeVar

from extproc.clock import Clock, SystemClock
from extproc.errors import StoreError
from extproc.govern.breaker import Verdict
from extproc.state.memory import MemoryStore
from extproc.state.shared_quota import SharedQuota
from extproc.state.sharing import Sharing
from extproc.state.stats import Stats
from extproc.state.store import Store
from extproc.state.telling import Tools
from extproc.state.trouble import Trouble
from extproc.state.values import (
    MAX_PINS,
    Beat,
    Breaker,
    BreakerRules,
    Load,
    Move,
    Reservation,
    Reserve,
    Settle,
)

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class ResilientStore(SharedQuota):
    """A `Store` that always decides: `primary` first, `local` when that one cannot.

    See `SharedOnly` for the verbs that fail while the shared store is gone.

    Args:
        primary: the shared store.
        local: this worker's own ledger; also holds a copy of every charge of this worker.
        probe_s: longest time between probes while a circuit is open, in seconds, half of it more or less by chance.
        max_queued: settles, and pins, kept for later by each pool.
        clock: where pins and circuits take their time from; the system's by default.
        chance: spreads probes and returns of many workers over time.
    """

    def __init__(
        self,
        primary: Store,
        local: MemoryStore,
        probe_s: float = 0.5,
        max_queued: int = 20_000,
        *,
        clock: Clock | None = None,
        chance: Random | None = None,
    ) -> None:
        # Chance here only spreads load.
        chance = chance or Random()  # noqa: S311
        self.stats = Stats()
        super().__init__(
            Tools(primary, local, clock or SystemClock(), chance, self.stats, longest_s=probe_s, most=max_queued)
        )
        self._local = local

    @property
    def degraded(self) -> bool:
        """Decisions of some pool are made on the local ledger."""
        return any(each.degraded for each in self._sharings.values())

    @property
    def settled(self) -> bool:
        """The shared store answers and was told everything: nothing waits to be delivered or asserted."""
        return all(each.settled for each in self._sharings.values())

    def degraded_in(self, pool: str) -> bool:
        """Decisions of this pool are made on the local ledger."""
        return pool in self._sharings and self._sharings[pool].degraded

    def troubles(self) -> Mapping[str, Trouble]:
        """What the shared store is in trouble with now, by pool; pools without any are absent."""
        found = ((pool, sharing.trouble) for pool, sharing in self._sharings.items())
        return {pool: trouble for pool, trouble in found if trouble is not None}

    def undelivered(self) -> Mapping[str, int]:
        """Settles that wait for the shared store, by pool."""
        return {pool: len(sharing.unsent.settles) for pool, sharing in self._sharings.items()}

    async def reserve(self, ask: Reserve) -> Reservation:
        """See `Store.reserve`."""
        sharing = self._sharing(ask.pool)
        sharing.unsent.max_pins = ask.max_pins
        if sharing.circuit.open:
            return await self._decide_alone(sharing, ask)
        try:
            reservation = await sharing.ask(self._primary.reserve(ask))
        except StoreError:
            # It may have been executed all the same: its settle goes to the shared store too.
            sharing.alone = True
            sharing.doubt(ask.charge_id)
            return await self._decide_alone(sharing, ask)
        except asyncio.CancelledError:
            # The same, and nobody is left to settle it.
            sharing.end(Settle(ask.pool, ask.charge_id, ask.replica))
            raise
        sharing.alone = False
        if reservation.endpoint:
            sharing.unsent.superseded(ask.next_pin_key or ask.pin_key)
            self._local.adopt(ask, reservation)
        return reservation

    async def _decide_alone(self, sharing: Sharing, ask: Reserve) -> Reservation:
        key = ask.next_pin_key or ask.pin_key
        before = await self._local.pinned(ask.pool, key) if key else ""
        reservation = await self._local.reserve(ask)
        if reservation.endpoint:
            sharing.unsent.alone(ask.charge_id, self._tools.clock.monotonic())
            if key:
                sharing.pin(key, reservation.endpoint, ask.pin_ttl_ms, ask.max_pins, before)
        return reservation

    async def settle(self, end: Settle) -> bool:
        """See `Store.settle`; what cannot be delivered now is delivered later."""
        was_open = await self._local.settle(end)
        sharing = self._sharing(end.pool)
        if sharing.unsent.ended(end.charge_id):
            return was_open
        if not sharing.circuit.open:
            try:
                return await sharing.ask(self._primary.settle(end)) or was_open
            except StoreError:
                log.debug("a settle is delivered later")
            except asyncio.CancelledError:
                sharing.end(end)
                raise
        sharing.end(end)
        return was_open

    async def move(self, move: Move) -> bool:
        """See `Store.move`; a charge that could not be moved in the shared store moves when that one is told of it."""
        was_open = await self._local.move(move)
        sharing = self._sharing(move.pool)
        if not was_open or sharing.unsent.is_local_only(move.charge_id):
            return was_open
        if not sharing.circuit.open:
            try:
                return await sharing.ask(self._primary.move(move)) or was_open
            except StoreError:
                log.debug("a move is told later")
            except asyncio.CancelledError:
                sharing.doubt(move.charge_id)
                raise
        sharing.doubt(move.charge_id)
        return was_open

    async def pin(self, pool: str, pin_key: str, endpoint: str, pin_ttl_ms: int, max_pins: int = MAX_PINS) -> None:
        """See `Store.pin`; merged later when it cannot be made now (see `LatePin.wins_over`)."""
        sharing = self._sharing(pool)
        before = await self._local.pinned(pool, pin_key)
        await self._local.pin(pool, pin_key, endpoint, pin_ttl_ms, max_pins)
        if not sharing.circuit.open:
            try:
                await sharing.ask(self._primary.pin(pool, pin_key, endpoint, pin_ttl_ms, max_pins))
            except StoreError:
                log.debug("a pin is merged later")
            else:
                sharing.unsent.superseded(pin_key)
                return
        sharing.pin(pin_key, endpoint, pin_ttl_ms, max_pins, before)

    async def pinned(self, pool: str, pin_key: str) -> str:
        """See `Store.pinned`.

        Raises:
            StoreError: the shared store does not answer, and no pin is known here: another replica may have made one.
        """
        return await self._shared_or(self._primary.pinned, self._pinned_here, pool, pin_key)

    async def _pinned_here(self, pool: str, pin_key: str) -> str:
        """The pin that this process knows of."""
        if endpoint := await self._local.pinned(pool, pin_key):
            return endpoint
        raise StoreError("the shared store does not answer, and this process knows no pin of the session")

    async def heartbeat(self, pool: str, replica: str, lease_ms: int) -> Beat:
        """See `Store.heartbeat`.

        Charges that the shared store turns out to have lost are told again, and pins with them; when it has some that
        this worker has not, twice in a row, all are given up and those that are open told again.
        """
        mine = await self._local.heartbeat(pool, replica, lease_ms)
        sharing = self._sharing(pool)
        if sharing.circuit.open:
            return mine
        before = self._open(pool, replica)
        told = {each for each in before if not sharing.unsent.is_unsure(each)}
        try:
            beat = await sharing.ask(self._primary.heartbeat(pool, replica, lease_ms))
        except StoreError:
            return mine
        if beat.emptied:
            sharing.emptied()
        after = self._open(pool, replica)
        # Open before it was sent and after its reply: reservations and settles under way cannot be told from a loss.
        missing = len([each for each in told & after if not sharing.unsent.is_unsure(each)]) - beat.known
        strays = beat.known - len(before | after) - len(sharing.unsent.settles)
        sharing.compared(replica, missing=missing, strays=strays)
        return beat

    def _open(self, pool: str, replica: str) -> set[str]:
        """Charges that are open here."""
        return {each.ask.charge_id for each in self._local.open_charges(pool, replica)}

    async def release(self, pool: str, replica: str) -> None:
        """See `Store.release`; without the shared store its charges vanish with the lease."""
        await self._local.release(pool, replica)
        self._sharing(pool).unsent.forget(replica)
        await self._shared_or(self._primary.release, self._local.release, pool, replica)

    async def loads(self, pool: str) -> Mapping[str, Load]:
        """See `Store.loads`; the local ledger knows this worker's share only."""
        return await self._shared_or(self._primary.loads, self._local.loads, pool)

    async def put_states(self, pool: str, states: Mapping[str, bytes]) -> None:
        """See `Store.put_states`."""
        await self._local.put_states(pool, states)
        await self._shared_or(self._primary.put_states, self._local.put_states, pool, states)

    async def drop_states(self, pool: str, endpoints: Collection[str]) -> None:
        """See `Store.drop_states`."""
        await self._local.drop_states(pool, endpoints)
        await self._shared_or(self._primary.drop_states, self._local.drop_states, pool, endpoints)

    async def states(self, pool: str) -> Mapping[str, bytes]:
        """See `Store.states`; what was read last is kept for the time without the shared store."""
        states = await self._shared_or(self._primary.states, self._local.states, pool)
        await self._local.drop_states(pool, (await self._local.states(pool)).keys() - states.keys())
        await self._local.put_states(pool, states)
        return states

    async def judge(self, pool: str, endpoint: str, verdict: Verdict, rules: BreakerRules) -> Breaker:
        """See `Store.judge`; the local breaker is kept up too, for the time without the shared store."""
        mine = await self._local.judge(pool, endpoint, verdict, rules)
        sharing = self._sharing(pool)
        if not sharing.circuit.open:
            try:
                return await sharing.ask(self._primary.judge(pool, endpoint, verdict, rules))
            except StoreError:
                log.debug("judged by the local ledger")
        return mine

    async def probe(self, pool: str, endpoint: str, lease_ms: float) -> bool:
        """See `Store.probe`."""
        return await self._shared_or(self._primary.probe, self._local.probe, pool, endpoint, lease_ms)

    async def breakers(self, pool: str) -> Mapping[str, Breaker]:
        """See `Store.breakers`."""
        return await self._shared_or(self._primary.breakers, self._local.breakers, pool)

    async def drop_breakers(self, pool: str, endpoints: Collection[str]) -> None:
        """See `Store.drop_breakers`."""
        await self._local.drop_breakers(pool, endpoints)
        await self._shared_or(self._primary.drop_breakers, self._local.drop_breakers, pool, endpoints)

    async def ping(self, pool: str = "") -> None:
        """Raise `StoreError` unless the shared store answers; calls are served all the same."""
        await (self._sharing(pool).ask(self._primary.ping(pool)) if pool else self._primary.ping())

    async def close(self) -> None:
        """See `Store.close`; tries once to deliver the settles still waiting."""
        await asyncio.gather(*(sharing.close() for sharing in self._sharings.values()))
        await self._primary.close()
        await self._local.close()

    async def _shared_or(
        self,
        shared: Callable[Concatenate[str, P], Awaitable[T]],
        local: Callable[Concatenate[str, P], Awaitable[T]],
        pool: str,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call the shared store, or the local one when the circuit is open or the call fails."""
        sharing = self._sharing(pool)
        if not sharing.circuit.open:
            try:
                return await sharing.ask(shared(pool, *args, **kwargs))
            except StoreError:
                log.debug("answered by the local ledger")
        return await local(pool, *args, **kwargs)

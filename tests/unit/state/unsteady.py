"""A shared store that fails on command."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from random import Random
from typing import Any, TypeVar

from extproc.clock import ManualClock
from extproc.errors import StoreError
from extproc.state.memory import MemoryStore
from extproc.state.resilient import ResilientStore
from extproc.state.trouble import StoreDeadlineError
from extproc.state.values import MAX_PINS, Beat, Candidate, Move, Reservation, Reserve, Settle
from tests.waiting import until

T = TypeVar("T")
PROBE_S = 0.01
GONE, LATE = StoreError("gone"), StoreDeadlineError("late")
A, B = Candidate("a", 0.0, 10.0, 1e-6), Candidate("b", 5.0, 10.0, 1e-6)


class Unsteady(MemoryStore):
    """A store that executes, or not, and then fails with `fault` as long as that is set.

    Attributes:
        fault: what every call ends with.
        executes: calls are executed before they fail.
        failing: pools that `fault` is of; empty for all.
        late_settles: settles that miss their deadline without being executed, from now on.
        on_reserve: awaited once, before the next reservation.
        on_settle: awaited before each settle.
        on_pinned: awaited after a pin was read, before the reply.
        before_beat: awaited before each heartbeat is executed.
        after_beat: awaited after it was, before its reply.
        most_reserving: reservations that were under way at once, at most.
        clock: its clock.
        calls: verbs that were called, pings left out.
        pings: how often it was pinged.
    """

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        super().__init__(self.clock)
        self.fault: StoreError | None = None
        self.executes = False
        self.failing: set[str] = set()
        self.late_settles = 0
        self.on_reserve: Callable[[], Awaitable[object]] | None = None
        self.on_settle: Callable[[], Awaitable[object]] | None = None
        self.on_pinned: Callable[[], Awaitable[object]] | None = None
        self.before_beat: Callable[[], Awaitable[object]] | None = None
        self.after_beat: Callable[[], Awaitable[object]] | None = None
        self.most_reserving = self._reserving = 0
        self.calls: list[str] = []
        self.pings = 0

    async def _run(self, pool: str, call: Coroutine[Any, Any, T]) -> T:
        fails = self.fault is not None and (not self.failing or pool in self.failing)
        if fails and not self.executes:
            call.close()
        else:
            reply = await call
        if fails and self.fault is not None:
            raise self.fault
        return reply

    async def reserve(self, ask: Reserve) -> Reservation:
        """See `Store.reserve`."""
        self.calls.append("reserve")
        if self.on_reserve is not None:
            callback, self.on_reserve = self.on_reserve, None
            await callback()
        self._reserving += 1
        self.most_reserving = max(self.most_reserving, self._reserving)
        await asyncio.sleep(0)
        self._reserving -= 1
        return await self._run(ask.pool, super().reserve(ask))

    async def settle(self, end: Settle) -> bool:
        """See `Store.settle`."""
        self.calls.append("settle")
        if self.on_settle is not None:
            await self.on_settle()
        if self.late_settles:
            self.late_settles -= 1
            raise StoreDeadlineError("late")
        return await self._run(end.pool, super().settle(end))

    async def move(self, move: Move) -> bool:
        """See `Store.move`."""
        self.calls.append("move")
        return await self._run(move.pool, super().move(move))

    async def pin(self, pool: str, pin_key: str, endpoint: str, pin_ttl_ms: int, max_pins: int = MAX_PINS) -> None:
        """See `Store.pin`."""
        self.calls.append("pin")
        await self._run(pool, super().pin(pool, pin_key, endpoint, pin_ttl_ms, max_pins))

    async def pinned(self, pool: str, pin_key: str) -> str:
        """See `Store.pinned`."""
        self.calls.append("pinned")
        endpoint = await self._run(pool, super().pinned(pool, pin_key))
        if self.on_pinned is not None:
            await self.on_pinned()
        return endpoint

    async def heartbeat(self, pool: str, replica: str, lease_ms: int) -> Beat:
        """See `Store.heartbeat`."""
        self.calls.append("heartbeat")
        if self.before_beat is not None:
            await self.before_beat()
        beat = await self._run(pool, super().heartbeat(pool, replica, lease_ms))
        if self.after_beat is not None:
            await self.after_beat()
        return beat

    async def release(self, pool: str, replica: str) -> None:
        """See `Store.release`."""
        self.calls.append("release")
        await self._run(pool, super().release(pool, replica))

    async def append(self, pool: str, payload: bytes, cap: int) -> str:
        """See `Store.append`."""
        self.calls.append("append")
        return await self._run(pool, super().append(pool, payload, cap))

    async def states(self, pool: str) -> Mapping[str, bytes]:
        """See `Store.states`."""
        self.calls.append("states")
        return await self._run(pool, super().states(pool))

    async def hold(self, pool: str, group: str, holder: str, names: Collection[str], lease_ms: int) -> Collection[str]:
        """See `Store.hold`."""
        self.calls.append("hold")
        return await self._run(pool, super().hold(pool, group, holder, names, lease_ms))

    async def ping(self, pool: str = "") -> None:
        """See `Store.ping`."""
        self.pings += 1
        await self._run(pool, super().ping(pool))

    async def running(self, pool: str = "p") -> dict[str, int]:
        """Sequences in flight per endpoint."""
        return {key: load.running for key, load in (await self.loads(pool)).items() if load.running}


def resilient(shared: Unsteady, local: MemoryStore, **options: Any) -> ResilientStore:
    """A store over these two, which probes again within a few milliseconds."""
    return ResilientStore(shared, local, probe_s=PROBE_S, clock=ManualClock(), chance=Random(1), **options)


def ask(charge: str, *candidates: Candidate, session: str = "", **others: Any) -> Reserve:
    """A reservation of worker `r` in pool `p`, by local costs alone."""
    values = {"pool": "p", "pin_key": session, "backlog_weight": 0.0, "running_ms": 0.0, **others}
    return Reserve(charge_id=charge, replica="r", candidates=candidates or (A, B), **values)


def end(charge: str, pool: str = "p") -> Settle:
    """Its end."""
    return Settle(pool, charge, "r")


async def mended(store: ResilientStore, shared: Unsteady) -> None:
    """Let the shared store answer again, and wait until nothing is left to tell it."""
    shared.fault = None
    await until(lambda: store.settled)

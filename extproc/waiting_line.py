"""The queue of one pool at one worker: who waits, and how they are let through as capacity becomes free.

It looks at the ledger whenever something may have become free: a request of this worker ended, another replica told of
one, or 50 ms are over. What it lets through is bounded by the room that is left in the pool, and by this worker's share
of it where others have queues too: so replicas neither rush in together nor starve one another.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import msgspec

from extproc.clock import Clock
from extproc.config_overload import Rules
from extproc.envoy.contract import Line
from extproc.errors import (
    ClientLeftError,
    OverloadedError,
    QueueTimeoutError,
    ShuttingDownError,
    WarmpathError,
)
from extproc.fullness import Fullness
from extproc.govern.drain_rate import DrainRate
from extproc.govern.queue import BANDS, Bounds, Entry, FairQueue
from extproc.govern.shares import Demand, Share, share_of
from extproc.queue_board import QueueBoard, mark
from extproc.quota_limits import secret_of
from extproc.rules_overload import rules_in
from extproc.surroundings import Surroundings
from extproc.telemetry.overload_metrics import Left, OverloadMetrics

_TICK_S: Final = 0.05
_SPACING_S: Final = 0.005
"""Least time between two looks: ends of requests that come together cost one."""
_ASK_S: Final = 0.1
"""Only who waits longer asks the gateway for patience; less where it gives up early."""
_ALONE: Final = Share(1.0, {})


class _Waiter(msgspec.Struct, frozen=True):
    """One request that waits."""

    entry: Entry
    since: float
    until: float
    turn: asyncio.Future[None]


class WaitingLine:
    """One pool's queue.

    Attributes:
        drain: how fast requests of the pool end, at all replicas.
        full: how full the pool is.
    """

    def __init__(
        self, pool: str, around: Surroundings, board: QueueBoard, metrics: OverloadMetrics, clock: Clock
    ) -> None:
        self.drain = DrainRate()
        self.full = Fullness(around.store, clock)
        self._pool = pool
        self._around = around
        self._board = board
        self._metrics = metrics
        self._clock = clock
        self._queue = FairQueue(Bounds(0, 0, 0))
        self._waiters: dict[int, _Waiter] = {}
        self._wake = asyncio.Event()
        self._pumping: asyncio.Task[None] | None = None
        self._read_at = -1.0
        self._share, self._shared = _ALONE, False
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def rules(self) -> Rules:
        """What holds for the pool now."""
        return rules_in(self._around.config, self._pool)

    async def wait(self, entry: Entry, line: Line | None) -> None:
        """Return once it is this request's turn; it then counts among what is coming to the pool.

        Raises:
            OverloadedError: the queue is full, or others have a better claim to this place in it.
            QueueTimeoutError: it waited as long as it may.
            ShuttingDownError: this worker stops.
            ClientLeftError: nobody waits for the answer any more.
        """
        if self._closed:
            raise ShuttingDownError("this worker is stopping: send the request again")
        bounds = self.rules.queue
        self._queue.bounds = Bounds(bounds.max_requests, bounds.max_tokens, bounds.low_share)
        for out in self._queue.put(entry):
            if out is entry:
                self._metrics.left(self._pool, BANDS[entry.band], "full")
                raise self.overloaded("too many requests wait for this model")
            self._refuse(out.id, "displaced", self.overloaded("requests with a better claim wait for this model"))
        now = self._clock.monotonic()
        waiter = _Waiter(entry, now, now + bounds.max_wait_s, asyncio.get_running_loop().create_future())
        self._waiters[entry.id] = waiter
        self._start()
        if line is not None:
            line.when_left(lambda: self._refuse(entry.id, "client_left", ClientLeftError("the client left")))
        try:
            await self._turn(waiter, line, bounds.max_wait_s)
        finally:
            self._waiters.pop(entry.id, None)
            self._queue.remove(entry.id)

    async def _turn(self, waiter: _Waiter, line: Line | None, longest_s: float) -> None:
        patience_s = self._around.config.gateway.message_timeout_ms / 1000.0
        first_s = min(_ASK_S, patience_s / 4, longest_s)
        await asyncio.wait([waiter.turn], timeout=first_s)
        if not waiter.turn.done():
            if line is not None:
                await line.hold(longest_s + patience_s)
            await asyncio.wait([waiter.turn], timeout=max(0.0, waiter.until - self._clock.monotonic()))
        if not waiter.turn.done():
            self._time_out(waiter)
        waiter.turn.result()

    def _time_out(self, waiter: _Waiter) -> None:
        self._metrics.left(self._pool, BANDS[waiter.entry.band], "timeout")
        longest_s = waiter.until - waiter.since
        waiter.turn.set_exception(QueueTimeoutError(f"no endpoint had room for this request within {longest_s:g} s"))

    def overloaded(self, why: str) -> OverloadedError:
        """A refusal that says when to come again: once what waits at the engines and here is gone at today's rate."""
        part = max(self._share.part, 0.01)
        ahead = self.full.room.waiting * part + len(self._waiters)
        return OverloadedError(why, self.drain.retry_after_s(self._clock.monotonic(), ahead, part))

    def wake(self) -> None:
        """Something may have become free."""
        self._wake.set()

    def show(self) -> None:
        """Fill the gauges."""
        self._metrics.queue(self._pool, dict(zip(BANDS, self._queue.requests(), strict=True)), self._queue.tokens)
        self._metrics.pool(self._pool, self.full.room.saturated, self.drain.per_s(self._clock.monotonic()))

    async def close(self) -> None:
        """Refuse everybody who waits, and all who come."""
        self._closed = True
        for id_ in list(self._waiters):
            self._refuse(id_, "shutting_down", ShuttingDownError("this worker is stopping: send the request again"))
        if self._pumping is not None:
            self._pumping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pumping
        await self._board.leave()

    def _refuse(self, id_: int, outcome: Left, error: WarmpathError) -> None:
        waiter = self._waiters.pop(id_, None)
        self._queue.remove(id_)
        if waiter is not None and not waiter.turn.done():
            self._metrics.left(self._pool, BANDS[waiter.entry.band], outcome)
            waiter.turn.set_exception(error)

    def _start(self) -> None:
        if self._pumping is None or self._pumping.done():
            self._pumping = asyncio.get_running_loop().create_task(self._pump())
        self._wake.set()

    async def _pump(self) -> None:
        while self._waiters:
            self._wake.clear()
            await self._serve()
            if self._waiters:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_S):
                        await self._wake.wait()
                await asyncio.sleep(_SPACING_S)
            if not self._waiters:
                # Who comes before the store has noted it finds this task at work, so it looks once more.
                await self._board.tell({})

    async def _serve(self) -> None:
        """Let through whom there is room for."""
        rules, pool = self.rules, self._around.fleet.pools.get(self._pool)
        if pool is None or rules.action != "queue":
            self._grant(lambda: True)
            return
        now = self._clock.monotonic()
        if now - self._read_at >= _TICK_S:
            self._read_at = now
            await self._read_board(rules.queue.low_share)
        found, full = await self.full.look(pool, rules.saturation), self.full
        coming, tokens = full.coming, full.coming_tokens
        quota = max(1.0, self._share.part * found.limit)

        def has_room() -> bool:
            sent = full.coming - coming
            if self._shared and full.in_flight + full.coming >= quota:
                return False
            return found.sequences > sent and found.tokens > full.coming_tokens - tokens

        self._grant(has_room)

    def _grant(self, has_room: Callable[[], bool]) -> None:
        while has_room():
            entry = self._queue.pop()
            if entry is None:
                return
            waiter, now = self._waiters.pop(entry.id), self._clock.monotonic()
            if now >= waiter.until:
                self._time_out(waiter)
                continue
            self.full.passes(entry.sequences, entry.prompt_tokens)
            self._metrics.left(self._pool, BANDS[entry.band], "granted", now - waiter.since)
            waiter.turn.set_result(None)

    async def _read_board(self, low_share: float) -> None:
        tenants, secret = self._around.config.overload.tenants, secret_of(self._around.config)
        names = {tenant: mark(secret, tenant) for _, tenant in self._queue.demand()}
        mine: Demand = {(band, names[tenant]): tokens for (band, tenant), tokens in self._queue.demand().items()}
        await self._board.tell(mine)
        others = await self._board.others()
        self._shared = bool(others)
        weights = {mark(secret, tenant): each.weight for tenant, each in tenants.items()}
        self._share = share_of(mine, others, weights, low_share) if others else _ALONE
        self._queue.scale = {
            tenant: self._share.scale[key] for tenant, key in names.items() if key in self._share.scale
        }

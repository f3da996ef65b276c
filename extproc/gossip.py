"""Carries deltas between this worker's knowledge and the pools' feeds: batched out, followed in.

Who joins, or missed something, catches up from snapshots (`joining`); those are written for it by others (`saving`).
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from extproc.errors import StoreError
from extproc.follower import Counts, Follower
from extproc.joining import Joining, in_slices
from extproc.outbox import ENTRY_BYTES, Outbox
from extproc.saving import Saving
from extproc.state import feed
from extproc.state.feed import Delta
from extproc.state.keys import parse_feed_id
from extproc.state.knowledge import PoolKnowledge
from extproc.state.store import Store
from extproc.state.trouble import StoreDeadlineError
from extproc.state.window import Window

FLUSH_S = 0.05
"""Longest time a delta waits for its batch; the staleness bound of profiles is this plus one round trip."""
FEED_BYTES = 64 * 1024 * 1024
"""Most bytes that the entries of one pool's feed fill, whatever their number."""
_LARGE = ENTRY_BYTES // 4
_LARGE_AT_ONCE = 2
"""Large entries on their way at once, of all pools: a decision waits behind them. When 30 pools told 8 MB each after an
outage, all at the same time, the slowest decision took 42 ms; so 19 ms."""
_WAIT_MS = 1000
_RETRY_S = 0.5


class _Pool(msgspec.Struct, frozen=True):
    """What serves one pool.

    Attributes:
        known: what deltas are applied to.
        outbox: what is to be told.
        follower: reads the feed.
        joining: catches up.
        saving: writes snapshots.
        flushing: held while what is queued is sent.
        settled: set when it has caught up, or the store was found not to answer.
    """

    known: PoolKnowledge
    outbox: Outbox
    follower: Follower
    joining: Joining
    saving: Saving
    flushing: asyncio.Lock
    settled: asyncio.Event


class Gossip:
    """Feeds of all pools of one worker.

    Attributes:
        counts: what was skipped, lost, missed, and how many snapshots were taken over and written.
    """

    def __init__(
        self,
        store: Store,
        knowledge: Mapping[str, PoolKnowledge],
        replica: str,
        cap: int,
        feed_bytes: int = FEED_BYTES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with nothing queued and nothing read.

        Args:
            store: where the feeds are.
            knowledge: by pool, what deltas are applied to.
            replica: this worker's id.
            cap: number of entries each pool's feed keeps.
            feed_bytes: bytes that they fill at most; fewer entries are kept when they are large.
            now: this worker's clock, in seconds: that of its decisions and of `PoolKnowledge.age`.
        """
        self.counts = Counts()
        self._store = store
        self._replica = replica
        self._now = now
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)
        self._pools = {pool: self._pool(pool, known, Window(cap, feed_bytes)) for pool, known in knowledge.items()}

    def _pool(self, pool: str, known: PoolKnowledge, window: Window) -> _Pool:
        follower = Follower(known, self._replica, window, self.counts, partial(self.publish, pool))
        return _Pool(
            known=known,
            outbox=Outbox(self._replica),
            follower=follower,
            joining=Joining(self._store, pool, known, self.counts, self._now),
            saving=Saving(self._store, pool, known, self._replica, follower, self.counts, self._now),
            flushing=asyncio.Lock(),
            settled=asyncio.Event(),
        )

    def publish(self, pool: str, delta: Delta) -> None:
        """Queue a delta for the other replicas; returns at once."""
        if not self._pools[pool].outbox.put(delta):
            self.counts.lost += 1

    def learn(self, pool: str, delta: Delta) -> None:
        """Apply a delta of this worker here, and tell the others it and the corrections it leads to."""
        self.publish(pool, delta)
        for correction in self._pools[pool].known.apply(delta):
            self.publish(pool, correction)

    async def run(self) -> None:
        """Flush, follow and write snapshots until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._flush_forever(tasks))
            for name, pool in self._pools.items():
                tasks.create_task(self._follow(name, pool))
                tasks.create_task(pool.saving.run())

    async def caught_up(self, within_s: float) -> bool:
        """Wait until this worker knows what the others do; False when it does not yet.

        Returns after `within_s` seconds at the latest, and at once when the store does not answer: a worker decides
        with what it has.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                for pool in self._pools.values():
                    await pool.settled.wait()
        return all(pool.follower.caught_up for pool in self._pools.values())

    async def leave(self) -> None:
        """Tell the others what is queued yet, and leave the snapshots to them."""
        await self.flush()
        for pool in self._pools.values():
            with contextlib.suppress(StoreError):
                await pool.saving.leave()

    async def _flush_forever(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            for name, pool in self._pools.items():
                # Nobody waits for a pool whose node does not answer: that was 230 ms for a batch of another pool, with
                # eight pools on a node that stood still.
                if pool.outbox and not pool.flushing.locked():
                    tasks.create_task(self._flush(name, pool))

    async def flush(self) -> None:
        """Send what is queued; what the store refuses stays queued."""
        await asyncio.gather(*(self._flush(name, pool) for name, pool in self._pools.items()))

    async def _flush(self, name: str, pool: _Pool) -> None:
        """Send what is queued of one pool, an entry at a time; what comes meanwhile goes with the next batch."""
        async with pool.flushing:
            left = len(pool.outbox)
            while left > 0 and (entry := pool.outbox.entry()):
                try:
                    async with self._large if len(entry) >= _LARGE else contextlib.nullcontext():
                        await self._store.append(name, entry, pool.follower.window.entries)
                except StoreError:
                    return
                left -= pool.outbox.sent()

    async def _follow(self, name: str, pool: _Pool) -> None:
        follower, joined = pool.follower, False
        while True:
            try:
                if not joined:
                    await self._join(name, pool)
                    joined = True
                await pool.joining.catch_up(follower, lambda: pool.outbox.number + 2)
                entries = await self._store.read(name, follower.after, _WAIT_MS)
            except StoreError as error:
                # One that is slow at this moment is there: it is worth the wait.
                if not isinstance(error, StoreDeadlineError):
                    pool.settled.set()
                await asyncio.sleep(_RETRY_S)
                continue
            for entry in entries:
                await in_slices(follower.take(entry, self._now()))
                # A worker that joins reads the whole feed at once; decisions must not wait until it is through.
                await asyncio.sleep(0)
            if follower.caught_up:
                pool.settled.set()

    async def _join(self, name: str, pool: _Pool) -> None:
        """Take over the snapshots; what this worker has told, and tells meanwhile, comes back through the feed."""
        await self._flush(name, pool)
        greeting = feed.encode(self._replica, ())
        goal = await self._store.append(name, greeting, pool.follower.window.entries)
        await pool.joining.join(pool.follower, parse_feed_id(goal), lambda: pool.outbox.number + 2)

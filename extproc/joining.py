"""How a worker that joins or missed something comes to know what the others do: from snapshots, then the feed."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator

from extproc.errors import StoreError
from extproc.follower import BEGINNING, Counts, Follower, Key
from extproc.state import snapshots
from extproc.state.feed import DamagedError, OtherVersionError
from extproc.state.holder import PIECES, entries_of
from extproc.state.keys import parse_feed_id
from extproc.state.knowledge import PoolKnowledge
from extproc.state.learnt import PoolLearnt
from extproc.state.snapshots import POOL, EndpointSnapshot
from extproc.state.store import Store

_SLICE_S = 0.0005
"""How long snapshots are copied or taken over before others get a turn."""
_LOOK_S = 5.0
_GIVE_UP_S = 120.0
_REST_S = 60.0

log = logging.getLogger(__name__)


class Joining:
    """Catches up one pool of one worker.

    Args:
        store: where the snapshots are.
        pool: pool name.
        known: what they are taken over into.
        counts: counted here.
        now: this worker's clock, in seconds.
    """

    def __init__(self, store: Store, pool: str, known: PoolKnowledge, counts: Counts, now: Callable[[], float]) -> None:
        self._store = store
        self._pool = pool
        self._known = known
        self._counts = counts
        self._now = now
        # A gap that is being caught up: which one, since when, of whom it is caught up, when to look again.
        self._gap: Key | None = None
        self._since = 0.0
        self._done: set[str] = set()
        self._look_at = 0.0

    async def join(self, follower: Follower, goal: Key, own: Callable[[], int]) -> None:
        """Take over all snapshots; the follower then reads on from the oldest of them, up to `goal` and further.

        Args:
            follower: of the pool.
            goal: last entry of the feed.
            own: last number under which this worker has told something, or will in a moment.

        Raises:
            StoreError: the store does not answer.
        """
        follower.joined(goal, self._now())
        heads = await self._store.snapshots(self._pool)
        included = await self._restore(follower, heads)
        # Of an endpoint without a snapshot all that the feed has is needed.
        complete = included and {POOL, *self._known.caches.endpoints} <= included.keys()
        follower.resume(included, min(included.values()) if complete else BEGINNING, own())

    async def catch_up(self, follower: Follower, own: Callable[[], int]) -> None:
        """Take over what is newer than the gap that the follower found; to be called again and again while it has one.

        Raises:
            StoreError: the store does not answer.
        """
        missed, now = follower.missed, self._now()
        if missed is None or now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        if self._gap is None:
            self._since = now
        if missed != self._gap:
            self._gap, self._done = missed, set()
        heads = await self._store.snapshots(self._pool)
        newer = [name for name, at in heads.items() if name not in self._done and parse_feed_id(at) >= missed]
        included = await self._restore(follower, newer)
        if included:
            follower.resume(included, min(included.values()), own())
            self._done |= included.keys()
        if self._done >= {POOL, *self._known.caches.endpoints} or now - self._since >= _GIVE_UP_S:
            # Those that nobody has a newer snapshot of learn from the feed alone, as all others do.
            follower.missed = self._gap = None
            self._look_at = now + _REST_S

    async def _restore(self, follower: Follower, names: Collection[str]) -> dict[str, Key]:
        """Take over the snapshots of these names; returns the last entry that each includes."""
        included: dict[str, Key] = {}
        for name in names:
            snapshot = await self._store.snapshot(self._pool, name)
            if snapshot is None:
                continue
            key = parse_feed_id(snapshot.at)
            try:
                found = await asyncio.to_thread(snapshots.read, snapshot.parts)
                if isinstance(found, PoolLearnt):
                    follower.heard(key, found.numbers)
                await self._take_over(name, found, follower.then(key, self._now()))
                if isinstance(found, EndpointSnapshot) and found.exact:
                    follower.expect(name, key, found.exact.owner, found.exact.number)
            except (OtherVersionError, DamagedError) as error:
                self._refused(name, error)
            else:
                included[name] = key
                self._counts.restored += 1
        return included

    async def _take_over(self, name: str, found: EndpointSnapshot | PoolLearnt, then: float) -> None:
        if isinstance(found, PoolLearnt) or name == POOL:
            if not isinstance(found, PoolLearnt) or name != POOL:
                raise DamagedError("a snapshot is of something else")
            await in_slices(self._known.lengths.resume(found))
            self._known.conversations.resume(found.kept, then)
            return
        if found.learnt.endpoint != name or found.pieces != PIECES:
            raise DamagedError("a snapshot is of something else")
        caches = self._known.caches
        clock = caches.index.clock(name)
        entries = await asyncio.to_thread(entries_of, found.image, clock)
        await in_slices(caches.resume(found.learnt, found.image, entries, clock, then, found.exact))

    def _refused(self, name: str, error: StoreError) -> None:
        if isinstance(error, OtherVersionError):
            self._counts.other_version += 1
        else:
            self._counts.damaged += 1
        log.warning("a snapshot is left out", extra={"pool": self._pool, "endpoint": name, "error": str(error)})


async def in_slices(steps: Iterator[object]) -> None:
    """Go through all steps; others get a turn every half millisecond."""
    until = time.perf_counter() + _SLICE_S
    for _ in steps:
        if time.perf_counter() >= until:
            await asyncio.sleep(0)
            until = time.perf_counter() + _SLICE_S

"""Writes snapshots of what a pool's workers know, for those that join: one worker of the fleet writes each of them."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from extproc.errors import StoreError
from extproc.follower import Counts, Follower, as_id
from extproc.joining import in_slices
from extproc.state import snapshots
from extproc.state.blocktable import Words
from extproc.state.exact import Life
from extproc.state.exact_image import ExactImage, ExactRank, rank_of
from extproc.state.exact_table import Codes
from extproc.state.holder import PIECES
from extproc.state.image import image_of
from extproc.state.keys import parse_feed_id
from extproc.state.knowledge import PoolKnowledge
from extproc.state.snapshots import POOL, EndpointSnapshot
from extproc.state.store import Store

GROUP = "snapshots"
"""Whose work it is: see `Store.hold`."""
_LOOK_S = 5.0
_LEASE_MS = 15_000
_MOVED = 0.25
"""Part of the feed's window by which it has moved on when a snapshot is written again: who joins reads no more."""
_ANY = 1e-9
"""The same where there is none: the store may have lost it, and with it what the feed had."""
_APART_S = 30.0
_PAUSE_S = 0.1
_AT_A_TIME = 16
"""Snapshots that are written between two looks: the lease must not end meanwhile."""
_GONE_LOOKS = 12
"""Looks for which an endpoint is unknown before its snapshot is taken back."""

log = logging.getLogger(__name__)


class Saving:
    """Writes the snapshots of one pool that fall to one worker.

    Args:
        store: where they go.
        pool: pool name.
        known: what they are of.
        replica: this worker.
        follower: its reader of the pool's feed.
        counts: counted here.
        now: this worker's clock, in seconds.
    """

    def __init__(
        self,
        store: Store,
        pool: str,
        known: PoolKnowledge,
        replica: str,
        follower: Follower,
        counts: Counts,
        now: Callable[[], float],
    ) -> None:
        self._store = store
        self._pool = pool
        self._known = known
        self._replica = replica
        self._follower = follower
        self._counts = counts
        self._now = now
        self._written: dict[str, float] = {}
        self._unknown: dict[str, int] = {}

    async def run(self) -> None:
        """Look every few seconds until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.look()
            except StoreError as error:
                log.debug("no snapshots can be written", extra={"pool": self._pool, "error": str(error)})

    async def look(self) -> None:
        """Write what is due of what falls to this worker.

        One that is not caught up writes nothing, and leaves the work to others.

        Raises:
            StoreError: the store does not answer.
        """
        names = {POOL, *self._known.caches.endpoints} if self._follower.caught_up else set[str]()
        held = await self._store.hold(self._pool, GROUP, self._replica, sorted(names), _LEASE_MS)
        if not names or not held:
            return
        heads = await self._store.snapshots(self._pool)
        moved = {name: self._moved(heads.get(name, "0")) for name in held}
        now = self._now()
        due = [
            name
            for name in sorted(held, key=lambda each: -moved[each])
            if moved[name] >= (_MOVED if name in heads else _ANY)
            and now - self._written.get(name, -_APART_S) >= _APART_S
        ]
        for name in due[:_AT_A_TIME]:
            await self.write(name)
            await asyncio.sleep(_PAUSE_S)
        if POOL in held:
            await self._drop(heads.keys() - names)

    async def leave(self) -> None:
        """Leave the work to others at once.

        Raises:
            StoreError: the store does not answer.
        """
        await self._store.hold(self._pool, GROUP, self._replica, (), _LEASE_MS)

    async def write(self, name: str) -> None:
        """Write the snapshot of an endpoint, or of the pool.

        Decisions and deltas go on meanwhile: what they change is in the feed after the entry that the snapshot says it
        includes, and comes to the same when it is applied to what has it already.

        Raises:
            StoreError: the store does not answer.
        """
        at = as_id(self._follower.taken)
        if name == POOL:
            kept = self._known.conversations.learnt(self._now())
            learnt = self._known.lengths.learnt()
            learnt = msgspec.structs.replace(learnt, numbers=dict(self._follower.numbers), kept=kept)
            parts = await asyncio.to_thread(snapshots.of_pool, learnt)
        else:
            snapshot = await self._copy(name)
            if snapshot is None:
                return
            parts = await asyncio.to_thread(snapshots.of_endpoint, snapshot)
        await self._store.put_snapshot(self._pool, name, at, parts)
        self._written[name] = self._now()
        self._counts.written += 1

    async def _copy(self, name: str) -> EndpointSnapshot | None:
        """Copy what is known of an endpoint; None when its cache was emptied meanwhile."""
        caches = self._known.caches
        learnt, life = caches.learnt(name, self._now()), caches.of(name).life
        exact, lives = caches.exact.index, caches.exact.index.lives(name)
        owner, number = exact.owner(name), self._follower.numbers.get(exact.owner(name), 0)
        entries: list[tuple[Words, Words]] = []
        heads: list[Words] = []
        await in_slices(self._collected(name, entries, heads))
        clock = caches.index.clock(name)
        copied: list[tuple[Words, Sequence[Codes]]] = []
        await in_slices(_kept(exact.copy(lives), copied) if lives else iter(()))
        if caches.of(name).life != life:
            return None
        same = bool(lives) and exact.lives(name) == lives
        image, base = await asyncio.to_thread(image_of, entries, heads, clock, PIECES)
        marks = [(age_s, max(0, reading - base)) for age_s, reading in learnt.marks]
        learnt = msgspec.structs.replace(learnt, marks=marks)
        if not same:
            return EndpointSnapshot(learnt, image, PIECES)
        ranks = await asyncio.to_thread(_ranks_of, lives, copied)
        return EndpointSnapshot(learnt, image, PIECES, ExactImage(owner, number, ranks))

    def _collected(self, name: str, entries: list[tuple[Words, Words]], heads: list[Words]) -> Iterator[None]:
        for blocks, stamps, beginnings in self._known.caches.index.copy(name):
            if len(blocks):
                entries.append((blocks, stamps))
            if len(beginnings):
                heads.append(beginnings)
            yield

    def _moved(self, at: str) -> float:
        return self._follower.window.since(parse_feed_id(at))

    async def _drop(self, unknown: Collection[str]) -> None:
        """Take back the snapshots of endpoints that are unknown for a minute: pools change from worker to worker."""
        self._unknown = {name: self._unknown.get(name, 0) + 1 for name in unknown}
        gone = [name for name, looks in self._unknown.items() if looks >= _GONE_LOOKS]
        if gone:
            await self._store.drop_snapshots(self._pool, gone)


def _kept(steps: Iterator[tuple[Words, Sequence[Codes]]], kept: list[tuple[Words, Sequence[Codes]]]) -> Iterator[None]:
    for blocks, codes in steps:
        if len(blocks):
            kept.append((blocks, codes))
        yield


def _ranks_of(lives: Sequence[Life], copied: Sequence[tuple[Words, Sequence[Codes]]]) -> list[ExactRank]:
    return [
        rank_of(life.rank, life.block_tokens, [(blocks, codes[place]) for blocks, codes in copied])
        for place, life in enumerate(lives)
    ]

"""The feed of a `MemoryStore`, and the snapshots that who joins begins with."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from extproc.clock import Clock
from extproc.state.keys import parse_feed_id
from extproc.state.store import READ_LIMIT
from extproc.state.values import FeedEntry, Snapshot


class _Feed:
    """Entries of one pool, oldest first."""

    def __init__(self) -> None:
        self.entries: deque[tuple[tuple[int, int], FeedEntry]] = deque()
        self.last_id = (0, 0)
        self.grown = asyncio.Event()

    def newer(self, seen: tuple[int, int]) -> list[FeedEntry]:
        """The oldest entries of the feed after the id `seen`; of all, when the feed never came as far as that."""
        seen = seen if seen <= self.last_id else (0, 0)
        return list(islice((entry for key, entry in self.entries if key > seen), READ_LIMIT))


class MemoryFeed:
    """Feeds of all pools; entries are dated by `clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._feeds: defaultdict[str, _Feed] = defaultdict(_Feed)
        self._snapshots: defaultdict[str, dict[str, Snapshot]] = defaultdict(dict)

    async def append(self, pool: str, payload: bytes, cap: int) -> str:
        """See `Store.append`. Ids have the form of a Redis stream's, so that a reader can change stores."""
        feed, wall_ms = self._feeds[pool], int(self._clock.wall() * 1000)
        last_ms, last_seq = feed.last_id
        feed.last_id = key = (wall_ms, 0) if wall_ms > last_ms else (last_ms, last_seq + 1)
        entry = FeedEntry(f"{key[0]}-{key[1]}", payload)
        feed.entries.append((key, entry))
        while len(feed.entries) > cap:
            feed.entries.popleft()
        feed.grown.set()
        feed.grown = asyncio.Event()
        return entry.id

    async def read(self, pool: str, after: str, wait_ms: int) -> Sequence[FeedEntry]:
        """See `Store.read`; the wait is real time, whatever the clock. Raises ValueError for an id of another form."""
        feed, seen = self._feeds[pool], parse_feed_id(after)
        newer = feed.newer(seen)
        if newer or wait_ms <= 0:
            return newer
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await feed.grown.wait()
        except TimeoutError:
            return []
        return feed.newer(seen)

    async def put_snapshot(self, pool: str, name: str, at: str, parts: Sequence[bytes]) -> None:
        """See `Store.put_snapshot`."""
        self._snapshots[pool][name] = Snapshot(at, tuple(parts))

    async def snapshots(self, pool: str) -> Mapping[str, str]:
        """See `Store.snapshots`."""
        return {name: snapshot.at for name, snapshot in self._snapshots[pool].items()}

    async def snapshot(self, pool: str, name: str) -> Snapshot | None:
        """See `Store.snapshot`."""
        return self._snapshots[pool].get(name)

    async def drop_snapshots(self, pool: str, names: Collection[str]) -> None:
        """See `Store.drop_snapshots`."""
        for name in names:
            self._snapshots[pool].pop(name, None)

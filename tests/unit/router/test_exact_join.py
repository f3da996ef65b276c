"""Exact profiles of workers that join, or that missed something: what the engine told, or nothing."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence

import pytest

from extproc import joining
from extproc.clock import ManualClock
from extproc.follower import Counts, Follower
from extproc.gossip import Gossip
from extproc.state import feed, snapshots
from extproc.state.feed import Cached, Delta, Evicted, Exact, pack
from extproc.state.keys import parse_feed_id
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from extproc.state.values import FeedEntry
from extproc.state.window import Window
from tests.unit.state.exact_parts import contents
from tests.waiting import until

CAP = 40
SPREAD = 0x9E3779B97F4A7C15


def blocks(*numbers: int) -> bytes:
    """Blocks by number, spread as hashes are."""
    return pack([number * SPREAD % 2**64 for number in numbers])


class Worker:
    """One worker's part in the feed of pool `main`."""

    def __init__(self, store: MemoryStore, name: str, clock: ManualClock) -> None:
        self.store = store
        self.known = PoolKnowledge(Priors())
        self.gossip = Gossip(store, {"main": self.known}, name, CAP, now=clock.monotonic)
        self.follower = self.gossip._pools["main"].follower

    async def read(self) -> None:
        """Read the feed to its end."""
        await until(lambda: self.follower.taken == self.store._feeds["main"].last_id)

    async def save(self) -> None:
        """Write the snapshots that are due."""
        await self.gossip._pools["main"].saving.look()

    def depth(self, endpoint: str, *numbers: int) -> int | None:
        """Leading blocks of a prompt; None when the exact profile says nothing."""
        chain = [number * SPREAD % 2**64 for number in numbers]
        found = self.known.caches.exact.matches({16: chain}, 16 * len(chain) + 1, (1.0, 1.0))
        return found[endpoint].blocks if endpoint in found else None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the feed."""
        task = asyncio.create_task(self.gossip.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class Keeper:
    """Tells what engines told it, in numbered batches."""

    def __init__(self, store: MemoryStore, name: str = "k-kv") -> None:
        self.number = 0
        self._store = store
        self._name = name

    async def tell(self, *deltas: Delta) -> None:
        """One batch."""
        self.number += 1
        await self._store.append("main", feed.encode(self._name, deltas, self.number), CAP)

    async def tell_at_random(self, rng: random.Random, batches: int, endpoints: Sequence[str]) -> None:
        """Stores, evictions and now and then a new beginning."""
        for _ in range(batches):
            name, rank = rng.choice(endpoints), rng.randrange(2)
            some = [rng.randrange(1, 400) for _ in range(rng.randrange(1, 50))]
            kinds: list[Delta] = [
                Cached(name, rank, rng.randrange(3), blocks(*some)),
                Cached(name, rank, 0, blocks(*some)),
                Evicted(name, rank, rng.randrange(-1, 3), blocks(*some)),
                Exact(name, rank, 16),
            ]
            await self.tell(*rng.choices(kinds, [4, 4, 4, 0.2], k=3))
            await asyncio.sleep(0.002)  # those that follow must not lag behind by a whole feed


@pytest.fixture
def clock() -> ManualClock:
    """One clock for store and workers."""
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    """What the workers share."""
    return MemoryStore(clock)


def drop(store: MemoryStore, count: int = 1) -> None:
    """The newest entries are lost before anybody read them."""
    for _ in range(count):
        store._feeds["main"].entries.pop()


@pytest.mark.parametrize("seed", range(4))
async def test_who_joins_knows_what_others_heard(store: MemoryStore, clock: ManualClock, seed: int) -> None:
    """Snapshot and feed together are what who heard everything knows: every block of every rank, in its tiers.

    The snapshots are written while the keeper goes on telling.
    """
    rng = random.Random(seed)
    keeper, old, new = Keeper(store), Worker(store, "old", clock), Worker(store, "new", clock)
    async with old.running():
        await until(lambda: old.follower.caught_up)
        await keeper.tell(*[Exact(name, rank, 16) for name in "abc" for rank in (0, 1)])
        await keeper.tell_at_random(rng, 3 * CAP, "abc")
        await old.read()
        clock.advance(60.0)
        saving = asyncio.create_task(old.save())
        for _ in range(CAP // 2):
            await keeper.tell_at_random(rng, 1, "abc")
            await asyncio.sleep(0.01)
        await saving
        assert {"a", "b", "c"} <= set(await store.snapshots("main"))
        await keeper.tell_at_random(rng, 5, "abc")
        async with new.running():
            assert await new.gossip.caught_up(60.0)
            await asyncio.gather(old.read(), new.read())
            for name in "abc":
                assert contents(new.known.caches.exact.index, name) == contents(old.known.caches.exact.index, name)
                assert new.known.caches.exact.index.is_on(name)
        await keeper.tell(Cached("a", 0, 0, blocks(1)))


async def test_who_joins_without_a_snapshot_waits_for_the_next_beginning(
    store: MemoryStore, clock: ManualClock
) -> None:
    """The feed has lost how the profile began: half a profile would lie."""
    keeper, new = Keeper(store), Worker(store, "new", clock)
    await keeper.tell(Exact("a", 0, 16), Cached("a", 0, 0, blocks(1, 2)))
    for _ in range(CAP):
        await keeper.tell(Cached("a", 0, 0, blocks(3)))
    async with new.running():
        await new.read()
        assert new.depth("a", 1, 2, 3) is None
        await keeper.tell(Exact("a", 0, 16), Cached("a", 0, 0, blocks(1)))
        await new.read()
        assert new.depth("a", 1, 2, 3) == 1


async def test_a_gap_ends_what_its_sender_told(store: MemoryStore, clock: ManualClock) -> None:
    """An eviction may be among what was missed. What other keepers tell is not touched, nor is what begins after."""
    one, two, worker = Keeper(store, "one-kv"), Keeper(store, "two-kv"), Worker(store, "w", clock)
    async with worker.running():
        for keeper, names in ((one, "ab"), (two, "c")):
            await keeper.tell(*[Exact(name, 0, 16) for name in names])
            await keeper.tell(*[Cached(name, 0, 0, blocks(1, 2)) for name in names])
        await worker.read()
        assert [worker.depth(name, 1, 2) for name in "abc"] == [2, 2, 2]
        one.number += 1
        await one.tell(Cached("a", 0, 0, blocks(3)))
        await worker.read()
        assert [worker.depth(name, 1, 2) for name in "abc"] == [None, None, 2]
        await one.tell(Exact("b", 0, 16), Cached("b", 0, 0, blocks(1)))
        await worker.read()
        assert [worker.depth(name, 1, 2) for name in "abc"] == [None, 1, 2]
    assert worker.gossip.counts.gaps == 1


async def test_a_snapshot_mends_a_gap(store: MemoryStore, clock: ManualClock) -> None:
    """Written by one who heard what this worker missed, and later than that: the profile is on again, and true."""
    keeper, whole, other = Keeper(store), Worker(store, "whole", clock), Worker(store, "other", clock)
    async with other.running(), whole.running():
        await until(lambda: other.follower.caught_up and whole.follower.caught_up)
        await keeper.tell(Exact("a", 0, 16), Cached("a", 0, 0, blocks(1, 2)))
        await asyncio.gather(other.read(), whole.read())
        # The other worker's connection loses one entry.
        other.follower._numbers["k-kv"] -= 1
        await keeper.tell(Cached("a", 0, 0, blocks(3)))
        await other.read()
        assert other.depth("a", 1, 2, 3) is None
        for number in range(CAP):
            await keeper.tell(Cached("a", 0, 1, blocks(100 + number)))
        clock.advance(60.0)
        await whole.read()
        await whole.save()
        assert "a" in await store.snapshots("main")
        # Who missed something looks for snapshots every few seconds.
        clock.advance(60.0)
        await keeper.tell(Evicted("a", 0, 0, blocks(3)))
        await until(lambda: other.depth("a", 1, 2, 3) is not None)
        await asyncio.gather(other.read(), whole.read())
        assert contents(other.known.caches.exact.index, "a") == contents(whole.known.caches.exact.index, "a")
        assert other.depth("a", 1, 2, 3) == 2


async def test_a_snapshot_that_the_feed_does_not_continue_is_of_no_use(store: MemoryStore, clock: ManualClock) -> None:
    """What was told right after it is cut off already: the profile is not on before it begins again."""
    keeper, old, new = Keeper(store), Worker(store, "old", clock), Worker(store, "new", clock)
    async with old.running():
        await until(lambda: old.follower.caught_up)
        await keeper.tell(Exact("a", 0, 16), Cached("a", 0, 0, blocks(1, 2)))
        for _ in range(CAP):
            await keeper.tell(Cached("a", 0, 0, blocks(3)))
        clock.advance(60.0)
        await old.read()
        await old.save()
        assert "a" in await store.snapshots("main")
    for _ in range(2 * CAP):
        await keeper.tell(Evicted("a", 0, 0, blocks(1)))
    async with new.running():
        await new.read()
        assert new.depth("a", 1, 2, 3) is None


async def test_an_endpoint_without_an_exact_profile_is_told_so(store: MemoryStore, clock: ManualClock) -> None:
    """A snapshot of one whose profile ended turns nothing on, and leaves on what the reader knows better."""
    keeper, old, new = Keeper(store), Worker(store, "old", clock), Worker(store, "new", clock)
    async with old.running():
        await until(lambda: old.follower.caught_up)
        await keeper.tell(Exact("a", 0, 16), Exact("a", 1, 16), Cached("a", 0, 0, blocks(1)), Exact("a", 1, 0))
        for _ in range(CAP):
            await keeper.tell(Cached("a", 0, 0, blocks(3)))
        clock.advance(60.0)
        await old.read()
        await old.save()
        async with new.running():
            await new.read()
            assert new.gossip.counts.restored > 0
            assert new.depth("a", 1) is None


async def test_a_long_event_does_not_hold_decisions_up(store: MemoryStore, clock: ManualClock) -> None:
    """One of many blocks is taken in piece by piece; a snapshot that is written meanwhile does not claim to have it."""
    keeper, worker, new = Keeper(store), Worker(store, "w", clock), Worker(store, "new", clock)
    async with worker.running():
        await keeper.tell(Exact("a", 0, 16))
        await worker.read()
        began = worker.follower.taken
        await keeper.tell(Cached("a", 0, 0, blocks(*range(1, 20_001))))
        index = worker.known.caches.exact.index
        seen = set[int]()
        saving: asyncio.Task[None] | None = None
        while (held := index.held("a")) < 20_000:
            seen.add(held)
            if held > 0:
                assert worker.follower.taken < worker.follower.frontier
                assert worker.follower.numbers["k-kv"] == 1
                saving = saving or asyncio.create_task(worker.gossip._pools["main"].saving.write("a"))
            await asyncio.sleep(0)
        assert saving is not None
        await saving
        await worker.read()
        assert worker.follower.numbers["k-kv"] == 2
        assert parse_feed_id((await store.snapshots("main"))["a"]) == began
        async with new.running():
            await new.read()
            assert contents(new.known.caches.exact.index, "a") == contents(index, "a")
    assert len(seen) > 3


async def test_a_profile_that_ends_while_it_is_copied_is_not_written(
    store: MemoryStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a copy would be taken for all that the endpoint holds."""
    monkeypatch.setattr(joining, "_SLICE_S", 0.0)
    keeper, worker = Keeper(store), Worker(store, "w", clock)
    async with worker.running():
        await keeper.tell(Exact("a", 0, 16), Cached("a", 0, 0, blocks(*range(1, 40_001))))
        await worker.read()
        index = worker.known.caches.exact.index
        saving = asyncio.create_task(worker.gossip._pools["main"].saving.write("a"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert index.table._sets.readers == 1
        index.begin("a", 0, 16, "k-kv")
        await saving
    snapshot = await store.snapshot("main", "a")
    assert snapshot is not None
    found = snapshots.read(snapshot.parts)
    assert isinstance(found, snapshots.EndpointSnapshot)
    assert found.exact is None


@pytest.mark.parametrize(("first", "on"), [(4, True), (6, True), (7, False)])
def test_what_follows_a_snapshot_must_be_the_next_batch(first: int, on: bool) -> None:
    """Of the one who told the profile, after the entry that the snapshot includes; one that came twice says nothing."""
    known = PoolKnowledge(Priors())
    index = known.caches.exact.index
    index.begin("a", 0, 16, "k-kv")
    follower = Follower(known, "me", Window(100, 10**6), Counts(), lambda _: None)
    follower.expect("a", (1000, 0), "k-kv", 5)
    for at, origin, number in ((999, "k-kv", 3), (1001, "other", 70), (1002, "k-kv", first)):
        for _ in follower.take(FeedEntry(f"{at}-0", feed.encode(origin, (), number)), 0.0):
            pass
        if at < 1002:
            assert index.is_on("a")
            follower._numbers.clear()
    assert index.is_on("a") == on

"""A worker that joins, or that missed something: from snapshots, then the feed."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Collection

import msgspec
import pytest

from extproc.clock import ManualClock
from extproc.errors import StoreError
from extproc.gossip import Gossip
from extproc.saving import GROUP
from extproc.state import feed, snapshots
from extproc.state.feed import Answered, Held, Measured, Turned
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from extproc.state.snapshots import POOL
from extproc.state.trouble import StoreDeadlineError
from tests.waiting import PATIENCE_S, until

CAP = 40


class Worker:
    """One worker's part in the feed of pool `main`, over a shared memory store."""

    def __init__(self, store: MemoryStore, name: str, clock: ManualClock, kv_tokens: int = 64_000) -> None:
        self.store = store
        self.known = PoolKnowledge(Priors(kv_tokens=kv_tokens))
        self.gossip = Gossip(store, {"main": self.known}, name, CAP, now=clock.monotonic)
        self._charges = 0

    async def decide(self, endpoint: str, *blocks: int) -> None:
        """A decision, told to the others at once."""
        self._charges += 1
        for delta in self.known.decided(f"c{self._charges}", endpoint, blocks):
            self.gossip.publish("main", delta)
        await self.gossip.flush()

    async def save(self) -> None:
        """Read the feed to its end, then write the snapshots that are due."""
        feed_of = self.store._feeds["main"]
        await until(lambda: self.gossip._pools["main"].follower.frontier == feed_of.last_id)
        await self.gossip._pools["main"].saving.look()

    @property
    def caught_up(self) -> bool:
        """Whether it knows of nothing that it lacks."""
        return self.gossip._pools["main"].follower.caught_up

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the feed."""
        task = asyncio.create_task(self.gossip.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def clock() -> ManualClock:
    """One clock for store and workers."""
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    """What the workers share."""
    return MemoryStore(clock)


async def grown(worker: Worker, clock: ManualClock, decisions: int = 3 * CAP) -> None:
    """Decide more than the feed keeps; two endpoints share the prompts, one keeps the beginnings of all."""
    for number in range(1, decisions + 1):
        clock.advance(0.01)
        await worker.decide("a" if number % 2 else "b", *range(100 * number, 100 * number + 5))
        await worker.decide("c", 100 * number)


async def test_decisions_go_on_while_a_long_feed_is_read() -> None:
    """The event loop gets a turn between entries: a worker is asked before it knows everything."""
    store = MemoryStore(ManualClock())
    for number in range(300):
        await store.append("main", feed.encode("other", [Held("a", feed.pack([number]))]), 1000)
    known = PoolKnowledge(Priors())
    following = asyncio.create_task(Gossip(store, {"main": known}, "r1", 1000).run())
    turns = 0
    while known.held("a") < 300:
        before = known.held("a")
        await asyncio.sleep(0)
        turns += known.held("a") > before
    assert turns > 100
    await until(lambda: known.held("a") == 300)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_who_joins_knows_what_the_feed_has_long_forgotten(store: MemoryStore, clock: ManualClock) -> None:
    """Snapshots and the rest of the feed together are what the others know: the same matches, for every prompt."""
    old, new = Worker(store, "old", clock), Worker(store, "new", clock)
    async with old.running():
        await until(lambda: old.caught_up)
        await grown(old, clock)
        await until(lambda: len(store._feeds["main"].entries) == CAP)
        await old.save()
        assert set(await store.snapshots("main")) == {POOL, "a", "b", "c"}
        await grown(old, clock, 5)
        async with new.running():
            assert await new.gossip.caught_up(60.0)
            for number in range(1, 3 * CAP + 1):
                prompt = range(100 * number, 100 * number + 5)
                assert new.known.matched_tokens(prompt) == old.known.matched_tokens(prompt)
    assert new.gossip.counts.restored == 4


async def test_what_was_learnt_comes_along(store: MemoryStore, clock: ManualClock) -> None:
    """Speeds, the believed size of the cache, lengths and answered turns: who joins does not begin from the prior."""
    old, new = Worker(store, "old", clock), Worker(store, "new", clock)
    async with old.running():
        await until(lambda: old.caught_up)
        old.known.engine_seen("a", 640, 77.0)
        old.known.engine_seen("b", 640, 77.0)
        for number in range(64):
            old.gossip.learn("main", Answered(f"c{number}", "a", 4000, 1.0, 5000, 1000, output_tokens=30))
        old.gossip.learn("main", Measured(feed.pack([1, 2]), 6.0, 40.0))
        old.gossip.learn("main", Turned(b"t", "a", 128.0, 9.0, 77.0))
        old.known.caches.of("a").share.told(0.5)
        await grown(old, clock)
        await old.save()
        async with new.running():
            assert await new.gossip.caught_up(60.0)
    assert new.known.rate("a") == pytest.approx(old.known.rate("a")) == 4000.0
    assert new.known.overhead_s("a") == old.known.overhead_s("a")
    assert new.known.queue_tokens("a", 1) == old.known.queue_tokens("a", 1) > 0
    assert new.known.bytes_per_token == pytest.approx(old.known.bytes_per_token)
    assert new.known.bytes_per_token_of([1, 2]) == pytest.approx(6.0)
    assert new.known.expected_output([], None) == pytest.approx(old.known.expected_output([], None))
    assert new.known.continued(b"t") == old.known.continued(b"t")
    assert new.known.capacity("a") == old.known.capacity("a")


async def test_who_joins_ages_profiles_as_the_others(store: MemoryStore, clock: ManualClock) -> None:
    """What nothing used for its time to live goes everywhere at the same time, whoever joined when."""
    old, new = Worker(store, "old", clock), Worker(store, "new", clock)
    async with old.running():
        await until(lambda: old.caught_up)
        for _ in range(10):
            old.known.age(clock.monotonic(), ttl_s=100.0)
            await old.decide("a", *range(int(clock.monotonic()) * 100, int(clock.monotonic()) * 100 + 3))
            clock.advance(10.0)
        await grown(old, clock)
        await old.save()
        clock.advance(5.0)
        async with new.running():
            assert await new.gossip.caught_up(60.0)
            for _ in range(12):
                for worker in (old, new):
                    worker.known.age(clock.monotonic(), ttl_s=100.0)
                assert new.known.held("a") == pytest.approx(old.known.held("a"), abs=6)
                clock.advance(10.0)
    assert new.known.held("a") == 0


async def test_a_restart_of_the_engine_in_between_leaves_nothing(store: MemoryStore, clock: ManualClock) -> None:
    """The snapshot is of an earlier life of the engine than its page tells of: its cache is empty."""
    old, new = Worker(store, "old", clock), Worker(store, "new", clock)
    async with old.running():
        await until(lambda: old.caught_up)
        old.known.engine_seen("a", 0, 100.0)
        await grown(old, clock)
        await old.save()
        new.known.engine_seen("a", 0, 200.0)
        async with new.running():
            assert await new.gossip.caught_up(60.0)
    assert (new.known.held("a"), new.known.held("b") > 0) == (0, True)


async def test_an_endpoint_without_a_snapshot_is_learnt_from_the_feed(store: MemoryStore, clock: ManualClock) -> None:
    """One whose snapshot is missing, or of another version, is read of from the oldest entry that is kept."""
    old, new = Worker(store, "old", clock), Worker(store, "new", clock)
    async with old.running():
        await until(lambda: old.caught_up)
        await grown(old, clock, 15)
        await old.save()
        at = (await store.snapshots("main"))["a"]
        await store.put_snapshot("main", "a", at, [msgspec.msgpack.encode([snapshots.VERSION + 1, "new"])])
        await store.put_snapshot("main", "b", at, [b"nonsense"])
        for name in "abc":
            new.known.engine_seen(name, 0, 0.0)
        async with new.running():
            assert await new.gossip.caught_up(60.0)
    assert (new.gossip.counts.other_version, new.gossip.counts.damaged) == (1, 1)
    assert [new.known.held(name) for name in "abc"] == [old.known.held(name) for name in "abc"]


async def test_a_gap_is_caught_up_from_newer_snapshots(store: MemoryStore, clock: ManualClock) -> None:
    """A worker that stood still while the feed was trimmed: what it missed comes with the next snapshots."""
    old, slow = Worker(store, "old", clock), Worker(store, "slow", clock)
    async with old.running():
        await until(lambda: old.caught_up)
        async with slow.running():
            await slow.gossip.caught_up(60.0)
            await old.decide("a", 1, 2)
            await until(lambda: slow.known.held("a") == 2)
        await stand_still(slow, old, clock)
        pool = slow.gossip._pools["main"]
        assert pool.follower.missed
        assert slow.gossip.counts.gaps == 1
        await old.save()
        await pool.joining.catch_up(pool.follower, lambda: pool.outbox.number + 2)
        assert slow.caught_up
        for entry in await store.read("main", pool.follower.after, 0):
            deque(pool.follower.take(entry, clock.monotonic()), 0)
        for number in range(1, 3 * CAP + 1):
            prompt = range(100 * number, 100 * number + 5)
            assert slow.known.matched_tokens(prompt) == old.known.matched_tokens(prompt)


async def stand_still(slow: Worker, old: Worker, clock: ManualClock) -> None:
    """Let the feed move on by more than it keeps, then read what is left of it."""
    await grown(old, clock)
    pool = slow.gossip._pools["main"]
    while entries := await slow.store.read("main", pool.follower.after, 0):
        for entry in entries:
            deque(pool.follower.take(entry, clock.monotonic()), 0)


async def test_what_nobody_has_is_given_up(store: MemoryStore, clock: ManualClock) -> None:
    """Entries that all missed are in no snapshot: after a while the worker goes on without, and writes for others."""
    old, slow = Worker(store, "old", clock), Worker(store, "slow", clock)
    async with slow.running():
        await slow.gossip.caught_up(60.0)
    await grown(old, clock)
    await stand_still(slow, old, clock)
    pool = slow.gossip._pools["main"]
    pool.follower.missed = pool.follower.cursor
    for _ in range(40):
        await pool.joining.catch_up(pool.follower, lambda: 0)
        clock.advance(5.0)
    assert slow.caught_up


async def test_snapshots_from_before_a_gap_are_left_alone(store: MemoryStore, clock: ManualClock) -> None:
    """They lack what was missed too, and would undo what was learnt since."""
    old, slow = Worker(store, "old", clock), Worker(store, "slow", clock)
    async with old.running():
        await until(lambda: old.caught_up)
        await grown(old, clock, 15)
        await old.save()
        async with slow.running():
            await slow.gossip.caught_up(60.0)
        restored = slow.gossip.counts.restored
        await stand_still(slow, old, clock)
        pool = slow.gossip._pools["main"]
        assert pool.follower.missed
        await pool.joining.catch_up(pool.follower, lambda: 0)
        assert pool.follower.missed
        assert slow.gossip.counts.restored == restored


class Gone(MemoryStore):
    """A store that does not answer while told so."""

    gone: StoreError | None = None

    async def append(self, pool: str, payload: bytes, cap: int) -> str:
        """See `Store.append`."""
        if self.gone:
            raise self.gone
        return await super().append(pool, payload, cap)


async def test_without_a_store_nobody_waits(clock: ManualClock) -> None:
    """A worker whose store does not answer is as ready as it can be; when that returns, it joins by itself."""
    store = Gone(clock)
    store.gone = StoreError("gone")
    worker = Worker(store, "r1", clock)
    async with worker.running(), asyncio.timeout(PATIENCE_S):
        assert not await worker.gossip.caught_up(100 * PATIENCE_S)
        await worker.decide("a", 1, 2)
        store.gone = None
        await until(lambda: worker.caught_up)
    assert worker.known.held("a") == 2


async def test_a_store_that_is_slow_is_worth_the_wait(clock: ManualClock) -> None:
    """One missed deadline is no reason to serve without what the others know: it is asked again."""
    store = Gone(clock)
    store.gone = StoreDeadlineError("slow")
    worker = Worker(store, "r1", clock)
    async with worker.running():
        waiting = asyncio.create_task(worker.gossip.caught_up(100 * PATIENCE_S))
        await asyncio.sleep(0.1)
        store.gone = None
        async with asyncio.timeout(PATIENCE_S):
            assert await waiting


async def test_waiting_ends(clock: ManualClock) -> None:
    """A worker that never catches up gets ready all the same."""
    worker = Worker(MemoryStore(clock), "r1", clock)
    assert not await worker.gossip.caught_up(0.01)


class TestSaving:
    """Who writes snapshots, and when."""

    async def test_a_worker_that_is_not_caught_up_writes_none(self, store: MemoryStore, clock: ManualClock) -> None:
        """What it lacks must not become what others join with: the work falls to those that have it."""
        old, new = Worker(store, "old", clock), Worker(store, "new", clock)
        async with old.running():
            await until(lambda: old.caught_up)
            await grown(old, clock)
            await new.gossip._pools["main"].saving.look()
            assert await store.snapshots("main") == {}
            await old.save()
            assert POOL in await store.snapshots("main")

    async def test_what_a_store_lost_is_written_again(self, store: MemoryStore, clock: ManualClock) -> None:
        """A young fleet's feed has hardly moved on when its store is emptied: who joins then needs snapshots."""
        old, new = Worker(store, "old", clock), Worker(store, "new", clock)
        async with old.running():
            await until(lambda: old.caught_up)
            await grown(old, clock, 2)
            await old.save()
            clock.advance(60.0)
            store._feeds["main"].entries.clear()
            store._snapshots.clear()
            await old.gossip._pools["main"].saving.look()
            async with new.running():
                assert await new.gossip.caught_up(60.0)
                assert [new.known.held(name) for name in "abc"] == [old.known.held(name) for name in "abc"] == [5, 5, 2]

    async def test_one_worker_writes_each(self, store: MemoryStore, clock: ManualClock) -> None:
        """Names are shared out by the store: what another one holds is not written twice."""
        old = Worker(store, "old", clock)
        async with old.running():
            await until(lambda: old.caught_up)
            await grown(old, clock)
            taken = set(await store.hold("main", GROUP, "other", ["a"], 60_000))
            await old.save()
            assert set(await store.snapshots("main")) == {POOL, "a", "b", "c"} - taken

    async def test_a_quiet_pool_is_not_written_again(self, store: MemoryStore, clock: ManualClock) -> None:
        """Only when the feed has moved on, by a quarter of what it keeps, and not twice within half a minute."""
        old = Worker(store, "old", clock)
        async with old.running():
            await until(lambda: old.caught_up)
            await grown(old, clock)
            await old.save()
            written = old.gossip.counts.written
            clock.advance(60.0)
            await old.save()
            await grown(old, clock, 2)
            await old.save()
            assert old.gossip.counts.written == written == 4
            await grown(old, clock)
            await old.save()
            assert old.gossip.counts.written == 2 * written
            await grown(old, clock)
            await old.save()
            assert old.gossip.counts.written == 2 * written

    async def test_snapshots_of_endpoints_that_left_are_taken_back(self, clock: ManualClock) -> None:
        """After a minute in which the endpoint is unknown; one that comes back before keeps its own."""
        store = MemoryStore(clock)
        old = Worker(store, "old", clock)
        async with old.running():
            await until(lambda: old.caught_up)
            await grown(old, clock)
            await old.save()
            old.known.retain(["a", "b"])
            for _ in range(11):
                await old.save()
            assert "c" in await store.snapshots("main")
            await old.save()
            assert set(await store.snapshots("main")) == {POOL, "a", "b"}

    async def test_an_engine_that_restarts_meanwhile_gets_no_snapshot(self, clock: ManualClock) -> None:
        """Half a profile of the life before must not be shown as one of the life after."""
        store = MemoryStore(clock)
        old = Worker(store, "old", clock, kv_tokens=10**8)
        async with old.running():
            await until(lambda: old.caught_up)
            await old.decide("a", *range(1, 300_000))
            writing = asyncio.create_task(old.gossip._pools["main"].saving.write("a"))
            await asyncio.sleep(0)
            old.known.engine_seen("a", 0, 5.0)
            old.known.engine_seen("a", 0, 6.0)
            await writing
        assert await store.snapshots("main") == {}


async def test_leaving_hands_the_work_on(store: MemoryStore, clock: ManualClock) -> None:
    """A worker that stops gives its snapshots up at once: the next one need not wait for its lease to end."""
    old = Worker(store, "old", clock)
    async with old.running():
        await until(lambda: old.caught_up)
        await grown(old, clock, 5)
        await old.save()
    assert list(await store.hold("main", GROUP, "other", ["a"], 1000)) == []
    await old.gossip.leave()
    held: Collection[str] = await store.hold("main", GROUP, "other", ["a"], 1000)
    assert list(held) == ["a"]

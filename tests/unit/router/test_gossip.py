"""Deltas between replicas, over the memory store."""

import asyncio
import os
from collections.abc import Callable

from extproc.clock import ManualClock
from extproc.errors import StoreError
from extproc.gossip import Gossip
from extproc.outbox import ENTRY_BYTES
from extproc.state import feed
from extproc.state.feed import Answered, Held
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from extproc.state.store import READ_LIMIT
from tests.waiting import PATIENCE_S, until


def replica(store: MemoryStore, name: str) -> tuple[Gossip, PoolKnowledge]:
    """One replica's gossip and knowledge."""
    knowledge = PoolKnowledge(Priors())
    return Gossip(store, {"main": knowledge}, name, cap=1000), knowledge


async def test_what_one_replica_holds_the_others_learn() -> None:
    """A decision of one replica is matched by another, and by one that joins later."""
    store = MemoryStore(ManualClock())
    (first, known), (second, also_known) = replica(store, "r1"), replica(store, "r2")
    running = [asyncio.create_task(gossip.run()) for gossip in (first, second)]
    for delta in known.decided("c1", "a", [1, 2, 3]):
        first.publish("main", delta)
    await until(lambda: also_known.held("a") == 3)
    late, late_known = replica(store, "r3")
    running.append(asyncio.create_task(late.run()))
    await until(lambda: late_known.held("a") == 3)
    assert also_known.matched_tokens([1, 2, 9]) == {"a": 2 * 64.0}
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_the_owner_of_a_charge_corrects_the_profile_everywhere() -> None:
    """The access log reached r2, r1 decided: r1 drops the blocks that were never prefilled and says so."""
    store = MemoryStore(ManualClock())
    (first, known), (second, also_known) = replica(store, "r1"), replica(store, "r2")
    running = [asyncio.create_task(gossip.run()) for gossip in (first, second)]
    for delta in known.decided("c1", "a", [1, 2, 3]):
        first.publish("main", delta)
    await until(lambda: also_known.held("a") == 3)
    second.learn("main", Answered("c1", "b", -1, -1, -1, -1))
    await until(lambda: known.held("b") == 3 and also_known.held("b") == 3 and also_known.held("a") == 0)
    assert known.held("a") == 0
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_entries_of_another_version_are_skipped_and_counted() -> None:
    """A newer replica's batches do no harm: they are passed over, later ones of our version are used."""
    store = MemoryStore(ManualClock())
    await store.append("main", b"\x93\x63\xa2r9\x90", 100)
    await store.append("main", b"nonsense", 100)
    await store.append("main", feed.encode("r9", [Held("a", feed.pack([1]))]), 100)
    gossip, known = replica(store, "r1")
    task = asyncio.create_task(gossip.run())
    await until(lambda: known.held("a") == 1)
    assert gossip.counts.other_version + gossip.counts.damaged == 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Refusing(MemoryStore):
    """A memory store that refuses appends while told to, as Redis does when it is full."""

    refusing = True

    async def append(self, pool: str, payload: bytes, cap: int) -> str:
        """Refuse, or take."""
        if self.refusing:
            raise StoreError("full")
        return await super().append(pool, payload, cap)


async def test_what_the_store_refuses_is_sent_later_in_order() -> None:
    """Deltas wait for the store to come back; none is lost and none overtakes another."""
    store = Refusing(ManualClock())
    gossip, _ = replica(store, "r1")
    for number in range(3):
        gossip.publish("main", Held(f"e{number}", b""))
        await gossip.flush()
    store.refusing = False
    await gossip.flush()
    entries = await store.read("main", "0", 0)
    deltas = [delta for entry in entries for delta in feed.decode(entry.payload).deltas]
    held = [delta.endpoint for delta in deltas if isinstance(delta, Held)]
    assert held == ["e0", "e1", "e2"]
    assert gossip.counts.lost == 0


async def test_the_queue_is_bounded_while_the_store_is_gone() -> None:
    """An hour without a store costs bounded memory, and what was given up is counted."""
    store = Refusing(ManualClock())
    gossip, _ = replica(store, "r1")
    for number in range(25_000):
        gossip.publish("main", Held("e", b""))
        if number % 5000 == 0:
            await gossip.flush()
    assert gossip.counts.lost == 15_000


async def test_what_piled_up_leaves_in_entries_of_bounded_size() -> None:
    """After an outage no entry is larger than readers apply in one go, and all deltas arrive in their order."""
    store = Refusing(ManualClock())
    gossip, _ = replica(store, "r1")
    for number in range(500):
        gossip.publish("main", Held(f"e{number}", bytes(4096)))
    await gossip.flush()
    store.refusing = False
    await gossip.flush()
    entries = await store.read("main", "0", 0)
    assert max(len(entry.payload) for entry in entries) <= ENTRY_BYTES
    deltas = [delta for entry in entries for delta in feed.decode(entry.payload).deltas]
    assert [delta.endpoint for delta in deltas if isinstance(delta, Held)] == [f"e{number}" for number in range(500)]


async def test_a_delta_larger_than_an_entry_is_sent_alone() -> None:
    """A prompt of many megabytes still reaches the other replicas, and holds up nothing behind it."""
    store = MemoryStore(ManualClock())
    gossip, _ = replica(store, "r1")
    for size in (8, 2 * ENTRY_BYTES, 8):
        gossip.publish("main", Held("e", bytes(size)))
    await gossip.flush()
    sizes = [len(entry.payload) for entry in await store.read("main", "0", 0)]
    assert len(sizes) == 3
    assert sizes[1] > 2 * ENTRY_BYTES


async def test_the_queue_is_bounded_in_bytes_too() -> None:
    """Long prompts decided during an outage are given up and counted before they fill the memory."""
    store = Refusing(ManualClock())
    gossip, _ = replica(store, "r1")
    for _ in range(100):
        gossip.publish("main", Held("e", bytes(1024 * 1024)))
    assert gossip.counts.lost > 80


async def test_large_entries_shorten_the_feed() -> None:
    """The feed keeps its number of entries only while they are small: its bytes in the store are bounded as well."""
    store, knowledge = MemoryStore(ManualClock()), {"main": PoolKnowledge(Priors())}
    gossip = Gossip(store, knowledge, "r1", cap=1000, feed_bytes=100_000)
    task = asyncio.create_task(gossip.run())
    for number in range(60):
        gossip.publish("main", Held(f"e{number}", bytes(8000)))
        await gossip.flush()
        await asyncio.sleep(0)
    sizes = [len(entry.payload) for entry in await store.read("main", "0", 0)]
    assert 80_000 < sum(sizes) <= 120_000
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_one_read_of_a_full_feed_is_not_all_of_it() -> None:
    """Who joins reads a long feed in several answers, and has all of it in the end."""
    store = MemoryStore(ManualClock())
    for number in range(600):
        await store.append("main", feed.encode("r9", [Held("a", feed.pack([number]))]), 1000)
    assert len(await store.read("main", "0", 0)) == READ_LIMIT
    gossip, known = replica(store, "r1")
    task = asyncio.create_task(gossip.run())
    await until(lambda: known.held("a") == 600)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class Stuck(MemoryStore):
    """A memory store in which the node of pool `ill` may stand still: its appends wait then."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.moves = asyncio.Event()

    async def append(self, pool: str, payload: bytes, cap: int) -> str:
        """Wait, or take."""
        if pool == "ill":
            await self.moves.wait()
        return await super().append(pool, payload, cap)


async def test_a_pool_that_cannot_be_told_holds_up_no_other() -> None:
    """In a cluster each pool has its node: while one stands still, other pools are joined and told of all the same."""
    store = Stuck()
    worker = Gossip(store, {name: PoolKnowledge(Priors()) for name in ("ill", "main")}, "r1", cap=1000)
    other, known = replica(store, "r2")
    for pool in ("ill", "main"):
        worker.publish(pool, Held("a", feed.pack([1])))
    running = [asyncio.create_task(gossip.run()) for gossip in (worker, other)]
    await until(lambda: worker._pools["main"].follower.caught_up and known.held("a") == 1)
    store.moves.set()
    assert await worker.caught_up(PATIENCE_S)
    store.moves.clear()
    for number in range(2, 5):
        for pool in ("ill", "main"):
            worker.publish(pool, Held("a", feed.pack([number])))
        await until(lambda held=number: known.held("a") == held)  # type: ignore[misc]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


class Busy(MemoryStore):
    """A memory store whose answers take a while, in which something new happens in pool `busy` each time."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.happens: list[Callable[[], None]] = []

    async def append(self, pool: str, payload: bytes, cap: int) -> str:
        """Take, after a turn in which a delta was published."""
        if pool == "busy":
            for happens in self.happens:
                happens()
        await asyncio.sleep(0)
        return await super().append(pool, payload, cap)


async def test_a_pool_with_something_new_all_the_time_is_told_in_batches() -> None:
    """What comes while a batch is sent waits for the next one: a busy pool is not told delta by delta, for ever."""
    store = Busy()
    gossip = Gossip(store, {name: PoolKnowledge(Priors()) for name in ("busy", "main")}, "r1", cap=1000)
    store.happens.append(lambda: gossip.publish("busy", Held("a", b"")))
    for pool in ("busy", "main"):
        gossip.publish(pool, Held("a", b""))
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(3):
            await gossip.flush()
    assert len(await store.read("busy", "0", 0)) == 3
    assert len(await store.read("main", "0", 0)) == 1


class Slow(MemoryStore):
    """A memory store whose answers take a while; it counts the large entries that are on their way."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.most = self._now = 0

    async def append(self, pool: str, payload: bytes, cap: int) -> str:
        """Take, a few turns later."""
        large = len(payload) > ENTRY_BYTES // 2
        self._now += large
        self.most = max(self.most, self._now)
        for _ in range(3):
            await asyncio.sleep(0)
        self._now -= large
        return await super().append(pool, payload, cap)


async def test_few_large_entries_are_on_their_way_at_once() -> None:
    """After an outage all pools have much to tell, and decisions share the connection with it."""
    store = Slow()
    pools = [f"p{number}" for number in range(8)]
    gossip = Gossip(store, {name: PoolKnowledge(Priors()) for name in pools}, "r1", cap=1000)
    for pool in pools[1:]:
        for _ in range(40):
            gossip.publish(pool, Held("a", os.urandom(4096)))
    gossip.publish(pools[0], Held("a", b""))
    await gossip.flush()
    assert store.most == 2
    assert [len(await store.read(pool, "0", 0)) for pool in pools] == [1, *[3] * 7]

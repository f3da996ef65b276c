"""What a heartbeat finds: open charges that the shared store lost, and some that nothing will end."""

from extproc.state.memory import MemoryStore
from extproc.state.resilient import ResilientStore
from extproc.state.trouble import RefusedError
from tests.unit.state.unsteady import Unsteady, ask, end, mended


async def test_a_heartbeat_finds_what_the_shared_store_lost(store: ResilientStore, shared: Unsteady) -> None:
    """A flushed store, or a lease that lapsed while this process stood still: open charges come back, pins too."""
    for i in range(5):
        await store.reserve(ask(f"c{i}", session=f"s{i}"))
    await MemoryStore.release(shared, "p", "r")
    for i in range(5):
        await MemoryStore.pin(shared, "p", f"s{i}", "", 1)
    assert (await store.heartbeat("p", "r", 15_000)).known == 0
    await mended(store, shared)
    assert await shared.running() == {"a": 5}
    assert await MemoryStore.pinned(shared, "p", "s3") == "a"
    assert (store.stats.lost, store.stats.asserted, store.stats.opens) == (5, 5, 0)
    assert (await store.heartbeat("p", "r", 15_000)).known == 5


async def test_charges_that_nothing_will_end_are_given_up(store: ResilientStore, shared: Unsteady) -> None:
    """A call given up on a lost connection may be executed after all; two heartbeats later it is gone."""
    await store.reserve(ask("c1"))
    await MemoryStore.reserve(shared, ask("stray"))
    await store.heartbeat("p", "r", 15_000)
    assert store.settled
    await store.heartbeat("p", "r", 15_000)
    await mended(store, shared)
    assert await shared.running() == {"a": 1}
    assert (store.stats.strays, store.stats.lost) == (1, 0)
    await store.settle(end("c1"))
    assert await shared.running() == {}


async def test_calls_under_way_are_no_strays(store: ResilientStore, shared: Unsteady) -> None:
    """Charges that end after the heartbeat counted them, or begin before it does, belong to somebody."""
    for number in range(8):
        await store.reserve(ask(f"ends-{number}"))
    numbers = iter(range(8))
    shared.after_beat = lambda: store.settle(end(f"ends-{next(numbers)}"))
    for _ in range(3):
        await store.heartbeat("p", "r", 15_000)
    shared.after_beat = None
    shared.before_beat = lambda: store.reserve(ask(f"begins-{next(numbers)}"))
    for _ in range(3):
        await store.heartbeat("p", "r", 15_000)
    assert store.stats.strays == 0


async def test_ends_that_wait_are_no_strays(store: ResilientStore, shared: Unsteady) -> None:
    """A settle that the store refuses for minutes ends its charge when it is taken."""

    async def refuse() -> None:
        raise RefusedError("OOM")

    await store.reserve(ask("c1"))
    shared.on_settle = refuse
    await store.settle(end("c1"))
    for _ in range(3):
        assert (await store.heartbeat("p", "r", 15_000)).known == 1
    assert store.stats.strays == 0
    shared.on_settle = None
    await mended(store, shared)
    assert await shared.running() == {}


async def test_calls_under_way_are_no_loss(store: ResilientStore, shared: Unsteady) -> None:
    """Charges that begin or end while a heartbeat is under way are told from those that were lost."""
    await store.reserve(ask("ends"))
    await store.reserve(ask("stays"))
    shared.before_beat = lambda: store.settle(end("ends"))
    shared.after_beat = lambda: store.reserve(ask("begins"))
    for _ in range(3):
        await store.heartbeat("p", "r", 15_000)
    assert (store.stats.lost, store.stats.strays) == (0, 0)
    assert store.settled

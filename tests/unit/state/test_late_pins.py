"""Pins made without the shared store, merged when it returns."""

from extproc.clock import ManualClock
from extproc.state.memory import MemoryStore
from extproc.state.resilient import ResilientStore
from extproc.state.trouble import RefusedError
from tests.unit.state.unsteady import GONE, PROBE_S, A, B, Unsteady, ask, end, mended, resilient


async def test_pins_made_without_the_store_are_written_when_it_returns(store: ResilientStore, shared: Unsteady) -> None:
    """Even if their charge has ended: the session's next turn may come to another replica."""
    shared.fault = GONE
    await store.reserve(ask("c1", B, session="s"))
    await store.settle(end("c1"))
    await store.pin("p", "t", "a", 60_000)
    await mended(store, shared)
    assert await MemoryStore.pinned(shared, "p", "s") == "b"
    assert await MemoryStore.pinned(shared, "p", "t") == "a"
    assert store.stats.pins_merged == 2


async def test_a_session_that_moved_without_the_store_stays_moved(store: ResilientStore, shared: Unsteady) -> None:
    """The shared store still has what this worker knew before: nobody decided since, and the later pin wins."""
    await store.reserve(ask("c1", A, session="s"))
    shared.fault = GONE
    await store.reserve(ask("c2", B, session="s", ignore_pin=True))
    await store.reserve(ask("c3", B, session="s"))
    await mended(store, shared)
    assert await MemoryStore.pinned(shared, "p", "s") == "b"


async def test_another_replicas_decision_is_not_overwritten(store: ResilientStore, shared: Unsteady) -> None:
    """A pin that this worker had not seen is another's decision: all replicas see that one, and it stays."""
    await store.reserve(ask("c1", A, session="s"))
    shared.fault = GONE
    await store.reserve(ask("c2", B, session="s", ignore_pin=True))
    await MemoryStore.pin(shared, "p", "s", "elsewhere", 60_000)
    await mended(store, shared)
    assert await MemoryStore.pinned(shared, "p", "s") == "elsewhere"
    assert (store.stats.pins_merged, store.stats.pins_dropped) == (0, 1)


async def test_of_two_replicas_that_moved_a_session_one_wins(store: ResilientStore, shared: Unsteady) -> None:
    """Both knew the same pin before the outage: the first to return moves it, and the other leaves it there."""
    other = resilient(shared, MemoryStore(ManualClock()))
    for replica in (store, other):
        await replica.pin("p", "s", "before", 60_000)
    shared.fault = GONE
    await store.pin("p", "s", "a", 60_000)
    await other.pin("p", "s", "b", 60_000)
    await mended(store, shared)
    await mended(other, shared)
    assert await MemoryStore.pinned(shared, "p", "s") in {"a", "b"}
    assert store.stats.pins_merged + other.stats.pins_merged == 1
    assert store.stats.pins_dropped + other.stats.pins_dropped == 1
    await other.close()


async def test_a_pin_keeps_the_life_it_has_left(shared: Unsteady, local: MemoryStore) -> None:
    """A pin made long ago is merged with what is left of its life; one whose life is over, not at all."""
    clock = ManualClock()
    store = ResilientStore(shared, local, probe_s=PROBE_S, clock=clock)
    shared.fault = GONE
    await store.pin("p", "long", "a", 60_000)
    await store.pin("p", "short", "a", 10_000)
    clock.advance(20.0)
    await mended(store, shared)
    assert await MemoryStore.pinned(shared, "p", "short") == ""
    assert shared.calls.count("pin") == 2  # one was tried at once, and one merged
    assert await MemoryStore.pinned(shared, "p", "long") == "a"
    shared.clock.advance(41.0)
    assert await MemoryStore.pinned(shared, "p", "long") == ""
    await store.close()


async def test_pins_for_later_are_bounded_and_the_newest_win(store: ResilientStore, shared: Unsteady) -> None:
    """An outage of hours fills no memory: the sessions seen last are those that come back."""
    shared.fault = GONE
    for number in [*range(6), 2]:
        await store.pin("p", f"s{number}", "a", 60_000)
    await mended(store, shared)
    kept = [number for number in range(6) if await MemoryStore.pinned(shared, "p", f"s{number}")]
    assert kept == [2, 3, 4, 5]
    assert store.stats.pins_dropped == 2


async def test_a_shared_decision_replaces_a_pin_that_waits(store: ResilientStore, shared: Unsteady) -> None:
    """A session decided by the shared store again, before its late pin was merged, keeps the newer decision."""
    await store.reserve(ask("c0", A, session="s"))
    shared.fault = RefusedError("OOM")
    await store.pin("p", "s", "b", 60_000)
    shared.fault = None
    await store.reserve(ask("c1", A, session="s", ignore_pin=True))
    await mended(store, shared)
    assert await MemoryStore.pinned(shared, "p", "s") == "a"


async def test_a_shared_decision_amid_the_merge_is_not_overwritten(store: ResilientStore, shared: Unsteady) -> None:
    """Between the look at the shared pin and the writing of the late one, the session may be decided again."""
    await store.reserve(ask("c0", A, session="s"))
    shared.fault = GONE
    await store.pin("p", "s", "b", 60_000)
    shared.on_pinned = lambda: store.reserve(ask("c1", A, session="s", ignore_pin=True))
    await mended(store, shared)
    assert await MemoryStore.pinned(shared, "p", "s") == "a"


async def test_pins_that_the_store_lost_come_back_with_the_life_they_had(shared: Unsteady) -> None:
    """A flushed store gets the pins of this worker's idle sessions again; another replica's newer pin stays."""
    clock = ManualClock()
    store = resilient(shared, MemoryStore(clock))
    for number in range(30):
        await store.reserve(ask(f"c{number}", session=f"s{number}", pin_ttl_ms=60_000))
        await store.settle(end(f"c{number}"))
    clock.advance(50.0)
    for number in range(30):
        await MemoryStore.pin(shared, "p", f"s{number}", "", 1)
    await MemoryStore.pin(shared, "p", "s7", "elsewhere", 60_000)
    await lose(store, shared)
    pinned = [await MemoryStore.pinned(shared, "p", f"s{number}") for number in range(30)]
    assert pinned == ["a"] * 7 + ["elsewhere"] + ["a"] * 22
    assert (store.stats.pins_merged, store.stats.pins_dropped) == (29, 0)
    shared.clock.advance(11.0)
    assert await MemoryStore.pinned(shared, "p", "s3") == ""
    await store.close()


async def test_pins_that_were_evicted_stay_away(shared: Unsteady, local: MemoryStore) -> None:
    """A store short of memory lacks pins at all times: a lost connection does not bring them all back."""
    store = resilient(shared, local)
    for number in range(30):
        await store.pin("p", f"s{number}", "a", 60_000)
    for number in range(10):
        await MemoryStore.pin(shared, "p", f"s{number}", "", 1)
    await lose(store, shared)
    assert [await MemoryStore.pinned(shared, "p", f"s{number}") for number in (3, 20)] == ["", "a"]
    assert store.stats.pins_merged == 0
    await store.close()


async def test_the_pins_used_last_are_those_that_come_back(store: ResilientStore, shared: Unsteady) -> None:
    """With room for four, one of them made during the outage: that one, and the three used last before."""
    for name in ("s0", "s1", "s2", "s3", "s4", "s1"):
        await store.pin("p", name, "a", 60_000)
    for number in range(5):
        await MemoryStore.pin(shared, "p", f"s{number}", "", 1)
    shared.fault = GONE
    await store.pin("p", "during", "b", 60_000)
    await mended(store, shared)
    names = ["s0", "s1", "s2", "s3", "s4", "during"]
    assert [await MemoryStore.pinned(shared, "p", name) for name in names] == ["", "a", "", "a", "a", "b"]
    assert store.stats.pins_dropped == 0


async def test_pins_that_ended_are_not_brought_back() -> None:
    """The local ledger keeps them for a while, and says that no life is left in them; the newest are listed first."""
    clock = ManualClock()
    ledger = MemoryStore(clock)
    await ledger.pin("p", "long", "a", 60_000)
    await ledger.pin("p", "short", "b", 5_000)
    assert ledger.newest_pins("p", 9) == ["short", "long"]
    assert ledger.newest_pins("p", 1) == ["short"]
    clock.advance(5.0)
    assert ledger.pin_left("p", "long") == ("a", 55.0)
    assert [ledger.pin_left("p", key)[1] > 0 for key in ("short", "never", "long")] == [False, False, True]
    shared, local = Unsteady(clock), MemoryStore(clock)
    store = resilient(shared, local)
    for key, life_ms in (("long", 60_000), ("short", 5_000), ("other", 60_000)):
        await store.pin("p", key, "a", life_ms)
        await MemoryStore.pin(shared, "p", key, "", 1)
    clock.advance(6.0)
    await lose(store, shared)
    assert [await MemoryStore.pinned(shared, "p", key) for key in ("long", "short", "other")] == ["a", "", "a"]
    assert "pin" in shared.calls
    assert store.stats.pins_merged == 2
    await store.close()


async def lose(store: ResilientStore, shared: Unsteady) -> None:
    """Lose the connection, and find the shared store again."""
    shared.fault = GONE
    await store.heartbeat("p", "r", 15_000)
    await mended(store, shared)

"""What a shared store is told after its return: ends, open charges, and where they are served."""

import asyncio

import msgspec
import pytest

from extproc.errors import StoreError
from extproc.state.memory import MemoryStore
from extproc.state.resilient import ResilientStore
from extproc.state.trouble import RefusedError
from extproc.state.values import Candidate, Load, Move
from tests.unit.state.unsteady import GONE, LATE, PROBE_S, A, B, Unsteady, ask, end, mended, resilient
from tests.waiting import until


async def shared_pin_is_lost(shared: Unsteady, key: str) -> None:
    """Let a pin be gone from the shared store."""
    await MemoryStore.pin(shared, "p", key, "", 1)


async def test_a_charge_executed_but_not_answered_does_not_leak(store: ResilientStore, shared: Unsteady) -> None:
    """A reservation that missed its deadline may have been made: its settle is delivered all the same."""
    shared.fault, shared.executes = LATE, True
    await store.reserve(ask("c1"))
    assert await shared.running() == {"a": 1}
    shared.executes = False
    await store.settle(end("c1"))
    await mended(store, shared)
    assert await shared.running() == {}


async def test_a_charge_that_was_to_be_asked_for_twice_does_not_leak(store: ResilientStore, shared: Unsteady) -> None:
    """The shared store charges late, the local one finds an absent pin, the second try is local: still one end."""
    await store.reserve(ask("c0", A, session="s"))
    shared.fault, shared.executes = LATE, True
    again = ask("c1", B, session="s")
    assert (await store.reserve(msgspec.structs.replace(again, ignore_pin=False))).absent_pin == "a"
    await MemoryStore.reserve(shared, msgspec.structs.replace(again, ignore_pin=True))
    shared.executes = False
    assert (await store.reserve(msgspec.structs.replace(again, ignore_pin=True))).endpoint == "b"
    await store.settle(end("c1"))
    await mended(store, shared)
    assert await shared.running() == {"a": 1}


async def test_settles_are_delivered_after_the_return(store: ResilientStore, shared: Unsteady) -> None:
    """Ends of shared charges wait for the shared store; ends of purely local ones need not be told."""
    await store.reserve(ask("c1"))
    await store.reserve(ask("c2"))
    shared.fault = GONE
    await store.settle(end("c1"))
    await store.reserve(ask("local"))
    await store.settle(end("local"))
    assert await shared.running() == {"a": 2}
    assert store.undelivered() == {"p": 1}
    await mended(store, shared)
    assert await shared.running() == {"a": 1}
    assert store.stats.replayed == 1


async def test_a_late_settle_gives_no_tokens_back(store: ResilientStore, shared: Unsteady) -> None:
    """The backlog has drained by itself meanwhile: what a late refund takes would be others' tokens."""
    await store.reserve(ask("c1", A))
    shared.fault = LATE
    await store.settle(msgspec.structs.replace(end("c1"), refund=True))
    await mended(store, shared)
    assert await shared.loads("p") == {"a": Load(10.0)}


async def test_a_refused_settle_is_delivered_once_it_is_taken(store: ResilientStore, shared: Unsteady) -> None:
    """A full or read-only store refuses for a while: charges that ended meanwhile do not stay behind for ever."""
    await store.reserve(ask("c1"))
    shared.fault = RefusedError("OOM")
    await store.settle(end("c1"))
    await asyncio.sleep(5 * PROBE_S)
    await mended(store, shared)
    assert await shared.running() == {}
    assert store.stats.dropped == 0


async def test_a_replay_that_fails_is_repeated(store: ResilientStore, shared: Unsteady) -> None:
    """A settle that misses its deadline while it is replayed is tried again."""
    await store.reserve(ask("c1"))
    await store.reserve(ask("c2"))
    shared.late_settles = 3
    await store.settle(end("c1"))
    await store.settle(end("c2"))
    await mended(store, shared)
    assert await shared.running() == {}
    assert store.stats.replayed == 2


@pytest.mark.parametrize("fault", [GONE, RefusedError("OOM")])
async def test_more_settles_than_can_be_kept_end_all_the_same(
    store: ResilientStore, shared: Unsteady, fault: StoreError
) -> None:
    """Beyond the bound the worker gives up all its charges at once and tells those still open again."""
    for i in range(9):
        await store.reserve(ask(f"c{i}"))
    shared.fault = fault
    for i in range(6):
        await store.settle(end(f"c{i}"))
    assert store.stats.dropped == 5  # then the sixth waits
    await mended(store, shared)
    assert await shared.running() == {"a": 3}
    for i in range(6, 9):
        await store.settle(end(f"c{i}"))
    assert await shared.running() == {}


async def test_open_charges_are_asserted_after_the_return(store: ResilientStore, shared: Unsteady) -> None:
    """What was decided locally, and what the shared store lost meanwhile, counts again, with its pin."""
    await store.reserve(ask("before", A, session="old"))
    shared.fault = GONE
    await store.reserve(ask("during", B, session="s"))
    await MemoryStore.release(shared, "p", "r")
    await shared_pin_is_lost(shared, "old")
    await mended(store, shared)
    assert await shared.running() == {"a": 1, "b": 1}
    assert (await store.reserve(ask("after", session="s"))).endpoint == "b"
    assert await MemoryStore.pinned(shared, "p", "old") == "a"
    for charge in ("before", "during", "after"):
        assert await store.settle(end(charge)) is True
    assert await shared.running() == {}


async def test_after_a_mere_stall_only_what_was_missed_is_told(store: ResilientStore, shared: Unsteady) -> None:
    """A stall loses nothing: five hundred open charges are not told again because one decision was late."""
    for i in range(40):
        await store.reserve(ask(f"c{i}"))
    shared.fault = LATE
    await store.reserve(ask("late"))
    await mended(store, shared)
    assert store.stats.asserted == 1
    assert await shared.running() == {"a": 41}


async def test_prefill_that_is_left_is_told_and_what_has_run_is_not(shared: Unsteady, local: MemoryStore) -> None:
    """A charge made without the store brings what is left of its tokens at its endpoint's rate; no less than none."""
    store = resilient(shared, local)
    quick = Candidate("quick", 0.0, 100.0, 1e9, floor_tokens=500.0, floor_running=9, stalled_tokens=4.0)
    slow = Candidate("slow", 0.0, 100.0, 1e-6, floor_tokens=500.0)
    shared.fault = LATE
    await store.reserve(ask("c1", quick))
    await store.reserve(ask("c2", slow))
    await mended(store, shared)
    loads = await shared.loads("p")
    assert (loads["quick"].running, loads["slow"].running) == (1, 1)
    assert loads["slow"].backlog_tokens == pytest.approx(100.0)
    assert loads["quick"].backlog_tokens <= 100.0
    await store.close()


async def test_a_late_decision_of_the_shared_store_follows_the_one_that_serves(
    store: ResilientStore, shared: Unsteady
) -> None:
    """The shared store picked `a` too late, this worker `b`: load and pin end up at `b`."""
    await MemoryStore.reserve(shared, msgspec.structs.replace(ask("c1", A, session="s")))
    shared.fault = LATE
    assert (await store.reserve(ask("c1", B, session="s"))).endpoint == "b"
    await mended(store, shared)
    assert await shared.running() == {"b": 1}
    assert await MemoryStore.pinned(shared, "p", "s") == "b"


@pytest.mark.parametrize("fault", [LATE, GONE, RefusedError("OOM")])
async def test_a_move_that_could_not_be_sent_is_told_later(
    store: ResilientStore, shared: Unsteady, fault: StoreError
) -> None:
    """Another endpoint serves a charge than the picked one: its load is there once the shared store answers."""
    await store.reserve(ask("c1", A))
    shared.fault = fault
    assert await store.move(Move("p", "c1", "r", "b", 7.0, 1e-6)) is True
    assert await store.move(Move("p", "unknown", "r", "b", 7.0, 1e-6)) is False
    await mended(store, shared)
    assert await shared.running() == {"b": 1}
    await store.settle(end("c1"))
    assert await shared.running() == {}


async def test_a_local_charge_that_moved_is_told_where_it_is(store: ResilientStore, shared: Unsteady) -> None:
    """Assertion names the endpoint that serves it, not the one picked."""
    shared.fault = GONE
    await store.reserve(ask("c1", A))
    await store.move(Move("p", "c1", "r", "b", 7.0, 1e-6))
    await mended(store, shared)
    assert await shared.running() == {"b": 1}
    assert "move" not in shared.calls


async def test_a_server_replaced_while_it_was_not_asked_is_told_everything(
    store: ResilientStore, shared: Unsteady
) -> None:
    """A stall that ends with a lost connection may end at another server, which knows nothing."""
    await store.reserve(ask("c1"))
    shared.fault = LATE
    await store.reserve(ask("c2"))
    shared.fault = GONE
    seen = shared.pings
    await until(lambda: shared.pings > seen)
    await MemoryStore.release(shared, "p", "r")
    await mended(store, shared)
    assert await shared.running() == {"a": 2}


async def test_what_ends_while_the_rest_is_asserted_is_not_asserted(store: ResilientStore, shared: Unsteady) -> None:
    """A local charge settled between the return and its turn must not be charged afterwards: nobody would end it."""
    shared.fault = GONE
    for i in range(70):
        await store.reserve(ask(f"c{i}"))
    shared.on_reserve = lambda: store.settle(end("c69"))
    await mended(store, shared)
    assert sum((await shared.running()).values()) == 69


async def test_a_return_is_told_in_small_batches(store: ResilientStore, shared: Unsteady) -> None:
    """Hundreds of charges are not sent at once: decisions of others stand in the same queue."""
    shared.fault = GONE
    for i in range(100):
        await store.reserve(ask(f"c{i}"))
    await mended(store, shared)
    assert await shared.running() == {"a": 100}
    assert shared.most_reserving == 16


async def test_close_delivers_what_waits(shared: Unsteady, local: MemoryStore) -> None:
    """A clean shutdown tries the waiting settles once more."""
    store = resilient(shared, local)
    await store.reserve(ask("c1"))
    shared.fault = RefusedError("OOM")
    await store.settle(end("c1"))
    shared.fault = None
    await store.close()
    assert await shared.running() == {}
    assert store.stats.dropped == 0


async def test_a_replica_that_gave_up_has_nothing_to_tell(store: ResilientStore, shared: Unsteady) -> None:
    """A release drops what waits for the same replica: its charges vanish with the lease."""
    await store.reserve(ask("c1"))
    shared.fault = GONE
    await store.settle(end("c1"))
    await store.release("p", "r")
    assert store.undelivered() == {"p": 0}

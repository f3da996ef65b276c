"""Which store answers, and when: circuits of pools, verbs with and without a local stand-in."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from extproc.errors import StoreError
from extproc.state.memory import MemoryStore
from extproc.state.resilient import ResilientStore
from extproc.state.trouble import AnsweredError, RefusedError, StoreDeadlineError, Trouble
from extproc.state.values import Load
from tests.unit.state.unsteady import A, B, Unsteady, ask, end, resilient
from tests.waiting import until


@pytest.fixture
async def store(shared: Unsteady, local: MemoryStore) -> AsyncIterator[ResilientStore]:
    """The store under test."""
    store = resilient(shared, local)
    yield store
    await store.close()


async def test_charges_are_kept_in_both_ledgers(store: ResilientStore, shared: Unsteady, local: MemoryStore) -> None:
    """While the shared store answers, the local ledger mirrors this worker's charges and their ends."""
    await store.reserve(ask("c1", sequences=8, output_tokens=64.0))
    assert await local.loads("p") == await shared.loads("p") == {"a": Load(10.0, 8, 64.0)}
    assert await store.settle(end("c1")) is True
    assert await local.loads("p") == await shared.loads("p") == {"a": Load(10.0)}


async def test_the_first_missed_deadline_opens_the_circuit(store: ResilientStore, shared: Unsteady) -> None:
    """One decision waits; those after it do not ask the shared store at all."""
    shared.fault = StoreDeadlineError("late")
    for i in range(5):
        assert (await store.reserve(ask(f"c{i}"))).endpoint
        assert store.degraded_in("p")
    assert shared.calls == ["reserve"]
    assert (store.stats.calls, store.stats.failures, store.stats.opens) == (1, {Trouble.SLOW: 1}, 1)


async def test_a_stall_is_over_as_soon_as_a_probe_is_answered(store: ResilientStore, shared: Unsteady) -> None:
    """A blink costs sharing no longer than it lasts: the first probe goes out at once."""
    shared.fault = StoreDeadlineError("late")
    await store.reserve(ask("c1"))
    shared.fault = None
    await until(lambda: not store.degraded)
    assert shared.pings == 1


async def test_calls_under_way_together_open_one_circuit_once(store: ResilientStore, shared: Unsteady) -> None:
    """Fifty requests under way at the stall wait together, each for its own deadline, and are one opening."""
    for number in range(50):
        await store.reserve(ask(f"c{number}"))
    shared.fault = StoreDeadlineError("late")
    pausing = asyncio.Event()
    shared.on_settle = pausing.wait
    ending = [asyncio.create_task(store.settle(end(f"c{number}"))) for number in range(50)]
    await asyncio.sleep(0)
    pausing.set()
    assert all(await asyncio.gather(*ending))
    assert store.stats.failures == {Trouble.SLOW: 50}
    assert store.stats.opens == 1


async def test_a_node_that_is_gone_degrades_its_own_pools_alone(store: ResilientStore, shared: Unsteady) -> None:
    """In a cluster each pool lives on one node: decisions of the others go on being shared."""
    shared.fault, shared.failing = StoreError("gone"), {"p"}
    await store.reserve(ask("c1"))
    await store.reserve(ask("c2", pool="q"))
    await store.reserve(ask("c3", pool="q"))
    assert (store.degraded_in("p"), store.degraded_in("q"), store.degraded) == (True, False, True)
    assert await shared.running("q") == {"a": 2}
    assert store.troubles() == {"p": Trouble.GONE}


async def test_a_refusal_opens_no_circuit_but_shows(store: ResilientStore, shared: Unsteady) -> None:
    """A full store answers at once: each decision asks it again, is made here meanwhile, and the trouble is named."""
    shared.fault = RefusedError("OOM")
    for i in range(3):
        assert (await store.reserve(ask(f"c{i}"))).endpoint == "a"
    assert shared.calls.count("reserve") >= 3
    assert shared.pings == 0
    assert store.degraded_in("p")
    assert store.troubles() == {"p": Trouble.FULL}
    shared.fault = None
    await until(lambda: store.settled and not store.degraded)
    assert await shared.running() == {"a": 3}


async def test_a_strange_answer_opens_no_circuit(store: ResilientStore, shared: Unsteady) -> None:
    """A value in the store that cannot be read says nothing of the store itself."""
    shared.fault = AnsweredError("something else")
    assert (await store.reserve(ask("c1"))).endpoint == "a"
    assert store.stats.opens == 0


async def test_a_probe_that_is_refused_was_answered(store: ResilientStore, shared: Unsteady) -> None:
    """A user without permission for PING must not keep a circuit open for ever."""
    shared.fault = StoreDeadlineError("late")
    await store.reserve(ask("c1"))
    shared.fault = RefusedError("NOPERM")
    await until(lambda: not store.troubles() or Trouble.SLOW not in store.troubles().values())
    assert shared.pings == 1
    shared.fault = None
    await until(lambda: store.settled)


async def test_local_decisions_know_the_pins_and_the_load(store: ResilientStore, shared: Unsteady) -> None:
    """The ledger is warm when the shared store goes: a pinned session stays where it was."""
    await store.reserve(ask("c1", B, next_pin_key="s", sequences=2, output_tokens=9.0))
    shared.fault = StoreError("gone")
    got = await store.reserve(ask("c2", session="s", next_pin_key="t"))
    assert (got.endpoint, got.pinned, got.running, got.output_tokens) == ("b", True, 2, 9.0)
    assert (await store.reserve(ask("c3", session="t"))).endpoint == "b"
    assert await store.pinned("p", "t") == "b"


async def test_a_pin_that_another_replica_may_have_made_is_not_denied(store: ResilientStore, shared: Unsteady) -> None:
    """Without the shared store a session has no pin that is known of, which is not to say that it has none."""
    assert await store.pinned("p", "s") == ""
    shared.fault = StoreError("gone")
    with pytest.raises(StoreError):
        await store.pinned("p", "s")


async def test_an_absent_pin_is_passed_on(store: ResilientStore, local: MemoryStore) -> None:
    """A pin outside the candidates is the caller's business; nothing is charged anywhere."""
    await store.reserve(ask("c1", A, session="s"))
    assert (await store.reserve(ask("c2", B, session="s"))).absent_pin == "a"
    assert set(await local.loads("p")) == {"a"}


async def test_a_request_cancelled_amid_its_reservation_leaves_no_charge(
    store: ResilientStore, shared: Unsteady
) -> None:
    """Who waits for the answer may go away; the shared store charges all the same, and then hears of the end."""
    reached, never = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        await MemoryStore.reserve(shared, ask("c1"))
        reached.set()
        await never.wait()

    shared.on_reserve = hang
    asking = asyncio.create_task(store.reserve(ask("c1")))
    await reached.wait()
    assert await shared.running() == {"a": 1}
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: store.settled)
    assert await shared.running() == {}


async def test_a_settle_that_is_cancelled_is_delivered(store: ResilientStore, shared: Unsteady) -> None:
    """The end of a charge does not depend on who waits for it."""
    await store.reserve(ask("c1"))
    reached, never = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        reached.set()
        await never.wait()

    shared.on_settle = hang
    ending = asyncio.create_task(store.settle(end("c1")))
    await reached.wait()
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    shared.on_settle = None
    await until(lambda: store.settled)
    assert await shared.running() == {}


async def test_states_taken_back_by_another_are_forgotten_here_too(store: ResilientStore, shared: Unsteady) -> None:
    """The copy kept for an outage follows the shared store: it does not gather every endpoint there ever was."""
    await shared.put_states("p", {"a": b"1", "b": b"2"})
    await store.states("p")
    await shared.drop_states("p", ["a"])
    await store.states("p")
    shared.fault = StoreError("gone")
    assert await store.states("p") == {"b": b"2"}
    assert store.degraded


async def test_states_read_last_outlive_the_shared_store(store: ResilientStore, shared: Unsteady) -> None:
    """Without the shared store the states are those read or published last."""
    await shared.put_states("p", {"a": b"1"})
    assert await store.states("p") == {"a": b"1"}
    shared.fault = StoreError("gone")
    with pytest.raises(StoreError):
        await store.ping("p")
    assert store.degraded
    await store.put_states("p", {"b": b"2"})
    assert await store.states("p") == {"a": b"1", "b": b"2"}


SHARED_ONLY: dict[str, Callable[[ResilientStore], Awaitable[object]]] = {
    "append": lambda store: store.append("p", b"x", 10),
    "read": lambda store: store.read("p", "0", 0),
    "hold": lambda store: store.hold("p", "scrape", "k", ["a"], 5000),
    "put_snapshot": lambda store: store.put_snapshot("p", "a", "0-0", [b"x"]),
    "snapshots": lambda store: store.snapshots("p"),
    "snapshot": lambda store: store.snapshot("p", "a"),
    "drop_snapshots": lambda store: store.drop_snapshots("p", ["a"]),
}


@pytest.mark.parametrize("verb", SHARED_ONLY)
async def test_what_only_a_shared_store_can_serve_is_refused_without_it(
    verb: str, shared: Unsteady, store: ResilientStore
) -> None:
    """Entries kept here alone would tell nobody, and work taken here alone would be done twice."""
    shared.fault = StoreError("gone")
    await store.reserve(ask("c"))
    asked = list(shared.calls)
    with pytest.raises(StoreError):
        await SHARED_ONLY[verb](store)
    assert shared.calls == asked
    shared.fault = None
    await until(lambda: not store.degraded)
    await SHARED_ONLY[verb](store)


async def test_a_slow_transfer_opens_no_circuit(shared: Unsteady, store: ResilientStore) -> None:
    """Much data takes long; that says nothing of how soon a decision is answered. A lost connection does."""
    shared.fault = StoreDeadlineError("late")
    with pytest.raises(StoreError):
        await store.append("p", b"x", 10)
    assert store.stats.opens == 0
    shared.fault = StoreError("gone")
    with pytest.raises(StoreError):
        await store.append("p", b"x", 10)
    assert store.stats.opens == 1


async def test_a_pool_without_calls_has_no_trouble(store: ResilientStore) -> None:
    """A store that nobody asked yet is taken for a good one."""
    assert not store.degraded_in("p")
    assert store.troubles() == {}
    assert store.undelivered() == {}
    await store.ping()
    assert store.settled

"""What only the store in memory promises."""

from extproc.clock import ManualClock
from extproc.state.memory import MemoryStore
from extproc.state.values import Candidate, Load, Move, Reservation, Reserve

ONE = (Candidate("a", 0.0, 10.0, 1.0), Candidate("b", 5.0, 20.0, 1.0))


async def test_adopting_takes_over_what_the_other_store_knows() -> None:
    """The picked endpoint's shared backlog and this worker's charge are in the ledger afterwards, once."""
    store = MemoryStore(ManualClock())
    ask = Reserve("p", "c1", "r", ONE, sequences=2, output_tokens=64.0)
    for _ in range(2):
        store.adopt(ask, Reservation("b", backlog_tokens=300.0, running=7, output_tokens=900.0))
    assert await store.loads("p") == {"b": Load(320.0, 2, 64.0)}
    assert [each.reservation.endpoint for each in store.open_charges("p", "r")] == ["b"]
    assert list(store.open_charges("p", "other")) == []


async def test_a_moved_charge_is_told_again_for_the_endpoint_that_serves_it() -> None:
    """What is asserted later names that endpoint as the only candidate, and holds what the request held."""
    store = MemoryStore(ManualClock())
    await store.reserve(Reserve("p", "c1", "r", ONE, sequences=2, output_tokens=64.0))
    assert await store.move(Move("p", "c1", "r", "z", tokens=7.0, rate=3.0)) is True
    (charge,) = store.open_charges("p", "r")
    assert charge.ask.candidates == (Candidate("z", 0.0, 7.0, 3.0),)
    assert (charge.reservation.endpoint, charge.tokens) == ("z", 7.0)
    again = MemoryStore(ManualClock())
    await again.reserve(charge.ask)
    assert await again.loads("p") == await store.loads("p") == {"z": Load(7.0, 2, 64.0)}


async def test_feed_ids_grow_though_the_wall_clock_stands() -> None:
    """Entries of one millisecond are told apart, and ids follow the clock when it moves."""
    clock = ManualClock(start=5.0)
    store = MemoryStore(clock)
    ids = [await store.append("p", b"", 10) for _ in range(2)]
    clock.advance(1.0)
    ids.append(await store.append("p", b"", 10))
    assert ids == ["5000-0", "5000-1", "6000-0"]

"""What a request holds until its end, sequences and output tokens, and the backlog that an engine's queue proves."""

from typing import Any

import pytest

from extproc.state.pick import MAX_OUTPUT_TOKENS, MAX_SEQUENCES
from extproc.state.store import Store
from extproc.state.values import Load
from tests.contract.conftest import World
from tests.contract.test_reserve import ask, candidate, end

LEASE_MS = 15_000


async def in_flight(store: Store) -> dict[str, tuple[int, float]]:
    """Sequences and output tokens in flight of each endpoint that has any."""
    loads = await store.loads("p")
    return {name: (load.running, load.output_tokens) for name, load in loads.items() if load.running}


async def test_a_request_for_eight_answers_holds_eight_sequences_until_its_end(world: World) -> None:
    """`n` = 8 is charged as eight sequences and 8 x 200 output tokens, and given back once, at its end."""
    store = world.store()
    await store.reserve(ask("one", candidate("a", tokens=0.0), output_tokens=50.0))
    got = await store.reserve(ask("eight", candidate("a", tokens=0.0), sequences=8, output_tokens=1600.0))
    assert (got.running, got.output_tokens) == (1, 50.0)
    assert await store.loads("p") == {"a": Load(0.0, 9, 1650.0)}
    assert [await store.settle(end("eight")), await store.settle(end("eight"))] == [True, False]
    assert await store.loads("p") == {"a": Load(0.0, 1, 50.0)}
    await store.settle(end("one"))
    assert await store.loads("p") == {}


async def test_sequences_and_outputs_in_flight_cost(world: World) -> None:
    """A cost is static + sequences * running_ms + outputs * output_ms: the decode load drives later requests away."""
    store = world.store()
    prices: dict[str, Any] = {"running_ms": 2.0, "output_ms": 0.02}
    both = (candidate("a", 1.0), candidate("b", 40.0))
    picks = [
        await store.reserve(ask("c1", *both, sequences=4, output_tokens=1000.0, **prices)),
        await store.reserve(ask("c2", *both, sequences=1, output_tokens=600.0, **prices)),
        await store.reserve(ask("c3", *both, **prices)),
    ]
    assert [(each.endpoint, each.running, each.output_tokens) for each in picks] == [
        ("a", 0, 0.0),
        ("a", 4, 1000.0),
        ("b", 0, 0.0),
    ]
    assert [each.cost_ms for each in picks] == pytest.approx([1.0, 29.0, 40.0])


async def test_what_is_in_flight_is_given_back_to_the_last_bit(world: World) -> None:
    """Thirds of a token in any order leave nothing behind."""
    store = world.store()
    for i in range(30):
        await store.reserve(ask(f"c{i}", candidate("a", tokens=0.0), output_tokens=1000 / 3 + i / 7))
    await store.reserve(ask("last", candidate("a", tokens=0.0), output_tokens=0.25))
    for i in (*range(0, 30, 2), *range(29, 0, -2)):
        await store.settle(end(f"c{i}"))
    assert await in_flight(store) == {"a": (1, 0.25)}


async def test_a_refund_gives_back_the_prompt_besides_what_was_in_flight(world: World) -> None:
    """A request that failed before its prefill gives back both its own parts, and nothing of another's."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a", tokens=300.0), sequences=2, output_tokens=64.0))
    await store.reserve(ask("c2", candidate("a", tokens=50.0), sequences=3, output_tokens=32.0))
    await store.settle(end("c1", refund=True))
    load = (await store.loads("p"))["a"]
    assert (load.running, load.output_tokens) == (3, 32.0)
    assert load.backlog_tokens == pytest.approx(50.0)


async def test_a_dead_replica_gives_back_what_its_requests_held(world: World) -> None:
    """Sequences and output tokens of a replica that was killed go with its lease; the others' stay."""
    store = world.store()
    await store.reserve(ask("dead", candidate("a"), replica="dead", sequences=8, output_tokens=800.0))
    await store.reserve(ask("deader", candidate("b"), replica="dead", sequences=2, output_tokens=10.0))
    world.age(10.0)
    await store.reserve(ask("c1", candidate("a"), replica="alive", sequences=2, output_tokens=30.5))
    world.age(10.0)
    assert (await store.heartbeat("p", "alive", LEASE_MS)).reaped == 2
    assert await in_flight(store) == {"a": (2, 30.5)}


async def test_counting_anew_changes_nothing_of_what_is_right(world: World) -> None:
    """A heartbeat that counts finds the same sums: sequences, output tokens, and the backlog besides."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a", tokens=70.0), sequences=8, output_tokens=800.5))
    await store.reserve(ask("c2", candidate("b", tokens=0.0), sequences=2, output_tokens=7.0))
    for _ in range(3):
        world.age(20.0)
        await store.heartbeat("p", "r1", LEASE_MS)
        assert await in_flight(store) == {"a": (8, 800.5), "b": (2, 7.0)}
    assert (await store.loads("p"))["a"].backlog_tokens == pytest.approx(70.0, rel=1e-3)


async def test_release_gives_back_what_a_replica_holds(world: World) -> None:
    """A clean shutdown takes its own sequences and output tokens out at once."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a"), sequences=8, output_tokens=800.0))
    await store.reserve(ask("c2", candidate("a"), replica="r2", sequences=3, output_tokens=5.0))
    await store.release("p", "r1")
    assert await in_flight(store) == {"a": (3, 5.0)}


async def test_a_repeated_charge_holds_once(world: World) -> None:
    """The same charge id again, even asking for more, answers as before and charges nothing."""
    store = world.store()
    first = await store.reserve(ask("c1", candidate("a"), sequences=2, output_tokens=9.0))
    assert await store.reserve(ask("c1", candidate("a"), sequences=5, output_tokens=90.0)) == first
    assert await in_flight(store) == {"a": (2, 9.0)}


async def test_no_request_holds_more_than_an_engine_can_run(world: World) -> None:
    """Absurd numbers from a client are charged up to the bound, and given back exactly."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a"), sequences=3, output_tokens=0.5))
    await store.reserve(ask("c2", candidate("a"), sequences=10**12, output_tokens=1e300))
    assert await in_flight(store) == {"a": (3 + MAX_SEQUENCES, 0.5 + MAX_OUTPUT_TOKENS)}
    await store.settle(end("c2"))
    assert await in_flight(store) == {"a": (3, 0.5)}


async def test_a_queue_that_the_engine_proves_counts_though_the_ledger_is_empty(world: World) -> None:
    """The backlog counted is never below the floor: here 4,000 tokens at 2,000 a second, 2,000 ms."""
    store = world.store()
    queued = candidate("a", 0.0, rate=2000.0, floor_tokens=4000.0)
    got = await store.reserve(ask("c1", queued, candidate("b", 1999.0, rate=2000.0), backlog_weight=1.0))
    assert got.endpoint == "b"
    got = await store.reserve(ask("c2", queued, candidate("b", 2001.0, rate=2000.0), backlog_weight=1.0))
    assert (got.endpoint, got.cost_ms, got.backlog_tokens) == ("a", 2000.0, 4000.0)


async def test_the_picked_endpoints_backlog_becomes_the_floor_and_the_request(world: World) -> None:
    """The pick's backlog is max(backlog, floor) + tokens; a floor of one that was not picked leaves no trace."""
    store = world.store()
    both = (candidate("a", tokens=100.0, floor_tokens=400.0), candidate("b", 1.0, tokens=100.0, floor_tokens=900.0))
    await store.reserve(ask("c1", *both))
    loads = await store.loads("p")
    assert set(loads) == {"a"}
    assert loads["a"].backlog_tokens == pytest.approx(500.0)
    await store.reserve(ask("c2", *both))
    assert (await store.loads("p"))["a"].backlog_tokens == pytest.approx(600.0)


async def test_a_floor_below_the_backlog_changes_nothing(world: World) -> None:
    """The ledger's own backlog counts when it is the larger one: a floor is never added to it."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a", tokens=700.0)))
    got = await store.reserve(ask("c2", candidate("a", tokens=0.0, floor_tokens=650.0)))
    assert got.backlog_tokens == pytest.approx(700.0)
    assert (await store.loads("p"))["a"].backlog_tokens == pytest.approx(700.0)


async def test_a_refund_leaves_the_floor(world: World) -> None:
    """The engine's queue was not this request's: its refund takes its own tokens only."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a", tokens=100.0, floor_tokens=400.0)))
    await store.settle(end("c1", refund=True))
    assert (await store.loads("p"))["a"].backlog_tokens == pytest.approx(400.0)


async def test_an_absent_pin_raises_no_floor(world: World) -> None:
    """A reservation that charges nothing leaves the backlogs alone."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a", tokens=0.0), pin_key="s"))
    await store.reserve(ask("c2", candidate("b", floor_tokens=400.0), pin_key="s"))
    assert set(await store.loads("p")) == {"a"}


async def test_sequences_that_the_engine_reports_count_though_the_ledger_has_none(world: World) -> None:
    """An engine that others use too costs what it runs: here 5 sequences of 2 ms, and the answer says so."""
    store = world.store()
    shared = candidate("a", 0.0, tokens=0.0, floor_running=5)
    got = await store.reserve(ask("c1", shared, candidate("b", 9.0), running_ms=2.0))
    assert (got.endpoint, got.running) == ("b", 0)
    got = await store.reserve(ask("c2", shared, candidate("b", 11.0), running_ms=2.0))
    assert (got.endpoint, got.cost_ms, got.running) == ("a", 10.0, 5)


async def test_others_sequences_are_not_charged(world: World) -> None:
    """Only what this fleet sent is in its ledger; it counts when it is more than the engine reports."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a", tokens=0.0, floor_running=5), sequences=2))
    assert await in_flight(store) == {"a": (2, 0.0)}
    for number in range(5):
        await store.reserve(ask(f"more{number}", candidate("a", tokens=0.0)))
    got = await store.reserve(ask("c2", candidate("a", tokens=0.0, floor_running=5)))
    assert got.running == 7


async def test_an_engine_that_stands_still_has_a_backlog_for_each_sequence(world: World) -> None:
    """3 sequences in flight of 500 stalled tokens each are 1,500 tokens, though the bucket is empty."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a", tokens=0.0), sequences=3))
    stalled = candidate("a", 0.0, tokens=0.0, rate=1000.0, stalled_tokens=500.0)
    got = await store.reserve(ask("c2", stalled, candidate("b", 1499.0), backlog_weight=1.0))
    assert got.endpoint == "b"
    got = await store.reserve(ask("c3", stalled, candidate("b", 1501.0), backlog_weight=1.0))
    assert (got.endpoint, got.cost_ms, got.backlog_tokens) == ("a", 1500.0, 1500.0)


async def test_what_the_engine_reports_stands_still_too(world: World) -> None:
    """Stalled tokens count for the sequences that the engine proves, when those are more than the ledger's."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a", tokens=0.0)))
    got = await store.reserve(ask("c2", candidate("a", tokens=0.0, floor_running=4, stalled_tokens=100.0)))
    assert (got.backlog_tokens, got.running) == (400.0, 4)


async def test_the_largest_of_all_floors_counts(world: World) -> None:
    """Ledger, queue and stall are three views of one backlog and are never added up."""
    store = world.store()
    for endpoint, floors, backlog in (
        ("ledger", {"floor_tokens": 200.0, "stalled_tokens": 100.0}, 300.0),
        ("queue", {"floor_tokens": 350.0, "stalled_tokens": 100.0}, 350.0),
        ("stall", {"floor_tokens": 200.0, "stalled_tokens": 250.0}, 500.0),
    ):
        await store.reserve(ask(endpoint, candidate(endpoint, tokens=300.0), sequences=2))
        got = await store.reserve(ask(f"{endpoint}, seen", candidate(endpoint, tokens=0.0, **floors)))
        assert got.backlog_tokens == pytest.approx(backlog, rel=1e-6)

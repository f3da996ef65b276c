"""Another endpoint serves a charge than the one picked: what it holds goes there, once and never below zero."""

import asyncio
from typing import Any

import pytest

from extproc.state.values import Load, Move
from tests.contract.conftest import World
from tests.contract.test_reserve import STILL, ask, candidate, end

LEASE_MS = 15_000


def to(endpoint: str, charge: str = "c1", replica: str = "r1", tokens: float = 100.0, rate: float = STILL) -> Move:
    """The move of a charge."""
    return Move("p", charge, replica, endpoint, tokens, rate)


async def test_a_charge_moves_with_all_it_holds(world: World) -> None:
    """Sequences, output tokens and prompt tokens leave the old endpoint; the new one gets its own prompt tokens."""
    store = world.store()
    await store.reserve(ask("other", candidate("a", tokens=40.0), sequences=2, output_tokens=8.0))
    await store.reserve(ask("c1", candidate("a", tokens=300.0), sequences=3, output_tokens=64.5))
    assert await world.store().move(to("b", tokens=900.0)) is True
    loads = await store.loads("p")
    assert {name: (load.running, load.output_tokens) for name, load in loads.items()} == {"a": (2, 8.0), "b": (3, 64.5)}
    assert [loads[name].backlog_tokens for name in "ab"] == pytest.approx([40.0, 900.0])


async def test_moving_to_where_it_is_changes_nothing(world: World) -> None:
    """Told twice, or of the endpoint that was picked, the second time changes nothing and is no failure."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a", tokens=300.0)))
    before = await store.loads("p")
    assert await store.move(to("a", tokens=7.0)) is True
    assert (await store.loads("p"))["a"].backlog_tokens == pytest.approx(before["a"].backlog_tokens)
    for _ in range(2):
        assert await store.move(to("b", tokens=50.0)) is True
    loads = await store.loads("p")
    assert set(loads) == {"b"}
    assert loads["b"].backlog_tokens == pytest.approx(50.0)


async def test_a_charge_that_is_not_open_is_not_moved(world: World) -> None:
    """One that ended, was never reserved, or belongs to another replica leaves no trace anywhere."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a", tokens=0.0)))
    assert await store.move(to("b", replica="r2")) is False
    await store.settle(end("c1"))
    assert await store.move(to("b")) is False
    assert await store.move(to("b", charge="ghost")) is False
    assert await store.loads("p") == {}


async def test_the_end_of_a_moved_charge_is_counted_where_it_is(world: World) -> None:
    """A settle with refund takes the charge's second number of tokens out of the second endpoint's backlog."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a", tokens=300.0)))
    await store.reserve(ask("c2", candidate("b", tokens=10.0)))
    await store.move(to("b", tokens=900.0))
    assert await store.settle(end("c1", refund=True)) is True
    loads = await store.loads("p")
    assert {name: load.running for name, load in loads.items()} == {"b": 1}
    assert loads["b"].backlog_tokens == pytest.approx(10.0)


async def test_a_moved_charge_is_counted_anew_where_it_is(world: World) -> None:
    """A count from the open charges finds it at the endpoint that serves it, and reaping takes it out there."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a", tokens=0.0), sequences=2, output_tokens=5.0))
    await store.move(to("b", tokens=0.0))
    world.age(10.0)
    await store.heartbeat("p", "r2", LEASE_MS)
    assert await store.loads("p") == {"b": Load(0.0, 2, 5.0)}
    world.age(10.0)
    assert (await store.heartbeat("p", "r2", LEASE_MS)).reaped == 1
    assert await store.loads("p") == {}


async def test_a_repeated_charge_is_told_where_it_is(world: World) -> None:
    """The same charge id again answers with the endpoint that serves it, and charges nothing."""
    store = world.store()
    first = await store.reserve(ask("c1", candidate("a", 1.5)))
    await store.move(to("b"))
    again = await store.reserve(ask("c1", candidate("a", 1.5)))
    assert (again.endpoint, again.cost_ms) == ("b", first.cost_ms)
    assert {name: load.running for name, load in (await store.loads("p")).items()} == {"b": 1}


async def test_what_has_drained_is_not_given_back(world: World) -> None:
    """The old endpoint owes nothing when its prefill was over: its backlog is not negative for the next one."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a", tokens=300.0, rate=10.0)))
    world.age(25.0)
    await store.move(to("b", tokens=0.0))
    await store.reserve(ask("c2", candidate("a", tokens=40.0)))
    assert (await store.loads("p"))["a"].backlog_tokens == pytest.approx(40.0)


async def test_the_new_endpoint_drains_at_its_own_rate(world: World) -> None:
    """1,000 tokens at 1 a second are between 600 and 100 after ten minutes."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a")))
    await store.move(to("b", tokens=1000.0, rate=1.0))
    world.age(600.0)
    assert 100.0 < (await store.loads("p"))["b"].backlog_tokens <= 400.0


async def test_moves_and_ends_at_once_leave_nothing(world: World) -> None:
    """Whatever the order of a charge's moves and its two ends, nothing is in flight afterwards, below zero nothing."""
    stores = [world.store() for _ in range(3)]
    for number in range(20):
        charge = f"c{number}"
        await stores[0].reserve(ask(charge, candidate("a", tokens=5.0), sequences=2, output_tokens=3.0))
        results = await asyncio.gather(
            stores[0].move(to("b", charge, tokens=5.0)),
            stores[1].settle(end(charge, refund=True)),
            stores[2].move(to("c", charge, tokens=5.0)),
            stores[0].settle(end(charge, refund=True)),
        )
        assert sorted([results[1], results[3]]) == [False, True]
    loads = await stores[0].loads("p")
    assert all(load.running == 0 and load.output_tokens == 0 for load in loads.values())
    assert all(load.backlog_tokens == pytest.approx(0.0, abs=0.01) for load in loads.values())


@pytest.mark.parametrize("wrong", [{"tokens": -1.0}, {"tokens": float("nan")}, {"rate": 0.0}, {"rate": float("inf")}])
async def test_moves_that_cannot_be_charged_are_refused(world: World, wrong: dict[str, Any]) -> None:
    """Numbers that no backlog can take are the caller's error; the charge stays where it is."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a")))
    with pytest.raises(ValueError, match="move"):
        await store.move(to("b", **wrong))
    assert set(await store.loads("p")) == {"a"}

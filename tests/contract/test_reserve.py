"""Reservations and their ends: what every store must do, whichever it is."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from extproc.state.pick import MAX_RUNNING
from extproc.state.values import Candidate, Load, Reserve, Settle
from tests.contract.conftest import World

# So slow that nothing drains while a test runs.
STILL = 1e-6


def candidate(
    endpoint: str, static_ms: float = 0.0, tokens: float = 100.0, rate: float = STILL, **floors: Any
) -> Candidate:
    """A candidate whose backlog does not drain during a test."""
    return Candidate(endpoint, static_ms, tokens, rate, **floors)


def ask(charge: str, *candidates: Candidate, replica: str = "r1", **others: Any) -> Reserve:
    """A reservation that ignores load unless told otherwise."""
    defaults: dict[str, Any] = {"backlog_weight": 0.0, "running_ms": 0.0}
    return Reserve("p", charge, replica, candidates, **(defaults | others))


def end(charge: str, replica: str = "r1", refund: bool = False) -> Settle:
    """The end of a charge."""
    return Settle("p", charge, replica, refund)


async def test_the_least_cost_is_picked(world: World) -> None:
    """Without load and pins the cheapest candidate by local knowledge wins."""
    got = await world.store().reserve(ask("c1", candidate("a", 5.0), candidate("b", 2.5), candidate("c", 3.0)))
    assert (got.endpoint, got.cost_ms, got.backlog_tokens, got.running) == ("b", 2.5, 0.0, 0)
    assert (got.pinned, got.moved, got.absent_pin) == (False, False, "")


async def test_costs_within_the_tie_go_to_the_first(world: World) -> None:
    """Among candidates within `tie_ms` of the least, the order of the candidates decides."""
    candidates = (candidate("a", 9.0), candidate("b", 3.0), candidate("c", 2.0))
    store = world.store()
    assert (await store.reserve(ask("c1", *candidates, tie_ms=1.0))).endpoint == "b"
    assert (await store.reserve(ask("c2", *candidates, tie_ms=0.5))).endpoint == "c"


async def test_requests_in_flight_cost(world: World) -> None:
    """Each running request adds `running_ms` to an endpoint's cost."""
    store = world.store()
    picks = [
        await store.reserve(ask(f"c{i}", candidate("a", 0.0), candidate("b", 3.0), running_ms=2.0)) for i in range(3)
    ]
    assert [(each.endpoint, each.cost_ms, each.running) for each in picks] == [
        ("a", 0.0, 0),
        ("a", 2.0, 1),
        ("b", 3.0, 0),
    ]


async def test_the_backlog_costs_what_it_takes_to_prefill(world: World) -> None:
    """A backlog of b tokens at rate r costs b / r * 1000 ms, times the weight."""
    store = world.store()
    await store.reserve(ask("c0", candidate("a", 0.0, tokens=4000.0, rate=0.001)))
    both = (candidate("a", 0.0, rate=2000.0), candidate("b", 1000.0, tokens=0.0))
    got = await store.reserve(ask("c1", *both, backlog_weight=1.0))
    assert got.endpoint == "b"
    got = await store.reserve(ask("c2", *both, backlog_weight=0.25))
    assert got.endpoint == "a"
    assert got.cost_ms == pytest.approx(500.0, rel=1e-3)
    assert got.backlog_tokens == pytest.approx(4000.0, rel=1e-3)


async def test_the_backlog_drains_with_time_and_stops_at_zero(world: World) -> None:
    """b(now) = max(0, b(t) - rate * (now - t))."""
    store = world.store()
    await store.reserve(ask("c0", candidate("a", tokens=1000.0, rate=1.0)))
    world.age(600.0)
    # Real time passes too while the test runs on a real server: up to five minutes of it do not matter.
    left = (await store.loads("p"))["a"].backlog_tokens
    assert 100.0 < left <= 400.0
    world.age(600.0)
    assert (await store.loads("p"))["a"] == Load(0.0, 1)


async def test_replicas_that_decide_at_once_do_not_herd(world: World) -> None:
    """Sixteen requests at the same moment from four replicas over eight idle engines: none gets more than four."""
    stores = [world.store() for _ in range(4)]
    engines = [candidate(f"e{i}", tokens=500.0) for i in range(8)]
    picks = await asyncio.gather(
        *(stores[i % 4].reserve(ask(f"c{i}", *engines, replica=f"r{i % 4}", backlog_weight=1.0)) for i in range(16))
    )
    assert max(Counter(pick.endpoint for pick in picks).values()) <= 4
    loads = await stores[0].loads("p")
    assert sum(load.running for load in loads.values()) == 16


async def test_the_same_charge_is_taken_once(world: World) -> None:
    """A repeated charge id answers with the first reservation and charges nothing more."""
    store = world.store()
    first = await store.reserve(ask("c1", candidate("a", 1.5), candidate("b", 2.0)))
    assert await store.reserve(ask("c1", candidate("a", 9.0), candidate("b", 0.0))) == first
    assert (await store.loads("p"))["a"].running == 1
    assert "b" not in await store.loads("p")


@pytest.mark.parametrize(
    "candidates",
    [
        (),
        tuple(candidate(f"e{i}") for i in range(33)),
        (candidate("a", rate=0.0),),
        (candidate("a", rate=float("nan")),),
        (candidate("a", tokens=-1.0),),
        (candidate("a", static_ms=float("inf")),),
        (candidate("a", floor_tokens=-1.0),),
        (candidate("a", floor_tokens=float("inf")),),
        (candidate("a", floor_running=-1),),
        (candidate("a", floor_running=MAX_RUNNING + 1),),
        (candidate("a", stalled_tokens=-1.0),),
        (candidate("a", stalled_tokens=float("nan")),),
    ],
)
async def test_candidates_that_cannot_be_priced_are_refused(world: World, candidates: tuple[Candidate, ...]) -> None:
    """No candidates, too many, or numbers that cannot be priced are the caller's error; nothing is charged."""
    store = world.store()
    with pytest.raises(ValueError, match="reserve"):
        await store.reserve(ask("c1", *candidates))
    assert await store.loads("p") == {}


@pytest.mark.parametrize(
    "held", [{"sequences": 0}, {"output_tokens": -1.0}, {"output_tokens": float("nan")}, {"max_pins": 0}]
)
async def test_charges_that_cannot_be_counted_are_refused(world: World, held: dict[str, Any]) -> None:
    """No sequence at all, output tokens that are no number, or no room for a pin: the caller's error, not charged."""
    store = world.store()
    with pytest.raises(ValueError, match=r"reserve|pins"):
        await store.reserve(ask("c1", candidate("a"), **held))
    assert await store.loads("p") == {}


async def test_settling_takes_the_request_out_of_flight(world: World) -> None:
    """A settled charge no longer counts as running; its backlog stays, because the prefill was done."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a", tokens=70.0)))
    assert await store.settle(end("c1")) is True
    loads = await store.loads("p")
    assert loads["a"].running == 0
    assert loads["a"].backlog_tokens == pytest.approx(70.0)


async def test_settling_twice_counts_once(world: World) -> None:
    """The second settle of a charge finds nothing and changes nothing."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a")))
    await store.reserve(ask("c2", candidate("a")))
    assert [await store.settle(end("c1")), await store.settle(end("c1"))] == [True, False]
    assert (await store.loads("p"))["a"].running == 1


async def test_settling_the_unknown_changes_nothing(world: World) -> None:
    """A charge never reserved, or reserved by another replica, is not found; no count goes below zero."""
    store = world.store()
    assert await store.settle(end("ghost", refund=True)) is False
    assert await store.loads("p") == {}
    await store.reserve(ask("c1", candidate("a")))
    assert await store.settle(end("c1", replica="r2")) is False
    assert (await store.loads("p"))["a"].running == 1


async def test_a_refund_gives_the_tokens_back(world: World) -> None:
    """A charge settled with `refund` takes its tokens out of the backlog, and only its own."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a", tokens=300.0)))
    await store.reserve(ask("c2", candidate("a", tokens=50.0)))
    await store.settle(end("c1", refund=True))
    assert (await store.loads("p"))["a"].backlog_tokens == pytest.approx(50.0)


async def test_a_late_refund_leaves_no_debt(world: World) -> None:
    """Tokens that have drained already are not given back: the backlog is never negative."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a", tokens=300.0, rate=10.0)))
    world.age(25.0)
    await store.settle(end("c1", refund=True))
    await store.reserve(ask("c2", candidate("a", tokens=40.0)))
    assert (await store.loads("p"))["a"].backlog_tokens == pytest.approx(40.0)


async def test_pools_do_not_share(world: World) -> None:
    """A charge in one pool is invisible in another, though the endpoint has the same id."""
    store = world.store()
    await store.reserve(ask("c1", candidate("a")))
    assert await store.loads("other") == {}

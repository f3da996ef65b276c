"""Since when endpoints are there: who is slowed in, and who has always been there."""

import pytest

from extproc.clock import ManualClock
from extproc.fleet.membership import Membership
from extproc.state.endpoint import EndpointState, encode
from extproc.upkeep import Arrivals, Upkeep
from tests.unit.top.parts import config, surroundings

ONE, TWO, THREE = "10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"


def states(**started_at: float) -> dict[str, EndpointState]:
    """States of endpoints a, b and so on whose engines started then."""
    return {name: EndpointState(destination=name, started_at=at) for name, at in started_at.items()}


def test_whoever_is_there_at_the_first_look_has_been_there_long() -> None:
    """A worker that starts slows nobody in, whatever its engines' start times are."""
    arrivals = Arrivals()
    arrivals.look("main", "abc", states(a=5.0, b=999.0), 1000.0)
    arrivals.look("main", "abc", states(a=5.0, b=999.0), 1001.0)
    assert arrivals.joined == {"main": {}}


def test_later_joiners_are_known_since_they_came() -> None:
    """Their time is that of the first look that saw them, and stays."""
    arrivals = Arrivals()
    for now, members in ((1000.0, "a"), (1001.0, "ab"), (1002.0, "abc"), (1003.0, "abc")):
        arrivals.look("main", members, {}, now)
    assert arrivals.joined["main"] == {"b": 1001.0, "c": 1002.0}


def test_a_restart_is_an_arrival() -> None:
    """An engine with another start time than before begins anew; learning its start time for once is no restart."""
    arrivals = Arrivals()
    for now, seen in ((1000.0, {}), (1001.0, states(a=500.0, b=0.0)), (1002.0, states(a=500.0, b=600.0))):
        arrivals.look("main", "ab", seen, now)
        assert arrivals.joined["main"] == {}
    arrivals.look("main", "ab", states(a=1002.5, b=600.0), 1003.0)
    arrivals.look("main", "ab", {}, 1004.0)
    arrivals.look("main", "ab", states(a=1002.5, b=600.0), 1005.0)
    assert arrivals.joined["main"] == {"a": 1003.0}


def test_one_that_left_joins_again() -> None:
    """It is forgotten while it is away, and slowed in when it comes back."""
    arrivals = Arrivals()
    for now, members in ((1000.0, "ab"), (1001.0, "a"), (1002.0, "ab")):
        arrivals.look("main", members, states(b=5.0), now)
    assert arrivals.joined["main"] == {"b": 1002.0}
    arrivals.look("main", "a", {}, 1003.0)
    assert arrivals.joined["main"] == {}


def test_pools_are_apart() -> None:
    """The first look at each pool is its own."""
    arrivals = Arrivals()
    arrivals.look("one", "a", {}, 1000.0)
    arrivals.look("two", "ab", {}, 1001.0)
    arrivals.look("one", "ab", {}, 1002.0)
    assert arrivals.joined == {"one": {"b": 1002.0}, "two": {}}


async def test_a_worker_slows_in_what_joins_and_restarts() -> None:
    """From the store to the snapshot: a tenth of the speed at first, and all of it after `ramp_s`."""
    clock, around = ManualClock(), surroundings()
    upkeep = Upkeep(around, Membership(), clock)

    async def shares(*endpoints: str, started_at: float) -> dict[str, float]:
        seen = EndpointState(destination=ONE, scraped_at=clock.wall(), started_at=started_at)
        await around.store.put_states("main", {ONE: encode(seen)})
        await upkeep.apply(config(pools={"main": {"endpoints": list(endpoints)}}, routing={"ramp_s": 10.0}))
        return {each.id: each.slowed for each in around.fleet.pools["main"].endpoints}

    assert await shares(ONE, TWO, started_at=100.0) == {ONE: 1.0, TWO: 1.0}
    assert await shares(ONE, TWO, THREE, started_at=100.0) == {ONE: 1.0, TWO: 1.0, THREE: 0.1}
    clock.advance(5.0)
    assert await shares(ONE, TWO, THREE, started_at=200.0) == {ONE: 0.1, TWO: 1.0, THREE: pytest.approx(0.5)}
    clock.advance(10.0)
    assert await shares(ONE, TWO, THREE, started_at=200.0) == {ONE: 1.0, TWO: 1.0, THREE: 1.0}

"""What a keeper believes to hold: never longer than the store, and never more than it asked for."""

import math
from collections.abc import Collection

import pytest

from extproc.fleet.holding import Holding
from tests.unit.fleet.parts import Shelf, SkewedClock, configuration

WORK = {"main": ["a", "b"]}
LEASE_S = 3.0


class SlowShelf(Shelf):
    """A store whose answers take their time."""

    takes_s = 0.0

    def __init__(self, clock: SkewedClock) -> None:
        super().__init__(clock)
        self.clock = clock
        self.calls = 0

    async def hold(self, pool: str, group: str, holder: str, names: Collection[str], lease_ms: int) -> Collection[str]:
        """See `Store.hold`."""
        self.calls += 1
        got = await super().hold(pool, group, holder, names, lease_ms)
        self.clock.advance(self.takes_s)
        return got


@pytest.fixture
def clock() -> SkewedClock:
    """The clock of all."""
    return SkewedClock()


@pytest.fixture
def shelf(clock: SkewedClock) -> SlowShelf:
    """The store of all."""
    return SlowShelf(clock)


def keeper(shelf: SlowShelf, name: str = "k") -> Holding:
    """One keeper's share."""
    holding = Holding(shelf, "scrape", name, shelf.clock)
    holding.apply(configuration(main=["10.0.0.1:80"]))
    return holding


async def test_a_lease_counts_from_before_its_call(shelf: SlowShelf, clock: SkewedClock) -> None:
    """However long the answer took, it ends here before it can end in the store."""
    holding = keeper(shelf)
    shelf.takes_s = 1.0
    await holding.renew(WORK)
    assert holding.held("main") == {"a", "b"}
    clock.advance(LEASE_S - 1.0)
    assert holding.held("main") == set()


async def test_an_answer_that_comes_after_its_lease_is_worth_nothing(shelf: SlowShelf) -> None:
    """Nothing is held then, not even for a moment."""
    holding = keeper(shelf)
    shelf.takes_s = LEASE_S
    await holding.renew(WORK)
    assert holding.held("main") == set()


async def test_names_count_as_taken_over_when_another_may_have_had_them(shelf: SlowShelf, clock: SkewedClock) -> None:
    """At first, and after a lease that was over when the answer came; not while it is renewed in time."""
    holding = keeper(shelf)
    assert await holding.renew(WORK) == {"main": {"a", "b"}}
    clock.advance(1.0)
    assert await holding.renew(WORK) == {"main": set()}
    assert await holding.renew({"main": ["a", "b", "c"]}) == {"main": {"c"}}
    clock.advance(LEASE_S)
    assert await holding.renew(WORK) == {"main": {"a", "b"}}
    clock.advance(1.0)
    shelf.takes_s = LEASE_S - 1.0
    assert await holding.renew(WORK) == {"main": {"a", "b"}}


async def test_names_that_are_not_asked_for_are_let_go_whatever_the_store_says(shelf: SlowShelf) -> None:
    """The call may have been carried out although it failed."""
    holding = keeper(shelf)
    await holding.renew(WORK)
    shelf.down = True
    await holding.renew({"main": ["a"]})
    assert holding.held("main") == holding.own("main") == {"a"}


async def test_calls_are_rare_while_nothing_changes(shelf: SlowShelf, clock: SkewedClock) -> None:
    """Ten a lease after a change, three a lease from then on, and one at once when the work changes."""
    holding = keeper(shelf)

    async def calls(seconds: float) -> int:
        before = shelf.calls
        for _ in range(math.ceil(seconds * 20)):
            if holding.due(WORK):
                await holding.renew(WORK)
            clock.advance(0.05)
        return shelf.calls - before

    assert 8 <= await calls(LEASE_S) <= 11
    assert 2 <= await calls(LEASE_S) <= 4
    assert not holding.due(WORK)
    assert holding.due({"main": ["a"]})


async def test_two_share_what_both_see(shelf: SlowShelf) -> None:
    """And one that leaves has nothing."""
    one, two = keeper(shelf, "1"), keeper(shelf, "2")
    for _ in range(3):
        for each in (one, two):
            await each.renew(WORK)
    assert one.held("main") | two.held("main") == {"a", "b"}
    assert not one.held("main") & two.held("main")
    await one.leave()
    assert one.held("main") == one.own("main") == set()
    await two.renew(WORK)
    assert two.held("main") == {"a", "b"}


async def test_a_store_that_is_gone_does_not_keep_anybody_from_leaving(shelf: SlowShelf) -> None:
    """The keeper holds nothing afterwards; others wait for the end of its lease."""
    holding = keeper(shelf)
    await holding.renew(WORK)
    shelf.down = True
    await holding.leave()
    assert holding.held("main") == holding.own("main") == set()

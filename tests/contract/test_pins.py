"""Session pins: shared, sliding, sticky until saturated."""

import asyncio

import pytest

from extproc.state.pick import PINS_TRIMMED
from extproc.state.store import Store
from extproc.state.values import Reserve
from tests.contract.conftest import World
from tests.contract.test_reserve import ask, candidate

A_FIRST = (candidate("a", 0.0), candidate("b", 100.0))
B_FIRST = (candidate("a", 100.0), candidate("b", 0.0))


async def test_a_pin_holds_on_every_replica(world: World) -> None:
    """The second turn goes to the same endpoint, whichever replica handles it, although another is cheaper."""
    one, two = world.store(), world.store()
    first = await one.reserve(ask("c1", *A_FIRST, pin_key="s"))
    second = await two.reserve(ask("c2", *B_FIRST, pin_key="s", replica="r2"))
    assert (first.endpoint, first.pinned, first.moved) == ("a", False, False)
    assert (second.endpoint, second.cost_ms, second.pinned, second.moved) == ("a", 100.0, True, False)


async def test_requests_without_a_session_are_not_pinned(world: World) -> None:
    """An empty pin key neither makes nor follows a pin."""
    store = world.store()
    await store.reserve(ask("c1", *A_FIRST))
    assert (await store.reserve(ask("c2", *B_FIRST))).endpoint == "b"


async def test_a_saturated_endpoint_loses_its_pin(world: World) -> None:
    """A pin dearer than the least by more than `break_out_ms` breaks, and the session stays where it went."""
    store = world.store()
    await store.reserve(ask("c1", *A_FIRST, pin_key="s"))
    at_limit = await store.reserve(ask("c2", *B_FIRST, pin_key="s", break_out_ms=100.0))
    assert (at_limit.endpoint, at_limit.pinned) == ("a", True)
    broken = await store.reserve(ask("c3", *B_FIRST, pin_key="s", break_out_ms=99.0))
    assert (broken.endpoint, broken.pinned, broken.moved) == ("b", False, True)
    after = await store.reserve(ask("c4", *A_FIRST, pin_key="s"))
    assert (after.endpoint, after.pinned) == ("b", True)


async def test_a_strict_pin_never_breaks(world: World) -> None:
    """`strict` holds at any price."""
    store = world.store()
    await store.reserve(ask("c1", *A_FIRST, pin_key="s"))
    got = await store.reserve(ask("c2", *B_FIRST, pin_key="s", break_out_ms=0.0, strict=True))
    assert (got.endpoint, got.pinned) == ("a", True)


async def test_a_pin_outside_the_candidates_is_named_and_nothing_charged(world: World) -> None:
    """The caller learns the absent endpoint and asks again; the first call leaves no trace."""
    store = world.store()
    await store.reserve(ask("c1", *A_FIRST, pin_key="s"))
    got = await store.reserve(ask("c2", candidate("b"), candidate("c"), pin_key="s"))
    assert (got.endpoint, got.absent_pin) == ("", "a")
    assert set(await store.loads("p")) == {"a"}
    again = await store.reserve(ask("c2", candidate("b"), candidate("a", 50.0), pin_key="s"))
    assert (again.endpoint, again.pinned) == ("a", True)


async def test_an_ignored_pin_is_replaced(world: World) -> None:
    """`ignore_pin` decides as if there were none, says that the session moved, and pins the result."""
    store = world.store()
    await store.reserve(ask("c1", *A_FIRST, pin_key="s"))
    got = await store.reserve(ask("c2", candidate("b"), candidate("c", 1.0), pin_key="s", ignore_pin=True))
    assert (got.endpoint, got.pinned, got.moved, got.absent_pin) == ("b", False, True, "")
    assert (await store.reserve(ask("c3", *A_FIRST, pin_key="s"))).endpoint == "b"
    stayed = await store.reserve(ask("c4", *B_FIRST, pin_key="s", ignore_pin=True))
    assert (stayed.endpoint, stayed.pinned, stayed.moved) == ("b", False, False)


async def _turn(store: Store, charge: str) -> str:
    got = await store.reserve(ask(charge, *B_FIRST, pin_key="s", pin_ttl_ms=1_800_000))
    return got.endpoint


async def test_a_pin_slides_with_use_and_ends_without(world: World) -> None:
    """Each turn starts the pin's life anew; a session idle for longer is free again."""
    store = world.store()
    await store.reserve(ask("c1", *A_FIRST, pin_key="s", pin_ttl_ms=1_800_000))
    for turn in range(3):
        world.age(1200.0)
        assert await _turn(store, f"t{turn}") == "a"
    world.age(1800.0)
    assert await _turn(store, "late") == "b"


async def test_each_turn_pins_the_next(world: World) -> None:
    """A conversation is followed from key to key: each turn is found under the key that the one before left."""
    one, two = world.store(), world.store()
    first = await one.reserve(ask("c1", *A_FIRST, next_pin_key="t1"))
    second = await two.reserve(ask("c2", *B_FIRST, pin_key="t1", next_pin_key="t2", replica="r2"))
    third = await one.reserve(ask("c3", *B_FIRST, pin_key="t2", next_pin_key="t3"))
    assert [(each.endpoint, each.pinned, each.moved) for each in (first, second, third)] == [
        ("a", False, False),
        ("a", True, False),
        ("a", True, False),
    ]


async def test_a_key_only_to_be_written_is_not_honoured(world: World) -> None:
    """With `next_pin_key` alone the pick is free and not called moved, and replaces the pin that stood there."""
    store = world.store()
    await store.reserve(ask("c1", *A_FIRST, next_pin_key="t"))
    got = await store.reserve(ask("c2", *B_FIRST, next_pin_key="t"))
    assert (got.endpoint, got.pinned, got.moved) == ("b", False, False)
    assert (await store.reserve(ask("c3", candidate("c"), next_pin_key="t"))).absent_pin == ""
    assert (await store.reserve(ask("c4", *A_FIRST, pin_key="t"))).absent_pin == "c"


async def test_branches_of_a_conversation_find_the_pin_they_grew_from(world: World) -> None:
    """The key that was asked for stays as it is, so a repeated turn and a second branch find it, even after a move."""
    store = world.store()
    await store.reserve(ask("c1", *A_FIRST, next_pin_key="t1"))
    moved = await store.reserve(ask("c2", *B_FIRST, pin_key="t1", next_pin_key="t2", break_out_ms=0.0))
    assert (moved.endpoint, moved.pinned, moved.moved) == ("b", False, True)
    branch = await store.reserve(ask("c3", *B_FIRST, pin_key="t1", next_pin_key="t3"))
    assert (branch.endpoint, branch.pinned) == ("a", True)
    along = await store.reserve(ask("c4", *A_FIRST, pin_key="t2", next_pin_key="t4"))
    assert (along.endpoint, along.pinned) == ("b", True)


async def test_a_pin_that_was_followed_on_does_not_slide(world: World) -> None:
    """The old key ends with its own life, and the next one has a whole life of its own."""
    store = world.store()
    await store.reserve(ask("c1", *A_FIRST, next_pin_key="t1", pin_ttl_ms=1_800_000))
    world.age(1200.0)
    await store.reserve(ask("c2", *B_FIRST, pin_key="t1", next_pin_key="t2", pin_ttl_ms=1_800_000))
    world.age(1200.0)
    late = await store.reserve(ask("c3", *B_FIRST, pin_key="t1", next_pin_key="t3"))
    assert (late.endpoint, late.pinned, late.moved) == ("b", False, False)
    assert (await store.reserve(ask("c4", *B_FIRST, pin_key="t2"))).endpoint == "a"


async def test_only_a_live_pin_elsewhere_is_a_move(world: World) -> None:
    """A first turn, and a pin ignored in favour of the same endpoint, move nothing; an absent pin pins nothing."""
    store = world.store()
    assert (await store.reserve(ask("c1", *A_FIRST, pin_key="new", next_pin_key="t1"))).moved is False
    stayed = await store.reserve(ask("c2", *A_FIRST, pin_key="t1", next_pin_key="t2", ignore_pin=True))
    assert (stayed.endpoint, stayed.pinned, stayed.moved) == ("a", False, False)
    absent = await store.reserve(ask("c3", candidate("b"), pin_key="t2", next_pin_key="t3"))
    assert (absent.endpoint, absent.absent_pin) == ("", "a")
    assert (await store.reserve(ask("c4", *B_FIRST, pin_key="t3"))).endpoint == "b"
    left = await store.reserve(ask("c3", candidate("b"), pin_key="t2", next_pin_key="t3", ignore_pin=True))
    assert (left.endpoint, left.moved) == ("b", True)


async def test_two_replicas_that_pin_at_once_agree(world: World) -> None:
    """Of two first turns of one session at the same moment, one decides and the other follows."""
    one, two = world.store(), world.store()
    asks: list[Reserve] = [
        ask("c1", *A_FIRST, pin_key="s"),
        ask("c2", *B_FIRST, pin_key="s", replica="r2"),
    ]
    first, second = await asyncio.gather(one.reserve(asks[0]), two.reserve(asks[1]))
    assert first.endpoint == second.endpoint
    assert sorted([first.pinned, second.pinned]) == [False, True]


async def test_a_session_can_be_pinned_without_a_decision(world: World) -> None:
    """`pin` says where a session went, whatever it was pinned to, for every replica and for its whole life."""
    one, two = world.store(), world.store()
    await one.reserve(ask("c1", *A_FIRST, pin_key="s"))
    await two.pin("p", "s", "b", 1_800_000)
    got = await one.reserve(ask("c2", *A_FIRST, pin_key="s"))
    assert (got.endpoint, got.pinned) == ("b", True)
    await one.pin("p", "fresh", "a", 1_800_000)
    assert (await two.reserve(ask("c3", *B_FIRST, pin_key="fresh"))).endpoint == "a"
    world.age(1801.0)
    assert await one.pinned("p", "fresh") == ""


async def test_a_pin_is_read_and_lives_no_longer_for_it(world: World) -> None:
    """Who asks renews nothing: the pin ends when it would have; sessions and pools without one have none."""
    store = world.store()
    await store.reserve(ask("c1", *A_FIRST, pin_key="s", pin_ttl_ms=1_800_000))
    for _ in range(3):
        world.age(500.0)
        assert await store.pinned("p", "s") == "a"
    assert await store.pinned("p", "other") == await store.pinned("q", "s") == ""
    world.age(500.0)
    assert await store.pinned("p", "s") == ""


async def pinned(store: Store, *sessions: str) -> dict[str, str]:
    """What the sessions that have a pin are pinned to."""
    found = {session: await store.pinned("p", session) for session in sessions}
    return {session: endpoint for session, endpoint in found.items() if endpoint}


async def test_pins_are_bounded_and_the_one_used_longest_ago_goes(world: World) -> None:
    """More sessions than `max_pins` do not grow the table; use keeps a pin, being read does not."""
    one, two = world.store(), world.store()
    for charge, session in enumerate(["old", "older", "old", "new"]):
        await (one, two)[charge % 2].reserve(ask(f"c{charge}", *A_FIRST, pin_key=session, max_pins=2))
        assert await one.pinned("p", "older") == ("a" if charge in {1, 2} else "")
    assert await pinned(two, "old", "older", "new") == {"old": "a", "new": "a"}
    await two.pin("p", "newest", "b", 60_000, max_pins=2)
    assert await pinned(one, "old", "older", "new", "newest") == {"new": "a", "newest": "b"}


async def test_a_turn_that_only_asks_for_a_pin_leaves_its_place_in_the_order(world: World) -> None:
    """Keys that were followed on are given up before those written after them."""
    store = world.store()
    for charge, (asked, written) in enumerate([("", "t1"), ("", "u1"), ("t1", "t2")]):
        await store.reserve(ask(f"c{charge}", *A_FIRST, pin_key=asked, next_pin_key=written, max_pins=2))
    assert await pinned(store, "t1", "u1", "t2") == {"u1": "a", "t2": "a"}


async def test_a_lowered_bound_is_reached_a_few_pins_at_a_time(world: World) -> None:
    """Each added pin takes the place of some, so that no decision waits for thousands to go."""
    store = world.store()
    sessions = [f"s{number}" for number in range(2 * PINS_TRIMMED + 2)]
    for number, session in enumerate(sessions):
        await store.reserve(ask(f"c{number}", *A_FIRST, pin_key=session))
    left = []
    for number in range(3):
        await store.pin("p", f"t{number}", "a", 60_000, max_pins=3)
        left.append(len(await pinned(store, *sessions)))
    assert left == [PINS_TRIMMED + 2, 2, 0]
    assert await pinned(store, "t0", "t1", "t2") == {"t0": "a", "t1": "a", "t2": "a"}


async def test_pools_have_rooms_of_their_own(world: World) -> None:
    """A full table of one pool takes no pin from another."""
    store = world.store()
    await store.pin("q", "s", "a", 60_000, max_pins=1)
    for number in range(3):
        await store.pin("p", f"s{number}", "a", 60_000, max_pins=1)
    assert await store.pinned("q", "s") == "a"
    assert await pinned(store, "s0", "s1", "s2") == {"s2": "a"}


async def test_a_table_without_room_is_refused(world: World) -> None:
    """A bound below one pin is the caller's error."""
    with pytest.raises(ValueError, match="pins"):
        await world.store().pin("p", "s", "a", 60_000, max_pins=0)

"""Shared work: one living holder a name, equal shares, nothing moves without need, and the dead lose all."""

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from typing import Any

import msgspec
import pytest

from extproc.state.store import Store
from tests.contract.conftest import World
from tests.contract.sharing import NAMES, Shared
from tests.valkey import Valkey

LEASE_MS = 3_000


async def hold(store: Store, holder: str, names: Collection[str] = NAMES, group: str = "scrape") -> set[str]:
    """One call of one holder."""
    return set(await store.hold("p", group, holder, names, LEASE_MS))


async def rounds(world: World, *holders: str, times: int = 3) -> dict[str, set[str]]:
    """Let holders call in turn; returns what each has in the end."""
    held: dict[str, set[str]] = {}
    for _ in range(times):
        held = {holder: await hold(world.store(), holder) for holder in holders}
    return held


def sizes(held: Mapping[str, Collection[str]]) -> list[int]:
    """How many names each has, most first."""
    return sorted((len(names) for names in held.values()), reverse=True)


async def test_the_first_has_all_and_keeps_it(world: World) -> None:
    """Alone, a holder has everything, call after call."""
    for _ in range(5):
        assert await hold(world.store(), "a") == set(NAMES)
        world.age(1.0)


async def test_who_joins_takes_a_share_from_those_above_theirs(world: World) -> None:
    """One more holder moves no more names than its share, and none between the others."""
    before = await rounds(world, "a", "b", "c")
    assert sizes(before) == [4, 4, 4]
    after = await rounds(world, "a", "b", "c", "d")
    assert sizes(after) == [3, 3, 3, 3]
    assert all(after[holder] < before[holder] for holder in before)
    assert await rounds(world, "d", "c", "b", "a") == after


async def test_names_move_only_after_their_owner_was_told(world: World) -> None:
    """Until the owner has called again, a newcomer gets nothing of what it has."""
    assert await hold(world.store(), "a") == set(NAMES)
    assert await hold(world.store(), "b") == set()
    assert await hold(world.store(), "b") == set()
    kept = await hold(world.store(), "a")
    assert await hold(world.store(), "b") == set(NAMES) - kept
    assert len(kept) == 6


async def test_a_dead_holders_names_go_to_the_living_at_their_next_call(world: World) -> None:
    """Within the lease nothing changes; past it, the first call takes over, and the shares even out."""
    held = await rounds(world, "a", "b", "c")
    world.age(2.0)
    assert await hold(world.store(), "a") == held["a"]
    assert await hold(world.store(), "b") == held["b"]
    world.age(2.0)
    assert await hold(world.store(), "a") == held["a"] | held["c"]
    after = await rounds(world, "b", "a")
    assert sizes(after) == [6, 6]
    assert held["b"] < after["b"]


async def test_who_leaves_gives_all_up_at_once(world: World) -> None:
    """An empty call is a farewell; leaving twice, or without having been there, changes nothing."""
    held = await rounds(world, "a", "b")
    assert await hold(world.store(), "b", ()) == set()
    assert await hold(world.store(), "a") == set(NAMES)
    assert await hold(world.store(), "b", ()) == await hold(world.store(), "c", ()) == set()
    assert await hold(world.store(), "a") == held["a"] | held["b"]


async def test_who_was_promised_names_and_dies_leaves_them_where_they_are(world: World) -> None:
    """An owner that no heir waits for any more keeps what it has."""
    await hold(world.store(), "a")
    assert await hold(world.store(), "b") == set()
    world.age(2.0)
    await hold(world.store(), "c", ["other"])
    assert await hold(world.store(), "b", ()) == set()
    assert await hold(world.store(), "a") == set(NAMES)


async def test_who_was_promised_names_and_sees_them_no_more_leaves_them_where_they_are(world: World) -> None:
    """An heir that stops asking for a name is none."""
    await hold(world.store(), "a")
    assert await hold(world.store(), "b") == set()
    assert await hold(world.store(), "b", ["other"]) == {"other"}
    assert await hold(world.store(), "a") == set(NAMES)


async def test_a_late_holder_keeps_what_nobody_took(world: World) -> None:
    """A lease that ran out unnoticed is taken up again; one that was noticed is not."""
    await hold(world.store(), "a")
    world.age(4.0)
    assert await hold(world.store(), "a") == set(NAMES)
    world.age(4.0)
    assert await hold(world.store(), "b") == set(NAMES)
    assert await hold(world.store(), "a") == set()


async def test_names_that_are_not_asked_for_are_given_up(world: World) -> None:
    """At once, to whoever sees them; a name that nobody sees is forgotten, and is nobody's when it comes back."""
    assert await hold(world.store(), "a") == set(NAMES)
    assert await hold(world.store(), "a", NAMES[:4]) == set(NAMES[:4])
    assert await hold(world.store(), "b", NAMES[4:8]) == set(NAMES[4:8])
    assert await hold(world.store(), "a", [*NAMES[:4], NAMES[8]]) == {*NAMES[:4], NAMES[8]}


async def test_holders_that_see_different_names_leave_none_out(world: World) -> None:
    """A change of names reaches holders at different times: whoever sees a name that nobody has, takes it."""
    few, other = NAMES[:2], NAMES[2:]
    for _ in range(3):
        first = await hold(world.store(), "a", few)
        second = await hold(world.store(), "b", NAMES)
    assert first | second == set(NAMES)
    assert not first & second
    assert second >= set(other)


async def test_pools_and_groups_share_nothing(world: World) -> None:
    """The same names in another pool or group are other work."""
    store = world.store()
    assert await hold(store, "a") == set(NAMES)
    assert await hold(store, "b", group="events") == set(NAMES)
    assert set(await store.hold("q", "scrape", "b", NAMES, LEASE_MS)) == set(NAMES)


async def test_a_name_counts_once(world: World) -> None:
    """However often it is listed."""
    assert list(await world.store().hold("p", "scrape", "a", ["x", "y", "x"], LEASE_MS)) == ["x", "y"]


async def test_many_names_and_holders(world: World) -> None:
    """A thousand names, sixteen holders: even shares after three calls each."""
    names = [f"10.0.{number // 250}.{number % 250}:8000" for number in range(1_000)]
    held: dict[str, set[str]] = {}
    for _ in range(3):
        held = {f"h{number}": await hold(world.store(), f"h{number}", names) for number in range(16)}
    assert sizes(held) == [63] * 8 + [62] * 8
    assert set().union(*held.values()) == set(names)


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    """A server whose keys are damaged at will."""
    with Valkey() as running:
        yield running


@pytest.fixture
async def shared(server: Valkey) -> AsyncIterator[Shared]:
    """Fresh keys."""
    shared = Shared(server.port)
    await shared.store.ping()
    yield shared
    await shared.close()


async def test_an_answer_that_is_lost_gives_no_name_to_two(shared: Shared) -> None:
    """Told to stop but deaf, a holder believes in its lease: until that is over nobody else has the names."""
    assert await hold(shared.store, "a") == set(NAMES)
    assert await hold(shared.store, "b") == set()
    shared.age(1.0)
    shared.unheard("a", NAMES, LEASE_MS)
    assert await hold(shared.store, "b") == set()
    shared.age(1.0)
    shared.unheard("a", NAMES, LEASE_MS)
    assert await hold(shared.store, "b") == set()
    shared.age(1.0)
    assert len(await hold(shared.store, "b")) == 6
    assert len(await hold(shared.store, "a")) == 6


async def test_an_answer_that_arrives_frees_the_names_at_once(shared: Shared) -> None:
    """After a lost answer, the next one that is heard is enough."""
    await hold(shared.store, "a")
    await hold(shared.store, "b")
    shared.unheard("a", NAMES, LEASE_MS)
    kept = await hold(shared.store, "a")
    assert await hold(shared.store, "b") == set(NAMES) - kept


async def test_a_clock_set_back_keeps_no_dead_holder(shared: Shared) -> None:
    """A lease that ends later than any lease can is cut to a whole one from now."""
    await rounds_of(shared.store, "a", "b")
    shared.raw.zadd(shared.holders, {"b": 9e15})
    await hold(shared.store, "a")
    shared.age(3.0)
    assert await hold(shared.store, "a") == set(NAMES)


async def rounds_of(store: Store, *holders: str) -> None:
    """Let holders call in turn until they have even shares."""
    for _ in range(3):
        for holder in holders:
            await hold(store, holder)


_NAMED = dict.fromkeys(NAMES, 1)
_TABLES: dict[str, Any] = {
    "nil": None,
    "number": 7,
    "no holders": [[], _NAMED, {}, {}],
    "holders": [{"x": 1}, _NAMED, {}, {}],
    "names": [
        [["a", 3000], ["b", "x"], 7],
        {1: 1, "y": "z", **_NAMED},
        {"q": 3, NAMES[0]: [1]},
        {"y": "a"},
    ],
    "ids": [[[5, 3000]], _NAMED, {}, {}],
    "ends": [[["a", 3000], ["b", 3000]], _NAMED, {NAMES[1]: 2}, {NAMES[1]: "later"}],
}


def _replaced(key: str, make: Callable[[Any, str], object]) -> Callable[[Shared], None]:
    def damage(shared: Shared) -> None:
        name: str = getattr(shared, key)
        shared.raw.delete(name)
        make(shared.raw, name)

    return damage


def _holding(value: bytes) -> Callable[[Shared], None]:
    return _replaced("holdings", lambda raw, name: raw.set(name, value))


def _ghost(lease_ms: float) -> Callable[[Shared], None]:
    """A holder that nobody is has all names, and says that it lives for so long after each call."""

    def damage(shared: Shared) -> None:
        table = [[["ghost", lease_ms]], dict.fromkeys(NAMES, 1), {}, {}]
        shared.raw.set(shared.holdings, msgspec.msgpack.encode(table))
        shared.raw.zadd(shared.holders, {"ghost": "inf"})

    return damage


_DAMAGE: dict[str, Callable[[Shared], None]] = {
    **{label: _holding(msgspec.msgpack.encode(value)) for label, value in _TABLES.items()},
    "leases without end": _ghost(1e18),
    "leases of ages": _ghost(1e15),
    "leases of nothing": _ghost(float("nan")),
    "text": _holding(b"nonsense"),
    "empty": _holding(b""),
    "cut": _holding(msgspec.msgpack.encode([[["a", 3000]], _NAMED, {}, {}])[:-9]),
    "type of the table": _replaced("holdings", lambda raw, name: raw.lpush(name, 1)),
    "type of leases": _replaced("holders", lambda raw, name: raw.set(name, 1)),
    "leases": _replaced("holders", lambda raw, name: raw.zadd(name, {"a": "inf", "b": "-inf", "": 3e12})),
}


@pytest.mark.parametrize("break_it", _DAMAGE.values(), ids=_DAMAGE)
async def test_damaged_keys_heal(shared: Shared, break_it: Callable[[Shared], object]) -> None:
    """Whatever stands in the keys, all names have one holder again after a lease."""
    await rounds_of(shared.store, "a", "b")
    break_it(shared)
    await rounds_of(shared.store, "a", "b")
    shared.age(2.0)
    await rounds_of(shared.store, "a", "b")
    shared.age(2.0)
    await rounds_of(shared.store, "a", "b")
    first, second = await hold(shared.store, "a"), await hold(shared.store, "b")
    assert (len(first), len(second)) == (6, 6)
    assert first | second == set(NAMES)


async def test_the_keys_carry_the_pools_hash_tag(shared: Shared) -> None:
    """So that a cluster keeps them together, and lets one script change both."""
    await hold(shared.store, "a")
    keys = {key.decode() for key in shared.raw.scan_iter(f"{shared.prefix}:*")}
    assert keys == {f"{shared.prefix}:{{p}}:hold:scrape", f"{shared.prefix}:{{p}}:hold:scrape:leases"}


async def test_nothing_stays_of_holders_that_are_gone(shared: Shared) -> None:
    """Both keys end some leases after the last call."""
    await hold(shared.store, "a")
    left = [shared.raw.pttl(key) for key in (shared.holders, shared.holdings)]
    assert all(0 < each <= 4 * LEASE_MS for each in left)

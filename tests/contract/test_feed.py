"""States and the feed of deltas."""

import asyncio

from extproc.state.store import READ_LIMIT
from tests.contract.conftest import World

LONG_MS = 60_000


async def test_states_replace_only_what_is_given(world: World) -> None:
    """Publishing some endpoints' states leaves the others' as they were, on every replica."""
    one, two = world.store(), world.store()
    assert await one.states("p") == {}
    await one.put_states("p", {"a": b"1", "b": b"\x00\xff"})
    await two.put_states("p", {"a": b"2"})
    await two.put_states("p", {})
    assert await one.states("p") == {"a": b"2", "b": b"\x00\xff"}
    assert await one.states("other") == {}


async def test_states_are_taken_back(world: World) -> None:
    """What was published of an endpoint is gone on every replica; unknown names and other endpoints do not matter."""
    one, two = world.store(), world.store()
    await one.put_states("p", {"a": b"1", "b": b"2"})
    await two.drop_states("p", ["a", "ghost"])
    await two.drop_states("p", [])
    assert await one.states("p") == {"b": b"2"}


async def test_the_feed_keeps_its_order(world: World) -> None:
    """Entries are read in the order in which they were appended, from any position on."""
    one, two = world.store(), world.store()
    ids = [await one.append("p", b"\x00%d" % i, 100) for i in range(5)]
    everything = await two.read("p", "0", 0)
    assert [(each.id, each.payload) for each in everything] == [(ids[i], b"\x00%d" % i) for i in range(5)]
    assert [each.payload for each in await two.read("p", ids[2], 0)] == [b"\x003", b"\x004"]
    assert list(await two.read("p", ids[4], 0)) == []
    assert list(await two.read("other", "0", 0)) == []


async def test_the_feed_is_capped(world: World) -> None:
    """About the newest `cap` entries are kept: all of those, and not many more."""
    store = world.store()
    for i in range(600):
        await store.append("p", b"%d" % i, 50)
    kept = [each.payload for each in await store.read("p", "0", 0)]
    assert kept[-50:] == [b"%d" % i for i in range(550, 600)]
    assert len(kept) < 300


async def test_one_read_returns_the_oldest_entries_only(world: World) -> None:
    """A long feed is read in several answers: the next read goes on where the last one ended."""
    store = world.store()
    for i in range(READ_LIMIT + 10):
        await store.append("p", b"%d" % i, 1000)
    first = await store.read("p", "0", 0)
    assert [each.payload for each in first] == [b"%d" % i for i in range(READ_LIMIT)]
    assert len(await store.read("p", first[-1].id, 0)) == 10


async def test_a_read_waits_for_the_next_entry(world: World) -> None:
    """A waiting read ends with the first new entry and blocks neither other calls nor other readers."""
    one, two = world.store(), world.store()
    last = await one.append("p", b"old", 10)
    readers = [asyncio.create_task(two.read("p", last, LONG_MS)) for _ in range(2)]
    await asyncio.sleep(0.05)
    await two.ping()
    assert not any(reader.done() for reader in readers)
    await one.append("p", b"new", 10)
    for reader in readers:
        assert [each.payload for each in await reader] == [b"new"]


async def test_a_read_gives_up_after_its_wait(world: World) -> None:
    """Nothing new within the wait is an empty answer, not an error."""
    store = world.store()
    assert list(await store.read("p", "0", 20)) == []


async def test_a_cancelled_read_leaves_the_store_usable(world: World) -> None:
    """Giving up a waiting read does not make the next one wait behind it."""
    store = world.store()
    waiting = asyncio.create_task(store.read("p", "0", LONG_MS))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await store.append("q", b"x", 10)
    assert [each.payload for each in await store.read("q", "0", LONG_MS)] == [b"x"]


async def test_a_feed_that_started_over_is_read_from_its_beginning(world: World) -> None:
    """Ids that no entry of the feed reaches are of a feed that was lost: its reader must not wait for them for ever."""
    store = world.store()
    ids = [await store.append("p", b"%d" % i, 10) for i in range(3)]
    beyond = f"{int(ids[-1].partition('-')[0]) + 3_600_000}-0"
    assert [each.payload for each in await store.read("p", beyond, 0)] == [b"0", b"1", b"2"]
    assert [each.payload for each in await store.read("p", beyond, 20)] == [b"0", b"1", b"2"]
    assert list(await store.read("empty", beyond, 20)) == []

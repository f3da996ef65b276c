"""Documents, parts and records: who was first wins, what is lost may come back, and nothing grows without bound."""

import asyncio

import pytest

from extproc.errors import StoreError
from extproc.state.document_store import MAX_DOCUMENTS, MAX_PARTS, MAX_PAYLOAD, MAX_REVISION, Document
from extproc.state.store import Store
from tests.contract.conftest import World

GROUP = "rollouts"
BYTES = bytes(range(256))
MINUTE_MS = 60_000


async def kept(store: Store, group: str = GROUP) -> dict[str, Document]:
    """Documents of a group."""
    return dict((await store.documents(group)).found)


async def told(store: Store, name: str, limit: int = 1000, before: str = "") -> list[bytes]:
    """Payloads of records, newest first."""
    return [each.payload for each in await store.records(GROUP, name, limit, before)]


async def test_a_document_is_read_as_it_was_put_by_every_replica(world: World) -> None:
    """Any bytes, any name; groups are apart, also from a pool of the same name."""
    one, two = world.store(), world.store()
    assert await kept(one) == {}
    assert await one.put_document(GROUP, "m/ö {x}: 1", Document(1, BYTES))
    assert await one.put_document(GROUP, "empty", Document(1, b""))
    assert await one.put_document("others", "empty", Document(7, b"1 2"))
    await two.put_states(GROUP, {"a": b"state"})
    assert await kept(two) == {"m/ö {x}: 1": Document(1, BYTES), "empty": Document(1, b"")}
    assert await kept(two, "others") == {"empty": Document(7, b"1 2")}
    assert await two.states(GROUP) == {"a": b"state"}


async def test_only_the_next_revision_replaces_a_document(world: World) -> None:
    """A writer that did not see the present revision is refused and changes nothing."""
    one, two = world.store(), world.store()
    assert await one.put_document(GROUP, "m", Document(1, b"one"))
    for wrong in (Document(1, b"other"), Document(3, b"three"), Document(MAX_REVISION, b"far")):
        assert not await two.put_document(GROUP, "m", wrong)
    assert await kept(one) == {"m": Document(1, b"one")}
    assert await two.put_document(GROUP, "m", Document(2, b"two"))
    assert not await one.put_document(GROUP, "m", Document(1, b"one"))
    assert await kept(one) == {"m": Document(2, b"two")}


async def test_a_writer_that_heard_no_answer_may_put_the_same_again(world: World) -> None:
    """The very document that is there already was its own: True, and nothing changes."""
    one, two = world.store(), world.store()
    for _ in range(2):
        assert await one.put_document(GROUP, "m", Document(1, BYTES))
    assert await kept(two) == {"m": Document(1, BYTES)}


async def test_a_lost_document_may_be_put_at_any_revision(world: World) -> None:
    """Nothing there is nobody's refusal: what a flush took is put again by who knows it."""
    one, two = world.store(), world.store()
    assert await one.put_document(GROUP, "m", Document(41, b"x"))
    await two.drop_document(GROUP, "m")
    await two.drop_document(GROUP, "ghost")
    assert await kept(one) == {}
    assert await one.put_document(GROUP, "m", Document(42, b"y"))
    assert await kept(two) == {"m": Document(42, b"y")}


async def test_a_document_of_one_revision_is_dropped_alone(world: World) -> None:
    """Who saw another one than stands now drops nothing; nor does a name that is not there."""
    one, two = world.store(), world.store()
    assert await one.put_document(GROUP, "m", Document(7, b"x"))
    await two.drop_document(GROUP, "m", 6)
    await two.drop_document(GROUP, "m", 8)
    await two.drop_document(GROUP, "ghost", 7)
    assert await kept(one) == {"m": Document(7, b"x")}
    await two.drop_document(GROUP, "m", 7)
    assert await kept(one) == {}


async def test_of_writers_at_once_one_is_first(world: World) -> None:
    """Four replicas put the same next revision, again and again: exactly one is told that it is kept, and it is."""
    stores = [world.store() for _ in range(4)]
    for revision in range(1, 11):
        documents = [Document(revision, b"%d" % writer) for writer in range(4)]
        puts = (store.put_document(GROUP, "m", each) for store, each in zip(stores, documents, strict=True))
        done = await asyncio.gather(*puts)
        assert sum(done) == 1
        assert await kept(stores[revision % 4]) == {"m": documents[done.index(True)]}


async def test_documents_come_with_one_clocks_time(world: World) -> None:
    """All replicas are told the time by the store, which goes on and does not go back."""
    times = [(await world.store().documents(GROUP)).now for _ in range(5)]
    assert times == sorted(times)
    # After 2001: seconds since the epoch, or those of the clock that a test turns.
    assert times[0] == 1000.0 or 1e9 < times[-1] < 1e11


async def test_what_is_too_long_or_has_no_name_is_refused(world: World) -> None:
    """A clear error with its remedy, and nothing is kept; the longest is kept."""
    store, long = world.store(), b"x" * (MAX_PAYLOAD + 1)
    for match, call in (
        ("too many for one value", lambda: store.put_document(GROUP, "m", Document(1, long))),
        ("too many for one value", lambda: store.put_part(GROUP, "e", "r", long, MINUTE_MS)),
        ("too many for one value", lambda: store.record(GROUP, "a", long, 10, MINUTE_MS)),
        ("use 1 to 1024", lambda: store.put_document(GROUP, "", Document(1, b""))),
        ("use 1 to 1024", lambda: store.put_part(GROUP, "e", "é" * 513, b"", MINUTE_MS)),
        ("use 1 to 1024", lambda: store.documents("")),
        ("as UTF-8", lambda: store.record(GROUP, "\ud800", b"", 10, MINUTE_MS)),
        ("as UTF-8", lambda: store.parts(GROUP, "\udfff")),
        ("use 1 to 9", lambda: store.put_document(GROUP, "m", Document(0, b""))),
        ("use 1 to 9", lambda: store.put_document(GROUP, "m", Document(MAX_REVISION + 1, b""))),
    ):
        with pytest.raises(StoreError, match=match):
            await call()
    assert await kept(store) == {}
    assert await store.put_document(GROUP, "é" * 512, Document(MAX_REVISION, long[1:]))
    assert await kept(store) == {"é" * 512: Document(MAX_REVISION, long[1:])}


async def test_what_keeps_nothing_is_a_mistake(world: World) -> None:
    """Lives, numbers and ids that mean nothing are told to who wrote the call."""
    store = world.store()
    with pytest.raises(ValueError, match="use 1 or more"):
        await store.put_part(GROUP, "e", "r", b"", 0)
    for cap, keep_ms in ((0, 1), (1, -1)):
        with pytest.raises(ValueError, match="keep 1 or more"):
            await store.record(GROUP, "a", b"", cap, keep_ms)
    with pytest.raises(ValueError, match="feed id"):
        await store.records(GROUP, "a", 1, "soon")


async def test_a_group_holds_so_many_documents(world: World) -> None:
    """One more is refused with its remedy, by whoever puts it; those that are there change as before."""
    one, two = world.store(), world.store()
    for name in range(MAX_DOCUMENTS):
        assert await one.put_document(GROUP, f"m{name}", Document(1, b"x"))
    with pytest.raises(StoreError, match=r"256 documents of this kind already: drop .*`warmpath rollout forget MODEL`"):
        await two.put_document(GROUP, "more", Document(1, b"x"))
    assert await two.put_document(GROUP, "m7", Document(2, b"y"))
    assert not await two.put_document(GROUP, "m7", Document(2, b"z"))
    await one.drop_document(GROUP, "m0")
    assert await two.put_document(GROUP, "more", Document(1, b"x"))
    assert len(await kept(one)) == MAX_DOCUMENTS


async def test_each_writer_replaces_its_part(world: World) -> None:
    """What others wrote stays; things and groups are apart."""
    one, two = world.store(), world.store()
    assert await one.parts(GROUP, "e-0") == {}
    await one.put_part(GROUP, "e-0", "r1", BYTES, MINUTE_MS)
    await two.put_part(GROUP, "e-0", "r2", b"", MINUTE_MS)
    await two.put_part(GROUP, "e-1", "r1", b"other", MINUTE_MS)
    assert await two.parts(GROUP, "e-0") == {"r1": BYTES, "r2": b""}
    await one.put_part(GROUP, "e-0", "r1", b"new", MINUTE_MS)
    assert await two.parts(GROUP, "e-0") == {"r1": b"new", "r2": b""}
    assert await one.parts(GROUP, "e-1") == {"r1": b"other"}
    assert await one.parts("others", "e-0") == {}


async def test_parts_end_after_the_last_was_put(world: World) -> None:
    """A worker that died leaves its part for as long as others go on; then all of them end together."""
    store = world.store()
    await store.put_part(GROUP, "e", "dead", b"1", MINUTE_MS)
    for _ in range(3):
        world.age(50)
        await store.put_part(GROUP, "e", "alive", b"2", MINUTE_MS)
    assert await store.parts(GROUP, "e") == {"dead": b"1", "alive": b"2"}
    world.age(61)
    assert await store.parts(GROUP, "e") == {}
    await store.put_part(GROUP, "e", "alive", b"3", MINUTE_MS)
    assert await store.parts(GROUP, "e") == {"alive": b"3"}


async def test_many_parts_are_all_read_and_no_more_are_taken(world: World) -> None:
    """As many as there may be are read complete; one more is refused, those that are there change as before."""
    one, two = world.store(), world.store()
    for part in range(MAX_PARTS):
        await one.put_part(GROUP, "e", f"r{part}", b"%d" % part * 20, MINUTE_MS)
    with pytest.raises(StoreError, match="1000 parts of this kind already: drop"):
        await two.put_part(GROUP, "e", "more", b"", MINUTE_MS)
    await two.put_part(GROUP, "e", "r7", b"new", MINUTE_MS)
    expected = {f"r{part}": b"%d" % part * 20 for part in range(MAX_PARTS)} | {"r7": b"new"}
    assert await two.parts(GROUP, "e") == expected


async def test_records_are_read_newest_first_page_by_page(world: World) -> None:
    """Any number at once, or on from where a page ended: nothing twice, nothing left out."""
    one, two = world.store(), world.store()
    assert list(await one.records(GROUP, "m", 10)) == []
    ids = [await one.record(GROUP, "m", b"\xff%d" % number, 1000, MINUTE_MS) for number in range(50)]
    await one.record(GROUP, "other", b"x", 1000, MINUTE_MS)
    newest_first = [(ids[number], b"\xff%d" % number) for number in reversed(range(50))]
    for limit in (1, 16, 17, 49, 50, 51, 1000):
        assert [(each.id, each.payload) for each in await two.records(GROUP, "m", limit)] == newest_first[:limit]
    for limit in (0, -1):
        assert await told(two, "m", limit) == []
    page, pages = "", list[tuple[str, bytes]]()
    for _ in range(8):
        found = await two.records(GROUP, "m", 7, page)
        pages += [(each.id, each.payload) for each in found]
        page = found[-1].id
    assert list(await two.records(GROUP, "m", 7, page)) == []
    assert pages == newest_first


async def test_records_are_capped(world: World) -> None:
    """About the newest `cap` are kept: all of those, and not many more."""
    store = world.store()
    for number in range(600):
        await store.record(GROUP, "m", b"%d" % number, 50, MINUTE_MS)
    found = await told(store, "m")
    assert found[:50] == [b"%d" % number for number in reversed(range(550, 600))]
    assert len(found) < 300


async def test_records_that_nobody_adds_to_end(world: World) -> None:
    """What was to be kept for a minute is gone after it, also when no record follows; 0 keeps any age."""
    store = world.store()
    await store.record(GROUP, "m", b"old", 10, MINUTE_MS)
    await store.record(GROUP, "audit", b"kept", 10, 0)
    world.age(61)
    assert await told(store, "m") == []
    assert await told(store, "audit") == [b"kept"]
    await store.record(GROUP, "m", b"new", 10, 3 * MINUTE_MS)
    assert await told(store, "m") == [b"new"]

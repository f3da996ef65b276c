"""Documents while the shared store fails: an error for who asks, and nothing for decisions."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

import pytest

from extproc.clock import ManualClock
from extproc.errors import StoreError
from extproc.state.document_store import Document, Documents, NotTakenError
from extproc.state.memory import MemoryStore
from extproc.state.resilient import ResilientStore
from extproc.state.trouble import StoreDeadlineError, Trouble, UnreachableError
from extproc.state.values import FeedEntry
from tests.unit.state.unsteady import GONE, LATE, Unsteady, ask, resilient
from tests.waiting import until

GROUP = "rollouts"
VERBS: Mapping[str, Callable[[ResilientStore], Awaitable[object]]] = {
    "put_document": lambda store: store.put_document(GROUP, "m", Document(1, b"x")),
    "documents": lambda store: store.documents(GROUP),
    "drop_document": lambda store: store.drop_document(GROUP, "m"),
    "put_part": lambda store: store.put_part(GROUP, "e", "r", b"x", 5000),
    "parts": lambda store: store.parts(GROUP, "e"),
    "record": lambda store: store.record(GROUP, "m", b"x", 10, 5000),
    "records": lambda store: store.records(GROUP, "m", 10, "9-0"),
}


class Failing(Unsteady):
    """Its verbs of documents fail, too."""

    async def put_document(self, group: str, name: str, document: Document) -> bool:
        """See `DocumentStore.put_document`."""
        self.calls.append("put_document")
        return await self._run(group, super().put_document(group, name, document))

    async def documents(self, group: str) -> Documents:
        """See `DocumentStore.documents`."""
        self.calls.append("documents")
        return await self._run(group, super().documents(group))

    async def drop_document(self, group: str, name: str, revision: int = 0) -> None:
        """See `DocumentStore.drop_document`."""
        self.calls.append("drop_document")
        await self._run(group, super().drop_document(group, name, revision))

    async def put_part(self, group: str, name: str, part: str, payload: bytes, ttl_ms: int) -> None:
        """See `DocumentStore.put_part`."""
        self.calls.append("put_part")
        await self._run(group, super().put_part(group, name, part, payload, ttl_ms))

    async def parts(self, group: str, name: str) -> Mapping[str, bytes]:
        """See `DocumentStore.parts`."""
        self.calls.append("parts")
        return await self._run(group, super().parts(group, name))

    async def record(self, group: str, name: str, payload: bytes, cap: int, keep_ms: int) -> str:
        """See `DocumentStore.record`."""
        self.calls.append("record")
        return await self._run(group, super().record(group, name, payload, cap, keep_ms))

    async def records(self, group: str, name: str, limit: int, before: str = "") -> Sequence[FeedEntry]:
        """See `DocumentStore.records`."""
        self.calls.append("records")
        return await self._run(group, super().records(group, name, limit, before))


@pytest.fixture
def shared() -> Failing:
    """The shared store."""
    return Failing()


@pytest.fixture
def store(shared: Failing) -> ResilientStore:
    """What a worker uses."""
    return resilient(shared, MemoryStore(ManualClock()))


async def test_documents_are_those_of_the_shared_store(store: ResilientStore, shared: Failing) -> None:
    """Each verb goes there with all that it was given, and its answer comes back; time is the shared store's."""
    shared.clock.advance(77)
    assert await store.put_document(GROUP, "m", Document(1, b"x"))
    assert not await store.put_document(GROUP, "m", Document(1, b"y"))
    assert await store.documents(GROUP) == Documents(1077.0, {"m": Document(1, b"x")})
    await store.drop_document(GROUP, "m")
    assert (await shared.documents(GROUP)).found == {}
    await store.put_part(GROUP, "e", "r", b"part", 5000)
    assert await store.parts(GROUP, "e") == await shared.parts(GROUP, "e") == {"r": b"part"}
    ids = [await store.record(GROUP, "m", b"%d" % number, 2, 5000) for number in range(3)]
    assert [each.payload for each in await store.records(GROUP, "m", 5)] == [b"2", b"1"]
    assert [each.payload for each in await store.records(GROUP, "m", 5, ids[2])] == [b"1"]


@pytest.mark.parametrize("verb", VERBS)
async def test_without_the_shared_store_they_are_an_error(verb: str, store: ResilientStore, shared: Failing) -> None:
    """The first call finds out, the next ones cost nothing, and all is well again by itself."""
    shared.fault = UnreachableError("gone")
    for _ in range(2):
        with pytest.raises(UnreachableError):
            await VERBS[verb](store)
    assert shared.calls == [verb]
    assert store.troubles() == {"documents/rollouts": Trouble.GONE}
    shared.fault = None
    await until(lambda: store.settled)
    await VERBS[verb](store)
    assert store.troubles() == {}


@pytest.mark.parametrize("fault", [GONE, LATE])
async def test_their_failures_leave_decisions_alone(store: ResilientStore, shared: Failing, fault: StoreError) -> None:
    """No pool is decided locally because a document was not read, also not the pool that is called as the group is."""
    shared.failing = {GROUP}
    shared.fault = fault
    for verb in VERBS.values():
        with pytest.raises(StoreError):
            await verb(store)
    shared.failing = {"elsewhere"}
    for pool in ("p", GROUP):
        assert not store.degraded_in(pool)
        assert (await store.reserve(ask("c", pool=pool))).endpoint == "a"
    assert shared.calls[-2:] == ["reserve", "reserve"]


@pytest.mark.parametrize("verb", VERBS)
async def test_a_missed_deadline_opens_no_circuit(verb: str, store: ResilientStore, shared: Failing) -> None:
    """They wait on connections of their own: each call is tried, and the miss is counted."""
    shared.fault = StoreDeadlineError("late")
    for _ in range(3):
        with pytest.raises(StoreDeadlineError):
            await VERBS[verb](store)
    assert shared.calls == [verb] * 3
    assert (store.stats.opens, store.stats.failures) == (0, {Trouble.SLOW: 3})


async def test_pools_that_are_gone_do_not_hide_documents(store: ResilientStore, shared: Failing) -> None:
    """In a cluster they lie on another node: while that one answers, they are read."""
    shared.failing, shared.fault = {"p"}, GONE
    await store.reserve(ask("c"))
    assert store.degraded_in("p")
    for verb in VERBS.values():
        await verb(store)


async def test_what_is_wrong_with_a_call_opens_no_circuit(store: ResilientStore) -> None:
    """Mistakes of who calls are told to that one, and the next call is served."""
    with pytest.raises(ValueError, match="feed id"):
        await store.records(GROUP, "m", 1, "soon")
    assert store.troubles() == {}
    with pytest.raises(NotTakenError):
        await store.put_document(GROUP, "m", Document(1, b"x" * 65_537))
    assert store.troubles() == {"documents/rollouts": Trouble.REFUSED}
    assert store.stats.opens == 0
    assert await store.put_document(GROUP, "m", Document(1, b"x"))

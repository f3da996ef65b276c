"""Documents while a real server is dead or stands still: an error, no decision held up, and all well afterwards."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from extproc.clock import SystemClock
from extproc.errors import StoreError
from extproc.state.document_store import Document
from extproc.state.memory import MemoryStore
from extproc.state.redis import RedisStore
from extproc.state.resilient import ResilientStore
from tests.contract.test_reserve import ask, candidate
from tests.valkey import Valkey
from tests.waiting import until, until_async

GROUP = "rollouts"


@pytest.fixture
def server() -> Iterator[Valkey]:
    """A server that a test may stop."""
    with Valkey() as running:
        yield running


@pytest.fixture
async def store(server: Valkey) -> AsyncIterator[ResilientStore]:
    """What a worker uses; the deadline of decisions is patient, for a busy machine."""
    made = ResilientStore(RedisStore(server.url, 500.0), MemoryStore(SystemClock()))
    await made.ping()
    yield made
    await made.close()


async def readable(store: ResilientStore) -> bool:
    """Whether documents are read now."""
    try:
        await store.documents(GROUP)
    except StoreError:
        return False
    return True


async def test_a_server_that_died_is_found_again(server: Valkey, store: ResilientStore) -> None:
    """The verbs fail, at once after the first; the restarted server lacks the document, and takes its next revision."""
    await store.put_document(GROUP, "m", Document(3, b"x"))
    server.kill()
    for _ in range(3):
        assert not await readable(store)
    with pytest.raises(StoreError):
        await store.record(GROUP, "m", b"x", 10, 0)
    server.start()
    await until_async(lambda: readable(store))
    assert (await store.documents(GROUP)).found == {}
    assert await store.put_document(GROUP, "m", Document(4, b"y"))
    await until(lambda: store.settled)


async def test_a_server_that_stood_still_is_found_again(server: Valkey, store: ResilientStore) -> None:
    """A read that waited in vain is an error; what was put meanwhile is whole or absent, and may be put again."""
    await store.put_document(GROUP, "m", Document(1, b"x"))
    server.freeze()
    try:
        with pytest.raises(StoreError):
            await store.documents(GROUP)
        with pytest.raises(StoreError):
            await store.put_document(GROUP, "m", Document(2, b"y"))
    finally:
        server.thaw()
    await until_async(lambda: readable(store))
    assert (await store.documents(GROUP)).found["m"] in (Document(1, b"x"), Document(2, b"y"))
    assert await store.put_document(GROUP, "m", Document(2, b"y"))


async def test_decisions_go_on_beside_large_replies(server: Valkey, store: ResilientStore) -> None:
    """While 4 MiB of documents are read again and again, every decision is one of the shared store."""
    for number in range(64):
        await store.put_document(GROUP, f"m{number}", Document(1, b"x" * 65_536))
    reading = True

    async def read() -> None:
        while reading:
            assert len((await store.documents(GROUP)).found) == 64

    readers = [asyncio.create_task(read()) for _ in range(2)]
    try:
        for number in range(50):
            await store.reserve(ask(f"c{number}", candidate("a")))
            assert not store.degraded_in("p")
    finally:
        reading = False
        await asyncio.gather(*readers)
    with server.client() as client:
        assert client.hlen("warmpath:{p}:flight:r1") == 50

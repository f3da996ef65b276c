"""A server to be ill-treated, a worker's store on it, and a witness that sees only what is really shared."""

from collections.abc import AsyncIterator, Iterator

import pytest

from extproc.clock import SystemClock
from extproc.state.memory import MemoryStore
from extproc.state.redis import RedisStore
from extproc.state.resilient import ResilientStore
from tests.chaos.kv_scene import Begin, scenes
from tests.chaos.traffic import DEADLINE_MS, PROBE_S, Traffic
from tests.valkey import Valkey


@pytest.fixture
def server() -> Iterator[Valkey]:
    """A server to be ill-treated."""
    with Valkey() as server:
        yield server


@pytest.fixture
async def store(server: Valkey) -> AsyncIterator[ResilientStore]:
    """The store as a worker composes it."""
    store = ResilientStore(RedisStore(server.url, DEADLINE_MS), MemoryStore(SystemClock()), probe_s=PROBE_S)
    await store.ping()
    yield store
    await store.close()


@pytest.fixture
async def witness(server: Valkey) -> AsyncIterator[RedisStore]:
    """Another replica, which sees only what is really shared."""
    store = RedisStore(server.url, deadline_ms=10_000.0)
    await store.ping()
    yield store
    await store.close()


@pytest.fixture
def traffic(store: ResilientStore) -> Traffic:
    """Requests of one worker."""
    return Traffic(store)


@pytest.fixture
async def begin() -> AsyncIterator[Begin]:
    """Makes keepers that read KV events, with a worker that hears of each."""
    async with scenes() as make:
        yield make

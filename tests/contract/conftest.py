"""The worlds in which the store contract is tested: one process' memory, real servers of each kind, a real cluster."""

import contextlib
import itertools
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import msgspec
import pytest

from extproc.clock import ManualClock
from extproc.state.keys import shard
from extproc.state.memory import MemoryStore
from extproc.state.redis import RedisStore
from extproc.state.store import Store
from tests.cluster import ClusterFleet
from tests.servers import Server, or_skip, redis6, redis7
from tests.valkey import Valkey

# A shared machine may pause a process for long; the deadline itself is tested elsewhere.
PATIENT_MS = 10_000.0

_serial = itertools.count()
_servers = ("valkey", "redis6_server", "redis7_server")


class World(Protocol):
    """Stores that share one ledger, and a way to let time pass."""

    def store(self) -> Store:
        """One more replica's view of the ledger."""
        ...

    def age(self, seconds: float) -> None:
        """Make everything in the ledger `seconds` older."""
        ...


class Deployment(Protocol):
    """Real servers that run."""

    @property
    def url(self) -> str:
        """Store URL."""
        ...

    def client(self) -> Any:
        """A client of redis-py."""
        ...


class MemoryWorld:
    """Replicas in one process share the object itself."""

    def __init__(self) -> None:
        self._clock = ManualClock()
        self._store = MemoryStore(self._clock)

    def store(self) -> Store:
        """See `World.store`."""
        return self._store

    def age(self, seconds: float) -> None:
        """See `World.age`."""
        self._clock.advance(seconds)


class RedisWorld:
    """Replicas have connections of their own; time passes by moving what is stored into the past."""

    def __init__(self, deployment: Deployment, prefix: str) -> None:
        self._deployment = deployment
        self.prefix = prefix
        self.raw: Any = deployment.client()
        self.stores: list[RedisStore] = []

    async def open(self, replicas: int) -> None:
        """Connect some stores ahead, because a store's first call finds no connection yet."""
        for _ in range(replicas):
            store = RedisStore(self._deployment.url, PATIENT_MS, self.prefix)
            await store.ping()
            # In a cluster, the nodes of the pools and groups that the tests use.
            for pool in ("p", "q", shard("rollouts"), shard("others")):
                await store.ping(pool)
            self.stores.append(store)
        self._turns = itertools.cycle(self.stores)

    async def close(self) -> None:
        """Disconnect."""
        for store in self.stores:
            await store.close()
        self.raw.close()

    def store(self) -> Store:
        """See `World.store`; the first one again when all were given out."""
        return next(self._turns)

    def age(self, seconds: float) -> None:
        """See `World.age`."""
        for key in list(self.raw.scan_iter(f"{self.prefix}:*", count=1000)):
            kind, left_ms = self.raw.type(key), self.raw.pttl(key)
            if kind == b"hash" and key.endswith(b":load"):
                for endpoint, entry in self.raw.hgetall(key).items():
                    self.raw.hset(key, endpoint, _aged_load(entry, seconds))
            elif kind == b"hash" and key.endswith(b":breakers"):
                for endpoint, packed in self.raw.hgetall(key).items():
                    self.raw.hset(key, endpoint, _aged_breaker(packed, seconds))
            elif kind == b"zset":
                for member in self.raw.zrange(key, 0, -1):
                    self.raw.zincrby(key, -seconds * 1000, member)
            elif kind == b"string" and b":quota:" in key:
                if entry := self.raw.get(key):  # it may have ended meanwhile
                    level, since, busy = struct.unpack("<ddd", entry)
                    self.raw.set(key, struct.pack("<ddd", level, since - seconds, busy - seconds), keepttl=True)
            elif kind == b"string" and b":hold:" in key:
                self.raw.set(key, _aged_holdings(self.raw.get(key), seconds), keepttl=True)
            if left_ms > 0:
                self.raw.pexpire(key, int(left_ms - seconds * 1000))


def _aged_load(entry: bytes, seconds: float) -> bytes:
    """Doubles of which the second is a time."""
    form = f"<{len(entry) // 8}d"
    tokens, since, *others = struct.unpack(form, entry)
    return struct.pack(form, tokens, since - seconds, *others)


def _aged_breaker(packed: bytes, seconds: float) -> bytes:
    """The last three numbers are times in milliseconds, 0 for none."""
    strikes, openings, *times = msgspec.msgpack.decode(packed)
    return msgspec.msgpack.encode((strikes, openings, *(time and time - seconds * 1000 for time in times)))


def _aged_holdings(table: bytes, seconds: float) -> bytes:
    """The last part holds the ends of leases, in milliseconds."""
    holders, names, heirs, ends = msgspec.msgpack.decode(table)
    aged = {name: end - int(seconds * 1000) for name, end in ends.items()} if isinstance(ends, dict) else ends
    return msgspec.msgpack.encode((holders, names, heirs, aged))


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey]:
    """One Valkey for all contract tests; each test has a key prefix of its own."""
    with Valkey() as server:
        yield server


@pytest.fixture(scope="session")
def redis6_server() -> Iterator[Server]:
    """One Redis 6.2 for all contract tests."""
    with Server(or_skip(redis6)) as server:
        yield server


@pytest.fixture(scope="session")
def redis7_server() -> Iterator[Server]:
    """One Redis 7 for all contract tests."""
    with Server(or_skip(redis7)) as server:
        yield server


@pytest.fixture(scope="session")
def cluster() -> Iterator[ClusterFleet]:
    """One cluster of three nodes for all contract tests."""
    with ClusterFleet() as fleet:
        yield fleet


@contextlib.asynccontextmanager
async def redis_world_on(deployment: Deployment) -> AsyncIterator[RedisWorld]:
    """Four replicas on real servers."""
    world = RedisWorld(deployment, f"test{next(_serial)}")
    try:
        await world.open(4)
        yield world
    finally:
        await world.close()


@pytest.fixture(params=_servers)
async def redis_world(request: pytest.FixtureRequest) -> AsyncIterator[RedisWorld]:
    """Four replicas on each real server in turn."""
    async with redis_world_on(request.getfixturevalue(request.param)) as world:
        yield world


@pytest.fixture(params=["memory", *_servers, "cluster"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Each implementation in turn, on each kind of deployment."""
    if request.param == "memory":
        yield MemoryWorld()
        return
    async with redis_world_on(request.getfixturevalue(request.param)) as world:
        yield world

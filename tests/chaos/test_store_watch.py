"""The keeper's word for the store's health, on a real one that is being ill-treated."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

import redis
from extproc.clock import SystemClock
from extproc.state.memory import MemoryStore
from extproc.state.redis import RedisStore
from extproc.state.resilient import ResilientStore
from extproc.store_watch import StoreWatch
from extproc.telemetry.metrics import Metrics
from tests.valkey import Valkey
from tests.waiting import until_async


@pytest.fixture
async def watch(server: Valkey) -> AsyncIterator[StoreWatch]:
    """A watch over one pool, as a keeper composes it."""
    shared, clock = RedisStore(server.url, 500.0), SystemClock()
    store = ResilientStore(shared, MemoryStore(clock))
    await store.ping()
    yield StoreWatch(shared, store, lambda: ["p"], Metrics().store, clock)
    await store.close()


async def says(watch: StoreWatch, word: str) -> None:
    """Wait until the watch says this word."""

    async def said() -> bool:
        await watch.look()
        return watch.component() == word

    await until_async(said)


async def test_each_fault_of_a_real_server_has_its_word(server: Valkey, watch: StoreWatch) -> None:
    """Set up badly, evicting, full, a replica, frozen, killed: each shows while it lasts, and goes."""
    await says(watch, "ok")
    raw: Any  # redis-py's stubs leave half of its calls untyped
    with redis.Redis(port=server.port) as raw:
        raw.config_set("maxmemory", "100mb")
        raw.config_set("maxmemory-policy", "allkeys-lru")
        await says(watch, "bad_policy")
        raw.config_set("maxmemory-policy", "noeviction")
        await says(watch, "ok")
        raw.config_set("maxmemory", "1")
        await says(watch, "nearly_full")
        raw.config_set("maxmemory", "0")
        await says(watch, "ok")
        raw.replicaof("127.0.0.1", 1)
        await says(watch, "read_only")
        raw.replicaof("NO", "ONE")
        await says(watch, "ok")
        raw.config_set("maxmemory-policy", "volatile-lru")
        for number in range(200):
            raw.set(f"pin:{number}", bytes(1000), ex=100)
        raw.config_set("maxmemory", raw.info("memory")["used_memory"] - 50_000)
        raw.config_set("maxmemory", "0")
        await says(watch, "evicting")
    server.freeze()
    await says(watch, "slow")
    server.thaw()
    await says(watch, "evicting")
    server.kill()
    await says(watch, "down")
    server.start()
    await says(watch, "evicting")

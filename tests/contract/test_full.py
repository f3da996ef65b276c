"""A Redis whose `maxmemory` is reached and lets nothing go: what ends charges works, what needs room does not.

What must work frees memory, and nobody else would do it: a charge that cannot be ended would count for ever.
"""

import contextlib
from collections.abc import Iterator

import pytest

from extproc.errors import StoreError
from extproc.state.values import Beat, Load, Move
from tests.contract.conftest import RedisWorld
from tests.contract.test_reserve import STILL, ask, candidate, end

LEASE_MS = 15_000


@contextlib.contextmanager
def full(world: RedisWorld) -> Iterator[None]:
    """The server has half the room of what it holds, and may not evict. It forgets its scripts besides."""
    raw = world.raw
    room, policy = (raw.config_get(name)[name] for name in ("maxmemory", "maxmemory-policy"))
    raw.config_set("maxmemory-policy", "noeviction")
    raw.config_set("maxmemory", raw.info("memory")["used_memory"] // 2)
    raw.script_flush()
    try:
        yield
    finally:
        raw.config_set("maxmemory", room)
        raw.config_set("maxmemory-policy", policy)


async def test_a_full_store_takes_no_charge(redis_world: RedisWorld) -> None:
    """A reservation is refused as a whole, and taken again as soon as there is room."""
    store = redis_world.store()
    with full(redis_world):
        with pytest.raises(StoreError):
            await store.reserve(ask("c1", candidate("a"), pin_key="s"))
        assert await store.loads("p") == {}
        assert await store.pinned("p", "s") == ""
    assert (await store.reserve(ask("c1", candidate("a"), pin_key="s"))).endpoint == "a"


async def test_charges_end_in_a_full_store(redis_world: RedisWorld) -> None:
    """A settle, with refund or without, changes all that it changes elsewhere."""
    store = redis_world.store()
    for charge, tokens in (("c1", 30.0), ("c2", 500.0), ("c3", 7.0)):
        await store.reserve(ask(charge, candidate("a", tokens=tokens), sequences=2, output_tokens=8.0))
    with full(redis_world):
        assert await store.settle(end("c1")) is True
        assert await store.settle(end("c2", refund=True)) is True
        assert await store.settle(end("c2")) is False
        load = (await store.loads("p"))["a"]
    assert (load.running, load.output_tokens) == (2, 8.0)
    assert load.backlog_tokens == pytest.approx(37.0)


async def test_the_end_of_what_was_never_reserved_takes_no_room(redis_world: RedisWorld) -> None:
    """Each refused reservation is settled too: a full store must not fill further with marks of those."""
    store = redis_world.store()
    with full(redis_world):
        assert await store.settle(end("ghost")) is False
    assert not redis_world.raw.exists(f"{redis_world.prefix}:{{p}}:void:ghost")
    assert await store.settle(end("ghost")) is False
    assert redis_world.raw.exists(f"{redis_world.prefix}:{{p}}:void:ghost")


async def test_charges_move_in_a_full_store(redis_world: RedisWorld) -> None:
    """An endpoint that is not in the ledger yet gets its entry all the same."""
    store = redis_world.store()
    await store.reserve(ask("c1", candidate("a", tokens=30.0)))
    with full(redis_world):
        assert await store.move(Move("p", "c1", "r1", "b", 900.0, STILL)) is True
        loads = await store.loads("p")
        assert {name: load.running for name, load in loads.items()} == {"b": 1}
        assert await store.settle(end("c1", refund=True)) is True
    assert await store.loads("p") == {}


async def test_leases_live_and_end_in_a_full_store(redis_world: RedisWorld) -> None:
    """A heartbeat renews, counts and reaps, though its own lease, or all of them, must be written anew."""
    store, leases = redis_world.store(), f"{redis_world.prefix}:{{p}}:leases"
    await store.reserve(ask("c1", candidate("a", tokens=0.0), replica="dead", sequences=3))
    redis_world.age(10.0)
    await store.reserve(ask("c2", candidate("a", tokens=0.0)))
    redis_world.age(10.0)
    with full(redis_world):
        assert await store.heartbeat("p", "fresh", LEASE_MS) == Beat(1, 0)
        assert await store.loads("p") == {"a": Load(0.0, 1)}
        assert sorted(redis_world.raw.zrange(leases, 0, -1)) == [b"fresh", b"r1"]
        redis_world.raw.delete(leases)
        assert await store.heartbeat("p", "r1", LEASE_MS) == Beat(0, 1)
        assert redis_world.raw.zrange(leases, 0, -1) == [b"r1"]
        assert await store.loads("p") == {"a": Load(0.0, 1)}


async def test_a_replica_leaves_a_full_store(redis_world: RedisWorld) -> None:
    """Its charges go at once, and the others' are counted."""
    store = redis_world.store()
    await store.reserve(ask("c1", candidate("a", tokens=0.0)))
    await store.reserve(ask("c2", candidate("a", tokens=0.0), replica="r2"))
    with full(redis_world):
        await store.release("p", "r1")
        assert await store.loads("p") == {"a": Load(0.0, 1)}


async def test_a_full_store_takes_no_pin(redis_world: RedisWorld) -> None:
    """It is refused as a whole: what was there stays, until there is room."""
    store = redis_world.store()
    await store.reserve(ask("c1", candidate("a", tokens=10.0), pin_key="s"))
    with full(redis_world):
        with pytest.raises(StoreError):
            await store.pin("p", "s", "b", 60_000)
        assert await store.pinned("p", "s") == "a"
    await store.pin("p", "s", "b", 60_000)
    assert await store.pinned("p", "s") == "b"

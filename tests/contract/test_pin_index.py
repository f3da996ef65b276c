"""The sorted set by which pins in Redis are bounded in number: an index that follows the pins, and heals."""

from typing import Any

import pytest

from tests.contract.conftest import RedisWorld
from tests.contract.test_reserve import ask, candidate

LEASE_MS = 15_000
TTL_MS = 600_000


class Index:
    """The pins of pool `p`, as they lie in Redis."""

    def __init__(self, world: RedisWorld) -> None:
        self.base = f"{world.prefix}:{{p}}:"
        self.key = self.base + "pins"
        self.raw: Any = world.raw

    def members(self) -> list[str]:
        """Sessions in the index, the one used longest ago first."""
        return [each.decode() for each in self.raw.zrange(self.key, 0, -1)]

    def pins(self) -> set[str]:
        """Sessions that have a pin."""
        return {key.decode().rpartition(":")[2] for key in self.raw.scan_iter(self.base + "pin:*")}


async def test_pins_and_index_agree_whichever_verb_pins(redis_world: RedisWorld) -> None:
    """A decision, a next turn and a pin without a decision are in the index, in the order of their last use."""
    store, index = redis_world.store(), Index(redis_world)
    await store.reserve(ask("c1", candidate("a"), pin_key="s"))
    await store.reserve(ask("c2", candidate("a"), pin_key="s", next_pin_key="t"))
    await store.pin("p", "u", "a", TTL_MS)
    await store.reserve(ask("c3", candidate("a"), pin_key="s"))
    assert index.members() == ["t", "u", "s"]
    assert index.pins() == {"s", "t", "u"}


async def test_what_goes_goes_with_its_pin(redis_world: RedisWorld) -> None:
    """Neither a member nor a pin stays behind of a session that was given up."""
    store, index = redis_world.store(), Index(redis_world)
    for number in range(30):
        await store.reserve(ask(f"c{number}", candidate("a"), pin_key=f"s{number}", max_pins=5))
    assert index.members() == [f"s{number}" for number in range(25, 30)]
    assert index.pins() == set(index.members())


async def test_pins_that_ended_leave_no_member(redis_world: RedisWorld) -> None:
    """Members whose pins ran out, or were evicted by Redis, are dropped by heartbeats, thousands of them too."""
    store, index = redis_world.store(), Index(redis_world)
    for number in range(3):
        await store.reserve(ask(f"c{number}", candidate("a"), pin_key=f"s{number}", pin_ttl_ms=TTL_MS))
    gone = {f"gone{number}": 1.0 + number for number in range(3000)}
    redis_world.raw.zadd(index.key, gone)
    redis_world.raw.delete(index.base + "pin:s1")
    for _ in range(3):
        await store.heartbeat("p", "r1", LEASE_MS)
    assert index.members() == ["s0", "s2"]
    redis_world.age(TTL_MS / 1000 + 1)
    await store.heartbeat("p", "r1", LEASE_MS)
    assert index.members() == []


async def test_a_pin_evicted_behind_a_living_one_is_found_in_time(redis_world: RedisWorld) -> None:
    """Among the pins used longest ago the ended ones are found between those that live."""
    store, index = redis_world.store(), Index(redis_world)
    for number in range(100):
        await store.pin("p", f"s{number}", "a", TTL_MS)
    redis_world.raw.delete(*(f"{index.base}pin:s{number}" for number in range(1, 100, 2)))
    await store.heartbeat("p", "r1", LEASE_MS)
    assert index.members() == [f"s{number}" for number in range(0, 100, 2)]


async def test_looking_for_ended_pins_uses_none(redis_world: RedisWorld) -> None:
    """A heartbeat makes no pin look used: Redis would evict others before those used longest ago."""
    store, index = redis_world.store(), Index(redis_world)
    redis_world.raw.set(index.base + "pin:s", "a", px=TTL_MS)
    redis_world.raw.zadd(index.key, {"s": 1.0, "ended": 2.0})
    policy = redis_world.raw.config_get("maxmemory-policy")["maxmemory-policy"]
    # With an LFU policy Redis tells how often a key was used.
    redis_world.raw.config_set("maxmemory-policy", "volatile-lfu")
    redis_world.raw.config_set("lfu-log-factor", 0)
    try:
        redis_world.raw.set(index.base + "pin:s", "a", px=TTL_MS)
        before = redis_world.raw.object("freq", index.base + "pin:s")
        for _ in range(20):
            await store.heartbeat("p", "r1", LEASE_MS)
        assert redis_world.raw.object("freq", index.base + "pin:s") == before
    finally:
        redis_world.raw.config_set("lfu-log-factor", 10)
        redis_world.raw.config_set("maxmemory-policy", policy)
    assert index.members() == ["s"]


async def test_a_lost_index_fills_again_with_use(redis_world: RedisWorld) -> None:
    """Pins are honoured without it, come back into it when they are used, and are bounded by it then."""
    store, index = redis_world.store(), Index(redis_world)
    for number in range(4):
        await store.reserve(ask(f"c{number}", candidate("a"), pin_key=f"s{number}", max_pins=4))
    redis_world.raw.delete(index.key)
    for number in (2, 1):
        got = await store.reserve(ask(f"d{number}", candidate("b"), candidate("a", 9.0), pin_key=f"s{number}"))
        assert (got.endpoint, got.pinned) == ("a", True)
    assert index.members() == ["s2", "s1"]
    await store.pin("p", "new", "a", TTL_MS, max_pins=2)
    assert index.members() == ["s1", "new"]
    assert "s2" not in index.pins()


@pytest.mark.parametrize("score", ["-inf", 0.0, 1e18, "inf"])
async def test_foreign_members_go(redis_world: RedisWorld, score: float | str) -> None:
    """What somebody else put into the index, last used before all pins or in the far future, takes no room for long."""
    store, index = redis_world.store(), Index(redis_world)
    # More than a heartbeat looks at when those used longest ago live.
    sessions = [f"s{number}" for number in range(150)]
    for session in sessions:
        await store.pin("p", session, "a", TTL_MS)
    redis_world.raw.zadd(index.key, {b"\xff\xfejunk": score, "pin:x": score})
    await store.heartbeat("p", "r1", LEASE_MS)
    assert index.members() == sessions
    await store.pin("p", "t", "a", TTL_MS, max_pins=150)
    assert index.pins() == {*sessions[1:], "t"}


async def test_an_index_that_nobody_serves_any_more_ends(redis_world: RedisWorld) -> None:
    """Heartbeats let it outlive the pins; without them, a pool taken out of the configuration leaves nothing."""
    store, index = redis_world.store(), Index(redis_world)
    await store.pin("p", "s", "a", TTL_MS)
    await store.heartbeat("p", "r1", LEASE_MS)
    assert TTL_MS < redis_world.raw.pttl(index.key) <= TTL_MS + 4 * LEASE_MS
    redis_world.age((TTL_MS + 4 * LEASE_MS) / 1000)
    assert not redis_world.raw.exists(index.key)


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe"])
async def test_a_damaged_pin_is_no_pin(redis_world: RedisWorld, damage: bytes) -> None:
    """Who reads it is told of none, as a decision would find none; a key of another type counts the same."""
    store, index = redis_world.store(), Index(redis_world)
    redis_world.raw.set(index.base + "pin:s", damage)
    redis_world.raw.rpush(index.base + "pin:t", "a")
    assert [await store.pinned("p", session) for session in ("s", "t")] == ["", ""]
    for session in ("s", "t"):
        got = await store.reserve(ask(f"c{session}", candidate("b"), pin_key=session))
        assert (got.endpoint, got.moved) == ("b", False)
        assert await store.pinned("p", session) == "b"

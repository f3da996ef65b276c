"""Snapshots: seen as a whole, replaced as a whole, taken back without a trace."""

import asyncio
from typing import Any

import numpy as np
import pytest

from extproc.errors import StoreError
from extproc.state import snapshots
from extproc.state.exact_image import ExactImage, ExactRank
from extproc.state.image import ProfileImage
from extproc.state.learnt import EndpointLearnt
from extproc.state.rate import LearntRate
from extproc.state.redis import RedisStore
from extproc.state.snapshots import EndpointSnapshot
from extproc.state.values import Snapshot
from tests.contract.conftest import RedisWorld, World
from tests.waiting import until

PART = bytes(range(256)) * 256
"""64 KiB, the largest part."""


def parts_of(snapshot: Snapshot | None) -> list[bytes]:
    """Parts of a snapshot that must be there."""
    assert snapshot is not None
    return list(snapshot.parts)


async def test_a_snapshot_comes_back_as_it_was_put(world: World) -> None:
    """Every part, in order, whatever its bytes, on another replica; and the last feed entry that it includes."""
    one, two = world.store(), world.store()
    parts = [PART, b"", b"\x00\xff", PART[1:]]
    await one.put_snapshot("p", "10.0.0.1:80", "17-3", parts)
    await one.put_snapshot("p", "nothing in it", "18-0", [])
    found = await two.snapshot("p", "10.0.0.1:80")
    assert found is not None
    assert (found.at, list(found.parts)) == ("17-3", parts)
    assert parts_of(await two.snapshot("p", "nothing in it")) == []
    assert dict(await two.snapshots("p")) == {"10.0.0.1:80": "17-3", "nothing in it": "18-0"}


async def test_a_snapshot_with_an_exact_profile_comes_back(world: World) -> None:
    """100,000 blocks of two ranks, in the parts that workers write, as they were."""
    one, two = world.store(), world.store()
    none = np.empty(0, np.uint64)
    blocks = np.arange(1, 50_001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    ranks = [ExactRank(rank, 16, [40_000, 0, 9_999, 1, 0, 0, 0], blocks ^ np.uint64(rank)) for rank in (0, 1)]
    learnt = EndpointLearnt("a", 5.0, 0, 16, 1.0, False, -1.0, LearntRate(1.0, 0.0, 0.0, 0, False, []), [], [])
    image = ProfileImage(none, none, np.empty(0, np.uint32), none, 1)
    snapshot = EndpointSnapshot(learnt, image, 64, ExactImage("k-kv", 7, ranks))
    await one.put_snapshot("p", "a", "17-3", snapshots.of_endpoint(snapshot))
    found = snapshots.read(parts_of(await two.snapshot("p", "a")))
    assert isinstance(found, EndpointSnapshot)
    assert found.exact is not None
    assert (found.exact.owner, found.exact.number) == ("k-kv", 7)
    for was, rank in zip(ranks, found.exact.ranks, strict=True):
        assert (rank.rank, rank.block_tokens, rank.counts) == (was.rank, was.block_tokens, was.counts)
        assert (rank.blocks == was.blocks).all()


async def test_what_is_not_there_is_no_snapshot(world: World) -> None:
    """Unknown names and pools are no errors."""
    store = world.store()
    await store.put_snapshot("p", "a", "1-0", [b"x"])
    assert await store.snapshot("p", "b") is None
    assert await store.snapshot("q", "a") is None
    assert dict(await store.snapshots("q")) == {}


async def test_a_snapshot_is_replaced(world: World) -> None:
    """The last one put is the one that is read, with all of its parts and none of the one before."""
    one, two = world.store(), world.store()
    await one.put_snapshot("p", "a", "1-0", [b"1", b"2", b"3"])
    await two.put_snapshot("p", "a", "2-0", [b"4"])
    assert parts_of(await one.snapshot("p", "a")) == [b"4"]
    assert dict(await one.snapshots("p")) == {"a": "2-0"}


async def test_snapshots_are_taken_back(world: World) -> None:
    """What was dropped is gone for every replica; names without a snapshot are passed over, others stay."""
    one, two = world.store(), world.store()
    for name in ("a", "b"):
        await one.put_snapshot("p", name, "1-0", [b"x", b"y"])
    await two.drop_snapshots("p", ["a", "ghost"])
    await two.drop_snapshots("p", [])
    assert await one.snapshot("p", "a") is None
    assert dict(await one.snapshots("p")) == {"b": "1-0"}


async def test_a_reader_never_sees_a_mixture(world: World) -> None:
    """While it is replaced again and again, each read gives the parts of one generation, or none at all."""
    writer, reader = world.store(), world.store()
    await writer.put_snapshot("p", "a", "0-0", [b"0"] * 5)

    async def write() -> None:
        for number in range(1, 60):
            await writer.put_snapshot("p", "a", f"{number}-0", [b"%d" % number] * 5)

    writing = asyncio.create_task(write())
    seen = set[str]()
    while not writing.done():
        found = await reader.snapshot("p", "a")
        await asyncio.sleep(0)
        if found is not None:
            seen.add(found.at)
            assert [part.decode() + "-0" for part in found.parts] == [found.at] * 5
    await writing
    assert seen
    assert parts_of(await reader.snapshot("p", "a")) == [b"59"] * 5


def part_keys(raw: Any, prefix: str) -> list[bytes]:
    """Keys of parts, of whatever snapshot."""
    return list(raw.scan_iter(f"{prefix}:{{p}}:snapshot:*"))


async def test_nothing_is_left_of_snapshots_that_are_gone(redis_world: RedisWorld) -> None:
    """Redis keeps the parts of the last generation and no others, and nothing of what was taken back."""
    store, raw = redis_world.store(), redis_world.raw
    for number in range(5):
        await store.put_snapshot("p", "a", f"{number}-0", [PART] * 3)
    kept = part_keys(raw, redis_world.prefix)
    assert len(kept) == 3
    assert {raw.pttl(key) for key in kept} == {-1}
    await store.drop_snapshots("p", ["a"])
    assert list(raw.scan_iter(f"{redis_world.prefix}:*")) == []


async def test_a_writer_that_dies_leaves_nothing_for_ever(redis_world: RedisWorld) -> None:
    """Parts of a snapshot that was never finished end by themselves, and the one before stays to be read."""
    store, raw = redis_world.store(), redis_world.raw
    await store.put_snapshot("p", "a", "1-0", [b"1"])
    writing = asyncio.create_task(store.put_snapshot("p", "a", "2-0", [PART] * 2000))
    await until(lambda: len(part_keys(raw, redis_world.prefix)) >= 3)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    assert parts_of(await store.snapshot("p", "a")) == [b"1"]
    assert sum(raw.pttl(key) == -1 for key in part_keys(raw, redis_world.prefix)) == 1


async def test_a_snapshot_that_lost_parts_is_not_shown(redis_world: RedisWorld) -> None:
    """Evicted before it was complete: the writer is told, and readers keep the one before."""
    store, raw = redis_world.store(), redis_world.raw
    await store.put_snapshot("p", "a", "1-0", [b"1"])
    writing = asyncio.create_task(store.put_snapshot("p", "a", "2-0", [b"2"] * 500))
    before = set(part_keys(raw, redis_world.prefix))
    await until(lambda: set(part_keys(raw, redis_world.prefix)) > before)
    raw.delete(*set(part_keys(raw, redis_world.prefix)) - before)
    with pytest.raises(StoreError, match="lost parts"):
        await writing
    assert parts_of(await store.snapshot("p", "a")) == [b"1"]


async def test_damage_is_no_snapshot(redis_world: RedisWorld) -> None:
    """Heads that somebody else wrote, and parts that are gone, are passed over; the next one put is whole again."""
    store, raw = redis_world.store(), redis_world.raw
    heads = f"{redis_world.prefix}:{{p}}:snapshots"
    raw.hset(heads, "a", b"\xff\x00")
    raw.hset(heads, "b", "0123456789abcdef 99999999999999999999 1-0")
    raw.hset(heads, "c", "0123456789abcdef 3 1-0")
    raw.hset(heads, b"\xff", "0123456789abcdef 3 1-0")
    assert dict(await store.snapshots("p")) == {"c": "1-0"}
    assert [await store.snapshot("p", name) for name in "abc"] == [None, None, None]
    for name in "abc":
        await store.put_snapshot("p", name, "2-0", [b"x"])
        assert parts_of(await store.snapshot("p", name)) == [b"x"]
    raw.set(heads, "another type")
    await store.put_snapshot("p", "a", "3-0", [b"y"])
    assert dict(await store.snapshots("p")) == {"a": "3-0"}


async def test_every_key_of_a_snapshot_carries_the_pools_hash_tag(redis_world: RedisWorld) -> None:
    """All of them hash to the slot of the pool's other keys."""
    store: RedisStore = redis_world.stores[0]
    await store.put_snapshot("p", "a", "1-0", [b"x"])
    keys = [key.decode() for key in redis_world.raw.scan_iter(f"{redis_world.prefix}:*")]
    assert len(keys) == 2
    assert all(key.startswith(redis_world.prefix + ":{p}:snapshot") for key in keys)

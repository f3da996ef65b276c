"""Limits of use: all or nothing, exact under races, corrected by what was used; and keys that one request has."""

import asyncio
import struct
from collections.abc import Sequence

import msgspec
import pytest

from extproc.govern import quotas
from extproc.govern.quotas import Claim, Correction, Draw, Per, Take, Unit
from extproc.state import scripts
from tests.contract.conftest import RedisWorld, World


def minute(bucket: str, amount: float, most: float, unit: Unit = "tokens", shard: str = "p") -> Draw:
    """A draw of a limit by the minute, all of it at once."""
    return Draw(shard, bucket, unit, "minute", most, most / 60, amount)


def window(bucket: str, amount: float, most: float, per: Per = "month", shard: str = "p") -> Draw:
    """A draw of a limit by the calendar."""
    return Draw(shard, bucket, "tokens", per, most, 0.0, amount)


async def levels(world: World, *draws: Draw) -> Sequence[float]:
    """What is in use of these limits; looking takes nothing."""
    taken = await world.store().take(Take([msgspec.structs.replace(draw, amount=0.0) for draw in draws]))
    return taken.levels


async def test_exactly_the_limit_passes_at_once_over_all_replicas(world: World) -> None:
    """Of 40 requests at one moment on four replicas, just the ten of the limit are allowed."""
    stores = [world.store() for _ in range(4)]
    asked = [stores[each % 4].take(Take([minute("a", 1.0, 10.0, "requests")])) for each in range(40)]
    assert sum(each.allowed for each in await asyncio.gather(*asked)) == 10


async def test_a_request_that_one_limit_refuses_takes_nothing_of_the_others(world: World) -> None:
    """All or nothing, whichever of the limits refuses; what is told is what stands in use."""
    store = world.store()
    first = await store.take(Take([minute("a", 60.0, 100.0), window("b", 60.0, 1000.0)]))
    assert (first.allowed, list(first.levels)) == (True, [60.0, 60.0])
    refused = await store.take(Take([window("b", 60.0, 1000.0), minute("a", 60.0, 100.0)]))
    assert not refused.allowed
    assert list(refused.levels) == pytest.approx([60.0, 60.0], abs=20.0)
    assert (await levels(world, window("b", 0.0, 1000.0)))[0] == 60.0


async def test_limits_of_two_shards_are_all_or_nothing_too(world: World) -> None:
    """A tenant's limits and those of all may lie on two nodes: what one gave, the refusal of the other undoes."""
    store = world.store()
    own, shared = window("own", 1.0, 10.0, shard="p"), window("shared", 1.0, 2.0, shard="q")
    told = [await store.take(Take([own, shared])) for _ in range(4)]
    assert [each.allowed for each in told] == [True, True, False, False]
    assert [list(each.levels) for each in told] == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
    assert list(await levels(world, own, shared)) == [2.0, 2.0]


async def test_a_minutes_limit_comes_back_evenly(world: World) -> None:
    """Half a minute gives back half of the limit: then so much passes, and no more."""
    store = world.store()
    assert (await store.take(Take([minute("a", 6000.0, 6000.0)]))).allowed
    assert not (await store.take(Take([minute("a", 4000.0, 6000.0)]))).allowed
    world.age(30)
    assert not (await store.take(Take([minute("a", 4500.0, 6000.0)]))).allowed
    assert (await store.take(Take([minute("a", 3000.0, 6000.0)]))).allowed


@pytest.mark.parametrize("per", ["day", "month"])
async def test_a_windows_limit_comes_back_with_the_next_window(world: World, per: Per) -> None:
    """What was used in a day or month that is over does not count."""
    store = world.store()
    assert (await store.take(Take([window("a", 10.0, 10.0, per)]))).allowed
    assert not (await store.take(Take([window("a", 1.0, 10.0, per)]))).allowed
    world.age(32 * quotas.DAY_S)
    assert (await store.take(Take([window("a", 10.0, 10.0, per)]))).allowed


async def test_what_was_used_beyond_the_estimate_is_owed(world: World) -> None:
    """A correction is not refused: the bucket goes below zero, and nothing passes until that has come back."""
    store = world.store()
    taken = await store.take(Take([minute("a", 50.0, 600.0), window("b", 50.0, 1000.0)]))
    await world.store().correct(Correction(taken.at, [minute("a", 1150.0, 600.0), window("b", 1150.0, 1000.0)]))
    assert list(await levels(world, minute("a", 0.0, 600.0), window("b", 0.0, 1000.0))) == [
        pytest.approx(1200.0, abs=100.0),
        1200.0,
    ]
    world.age(50)
    assert not (await store.take(Take([minute("a", 1.0, 600.0)]))).allowed
    world.age(30)
    assert (await store.take(Take([minute("a", 1.0, 600.0)]))).allowed


async def test_what_was_not_used_is_given_back(world: World) -> None:
    """The next request finds what the estimate took too much; never more than the whole limit."""
    store = world.store()
    taken = await store.take(Take([minute("a", 600.0, 600.0), window("b", 600.0, 600.0)]))
    await world.store().correct(Correction(taken.at, [minute("a", -500.0, 600.0), window("b", -5000.0, 600.0)]))
    assert list(await levels(world, minute("a", 0.0, 600.0), window("b", 0.0, 600.0))) == [
        pytest.approx(100.0, abs=60.0),
        0.0,
    ]


async def test_a_bucket_that_was_empty_since_gets_nothing_back(world: World) -> None:
    """All had come back by then: once more, and others could use more than the limit."""
    store = world.store()
    early = await store.take(Take([minute("a", 600.0, 600.0)]))
    world.age(70)
    assert (await store.take(Take([minute("a", 600.0, 600.0)]))).allowed
    # For the store that ages by moving what it has, the early request was 70 s earlier too.
    at = early.at if early.at < 1e6 else early.at - 70
    await store.correct(Correction(at, [minute("a", -500.0, 600.0)]))
    assert (await levels(world, minute("a", 0.0, 600.0)))[0] > 500.0


async def test_a_window_that_is_over_is_not_corrected(world: World) -> None:
    """What began last month counts there, whatever it turns out to be."""
    store = world.store()
    taken = await store.take(Take([window("a", 50.0, 100.0)]))
    at = taken.at - 32 * quotas.DAY_S
    for difference in (-40.0, 40.0):
        await store.correct(Correction(at, [window("a", difference, 100.0)]))
        assert (await levels(world, window("a", 0.0, 100.0)))[0] == 50.0


async def test_a_key_is_one_requests_until_it_ends(world: World) -> None:
    """A second claim fails on every replica, the same claimer's does not; afterwards the key is free."""
    one, two = world.store(), world.store()
    mine, theirs = Claim("p", "k", "mine", 60_000), Claim("p", "k", "theirs", 60_000)
    assert [await one.claim(mine), await two.claim(theirs), await two.claim(mine)] == [True, False, True]
    await two.unclaim(theirs)
    assert not await two.claim(theirs)
    await two.unclaim(mine)
    assert await one.claim(theirs)


async def test_a_key_is_free_when_its_lease_ends(world: World) -> None:
    """Whoever died cannot give it up."""
    store = world.store()
    assert await store.claim(Claim("p", "k", "dead", 5000))
    world.age(6)
    assert await store.claim(Claim("p", "k", "alive", 5000))


async def test_of_many_claims_at_once_one_succeeds(world: World) -> None:
    """Whatever the order in which replicas ask."""
    stores = [world.store() for _ in range(4)]
    claims = [stores[each % 4].claim(Claim("p", "k", f"c{each}", 60_000)) for each in range(20)]
    assert sum(await asyncio.gather(*claims)) == 1


async def test_keys_in_redis_end_by_themselves(redis_world: RedisWorld) -> None:
    """A bucket is kept until it is empty, or its window is over; a claim until its lease ends."""
    store = redis_world.store()
    taken = await store.take(Take([minute("a", 300.0, 600.0), window("d", 1.0, 9.0, "day"), window("m", 1.0, 9.0)]))
    await store.claim(Claim("p", "k", "mine", 60_000))
    left = [redis_world.raw.pttl(f"{redis_world.prefix}:{{p}}:{name}") for name in ("quota:a", "quota:d", "quota:m")]
    ends = [quotas.window_end(per, taken.at) - taken.at for per in ("day", "month")]
    assert left == [pytest.approx(each * 1000, abs=5000) for each in (30.0, *ends)]
    assert 0 < redis_world.raw.pttl(f"{redis_world.prefix}:{{p}}:claim:k") <= 60_000


NAN = float("nan")


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"x" * 24,
        b"-1",
        struct.pack("<ddd", NAN, 0, 0),
        struct.pack("<ddd", -5, 0, 0),
        struct.pack("<ddd", 5, NAN, 0),
        struct.pack("<ddd", 1e300, 0, 0),
    ],
)
async def test_buckets_that_cannot_be_read_are_empty(redis_world: RedisWorld, damage: bytes) -> None:
    """Damage refuses nobody, and is written over."""
    store = redis_world.store()
    for name in ("a", "b"):
        redis_world.raw.set(f"{redis_world.prefix}:{{p}}:quota:{name}", damage)
    taken = await store.take(Take([minute("a", 10.0, 10.0), window("b", 10.0, 10.0)]))
    assert (taken.allowed, list(taken.levels)) == (True, [10.0, 10.0])
    assert not (await store.take(Take([window("b", 1.0, 10.0)]))).allowed


async def test_keys_of_another_type_fail_no_verb(redis_world: RedisWorld) -> None:
    """They count as absent, and a claim without an end as nobody's."""
    store, raw, base = redis_world.store(), redis_world.raw, f"{redis_world.prefix}:{{p}}:"
    raw.rpush(base + "quota:a", "damage")
    raw.rpush(base + "claim:k", "damage")
    raw.set(base + "claim:l", "for ever")
    assert (await store.take(Take([minute("a", 1.0, 10.0)]))).levels == [1.0]
    assert await store.claim(Claim("p", "k", "mine", 60_000))
    assert await store.claim(Claim("p", "l", "mine", 60_000))
    raw.delete(base + "claim:k")
    raw.rpush(base + "claim:k", "damage")
    await store.unclaim(Claim("p", "k", "mine", 60_000))


def test_the_script_has_the_calendar_of_the_world(redis_world: RedisWorld) -> None:
    """Days and months end where Python's calendar has their ends, to the second, for four centuries."""
    text = scripts.load("quota").text.partition("-- What is in use now")[0]
    text += "local ends = {}\nfor i, s in ipairs(draws) do ends[i] = {window_end(1, s), window_end(2, s)} end\n"
    text += "return cmsgpack.pack(ends)"
    moments = [day * 86_400 + second for day in range(0, 146_200, 9) for second in (0, 86_399)]
    moments += [int(quotas.window_end("month", moment)) + edge for moment in moments[::60] for edge in (-1, 0)]
    for start in range(0, len(moments), 2000):
        part = moments[start : start + 2000]
        reply = redis_world.raw.eval(text, 0, msgspec.msgpack.encode((0, part)))
        told = msgspec.msgpack.decode(reply)
        assert told == [[quotas.window_end("day", each), quotas.window_end("month", each)] for each in part]

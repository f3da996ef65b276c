"""What only the store in Redis can get wrong: its keys, its scripts, and damage done to what it keeps."""

import struct
from pathlib import Path

import msgspec
import pytest

from extproc.errors import StoreError
from extproc.state import scripts
from extproc.state.values import Move, Settle
from tests.contract.conftest import RedisWorld
from tests.contract.test_reserve import ask, candidate, end

LEASE_MS = 15_000


async def test_every_key_carries_the_pools_hash_tag(redis_world: RedisWorld) -> None:
    """All keys of a pool hash to one slot of a cluster, whichever verb made them."""
    store = redis_world.store()
    await store.reserve(ask("c1", candidate("a"), pin_key="s", next_pin_key="t"))
    await store.settle(end("ghost"))
    await store.move(Move("p", "c1", "r1", "b", 1.0, 1.0))
    await store.pin("p", "u", "a", 60_000)
    await store.heartbeat("p", "r1", LEASE_MS)
    await store.put_states("p", {"a": b"1"})
    await store.append("p", b"x", 10)
    keys = [key.decode() for key in redis_world.raw.scan_iter(f"{redis_world.prefix}:*")]
    kinds = {key.split(":")[2] for key in keys}
    assert kinds == {"born", "counted", "feed", "flight", "leases", "load", "pin", "pins", "states", "void"}
    assert all(key.startswith(redis_world.prefix + ":{p}:") for key in keys)


async def test_scripts_come_back_after_a_script_flush(redis_world: RedisWorld) -> None:
    """A server that forgot the scripts is handed them again; the call succeeds and charges once."""
    store = redis_world.store()
    await store.reserve(ask("c1", candidate("a")))
    redis_world.raw.script_flush()
    await store.reserve(ask("c2", candidate("a")))
    redis_world.raw.script_flush()
    assert await store.settle(end("c1")) is True
    redis_world.raw.script_flush()
    assert (await store.loads("p"))["a"].running == 1


async def test_a_flush_in_between_is_harmless(redis_world: RedisWorld) -> None:
    """With all keys of a pool gone, open charges settle to nothing and the next decision starts from zero."""
    store = redis_world.store()
    await store.reserve(ask("c1", candidate("a"), pin_key="s"))
    redis_world.raw.delete(*redis_world.raw.scan_iter(f"{redis_world.prefix}:*"))
    assert await store.settle(end("c1", refund=True)) is False
    got = await store.reserve(ask("c2", candidate("b"), pin_key="s"))
    assert (got.endpoint, got.moved) == ("b", False)
    assert {key: load.running for key, load in (await store.loads("p")).items()} == {"b": 1}


async def test_a_reservation_that_arrives_after_its_settle_charges_nothing(redis_world: RedisWorld) -> None:
    """After a lost connection a reservation may still be read from the old socket: its settle forbids it."""
    late, early = redis_world.store(), redis_world.store()
    assert await early.settle(end("c1")) is False
    with pytest.raises(StoreError):
        await late.reserve(ask("c1", candidate("a")))
    assert await early.loads("p") == {}


@pytest.mark.parametrize(
    "kind",
    ["load", "leases", "flight:r1", "pin:s", "pin:t", "pins", "void:c1", "void:c2", "counted", "born"],
)
async def test_a_key_of_another_type_counts_as_empty(redis_world: RedisWorld, kind: str) -> None:
    """A key that holds another type fails no verb."""
    store = redis_world.store()
    key = f"{redis_world.prefix}:{{p}}:{kind}"
    for verb in range(7):
        redis_world.raw.delete(key)
        redis_world.raw.rpush(key, "damage")
        if verb == 0:
            assert (await store.reserve(ask("c1", candidate("a"), pin_key="s", next_pin_key="t"))).endpoint == "a"
        elif verb == 1:
            assert (await store.heartbeat("p", "r1", LEASE_MS)).reaped == 0
        elif verb == 2:
            assert set(await store.loads("p")) <= {"a", "b"}
        elif verb == 3:
            assert isinstance(await store.move(Move("p", "c1", "r1", "b", 1.0, 1.0)), bool)
        elif verb == 4:
            await store.pin("p", "s", "a", 60_000)
            assert await store.pinned("p", "s") == "a"
        elif verb == 5:
            assert await store.pinned("p", "t") in {"", "a"}
        else:
            assert isinstance(await store.settle(end("c1", refund=True)), bool)
    loads = await store.loads("p")
    assert all(min(load.running, load.backlog_tokens, load.output_tokens) >= 0 for load in loads.values())


NAN = float("nan")


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff\xfe",
        b"-7",
        b"nan",
        b"x" * 40,
        b"\x90",
        struct.pack("<ddddd", NAN, 0, 1, NAN, NAN),
        struct.pack("<ddddd", 1, 0, NAN, -1, 5),
        struct.pack("<ddddd", 1e300, 0, 0, 1e300, 1e300),
        msgspec.msgpack.encode(["a", 0, 0, 0, 0, False, False, "", 0, 1]),
        msgspec.msgpack.encode(["a", 0, 0, 0, 0, False, False, "", 0, NAN, 0]),
        msgspec.msgpack.encode(["a", 0, 0, 0, 0, False, False, "", 0, 1, 1e308]),
        msgspec.msgpack.encode(["a", 0, 0, 0, 0, False, False, "", -5, 1, 0]),
    ],
)
async def test_values_that_cannot_be_read_count_as_zero(redis_world: RedisWorld, damage: bytes) -> None:
    """Damaged buckets, counts, charges and pins fail no verb and never make a count negative."""
    store, base, raw = redis_world.store(), f"{redis_world.prefix}:{{p}}:", redis_world.raw
    await store.reserve(ask("c1", candidate("a"), pin_key="s"))
    for key, field in (("load", "a"), ("flight:r1", "c1")):
        raw.hset(base + key, field, damage)
    raw.set(base + "pin:s", damage)
    # A pin that reads as a text could be an endpoint; the caller is told of it, and then ignores it.
    readable = damage.isascii() and damage != b""
    got = await store.reserve(ask("c2", candidate("a"), pin_key="s", ignore_pin=readable))
    assert (got.endpoint, got.backlog_tokens, got.running, got.output_tokens) == ("a", 0.0, 0, 0.0)
    await store.heartbeat("p", "r1", LEASE_MS)
    assert await store.move(Move("p", "c1", "r1", "b", 1.0, 1.0)) is False
    assert await store.settle(end("c1")) is False
    assert await store.settle(end("c2")) is True
    assert [each.running for each in (await store.loads("p")).values()] in ([], [0])


async def test_drifted_counts_are_corrected(redis_world: RedisWorld) -> None:
    """Once a lease what is in flight is counted anew from the open charges, so no drift lasts; backlogs stay."""
    store, key = redis_world.store(), f"{redis_world.prefix}:{{p}}:load"
    await store.reserve(ask("c1", candidate("a", tokens=70.0), sequences=3, output_tokens=12.5))
    await store.reserve(ask("c2", candidate("lost"), sequences=2, output_tokens=4.0))
    await store.heartbeat("p", "r1", LEASE_MS)
    tokens, since, rate, *_ = struct.unpack("<ddddd", redis_world.raw.hget(key, "a"))
    drifted = {"a": struct.pack("<ddddd", tokens, since, rate, 40, 9000), "gone": struct.pack("<ddddd", 0, 0, 1, 3, 5)}
    redis_world.raw.hset(key, mapping=drifted)
    redis_world.raw.hdel(key, "lost")
    redis_world.age(20.0)
    await store.heartbeat("p", "r1", LEASE_MS)
    loads = await store.loads("p")
    assert {name: (load.running, load.output_tokens) for name, load in loads.items()} == {
        "a": (3, 12.5),
        "lost": (2, 4.0),
    }
    assert loads["a"].backlog_tokens == pytest.approx(70.0)


async def test_endpoints_without_load_take_no_memory(redis_world: RedisWorld) -> None:
    """An endpoint whose charges have ended and whose backlog has drained has no entry after the next count."""
    store, key = redis_world.store(), f"{redis_world.prefix}:{{p}}:load"
    await store.reserve(ask("c1", candidate("a", tokens=70.0, rate=10.0)))
    await store.settle(end("c1"))
    assert redis_world.raw.hkeys(key) == [b"a"]
    redis_world.age(20.0)
    await store.heartbeat("p", "r1", LEASE_MS)
    assert redis_world.raw.hkeys(key) == []


async def test_pins_are_kept_under_the_keys_given_and_for_their_life(redis_world: RedisWorld) -> None:
    """The pick stands under the next turn's key with its life; the key that was asked for keeps its own."""
    store, raw, base = redis_world.store(), redis_world.raw, f"{redis_world.prefix}:{{p}}:pin:"
    await store.reserve(ask("c1", candidate("a"), next_pin_key="t1", pin_ttl_ms=60_000))
    await store.reserve(ask("c2", candidate("a"), pin_key="t1", next_pin_key="t2", pin_ttl_ms=600_000))
    assert [raw.get(base + key) for key in ("t1", "t2")] == [b"a", b"a"]
    assert 0 < raw.pttl(base + "t1") <= 60_000 < raw.pttl(base + "t2") <= 600_000


async def test_a_reservation_is_one_round_trip(redis_world: RedisWorld) -> None:
    """One script call decides, charges and pins, with every feature in use."""
    store = redis_world.store()
    asks = [
        ask(f"c{i}", candidate("a"), candidate("b"), pin_key=f"s{i}", next_pin_key=f"s{i + 1}", sequences=2)
        for i in range(6)
    ]
    await store.reserve(asks[0])
    before = _scripts_run(redis_world)
    for each in asks[1:]:
        await store.reserve(each)
    assert _scripts_run(redis_world) - before == 5


def _scripts_run(redis_world: RedisWorld) -> int:
    stats = redis_world.raw.info("commandstats")
    return sum(int(stats.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in ("evalsha", "eval"))


async def test_reaping_does_not_wait_for_the_next_count(redis_world: RedisWorld) -> None:
    """A dead replica's charges and lease go with the heartbeat that finds it dead, recently counted or not."""
    store, base = redis_world.store(), f"{redis_world.prefix}:{{p}}:"
    await store.reserve(ask("c1", candidate("a"), replica="dead"))
    redis_world.age(20.0)
    redis_world.raw.set(base + "counted", "", px=LEASE_MS)
    assert (await store.heartbeat("p", "r1", LEASE_MS)).reaped == 1
    assert (await store.loads("p"))["a"].running == 0
    assert redis_world.raw.zrange(base + "leases", 0, -1) == [b"r1"]
    assert not redis_world.raw.exists(base + "flight:dead")


async def test_errors_name_no_values(redis_world: RedisWorld) -> None:
    """A refused command is told by its code alone: no charge, session or endpoint in the text."""
    store = redis_world.store()
    await store.settle(Settle("p", "secret-charge", "r1"))
    with pytest.raises(StoreError) as caught:
        await store.reserve(ask("secret-charge", candidate("secret-endpoint"), pin_key="secret-session"))
    assert "secret" not in str(caught.value)
    redis_world.raw.set(f"{redis_world.prefix}:{{p}}:states", "secret")
    with pytest.raises(StoreError) as caught:
        await store.states("p")
    assert "secret" not in str(caught.value)


def test_every_script_file_is_loaded() -> None:
    """No script lies in the folder unused, and each known one is there."""
    folder = Path(scripts.__file__).parents[2] / "redis"
    assert {path.stem for path in folder.glob("*.lua")} == {"common", *scripts.NAMES}
    assert all(scripts.load(name).text for name in scripts.NAMES)


async def test_states_and_feed_replace_what_is_of_another_type(redis_world: RedisWorld) -> None:
    """What somebody else put under our keys is deleted by the next write, as the scripts do with theirs."""
    store, raw = redis_world.store(), redis_world.raw
    for kind in ("states", "feed"):
        raw.set(f"{redis_world.prefix}:{{p}}:{kind}", "junk")
    await store.put_states("p", {"a": b"1"})
    assert await store.states("p") == {"a": b"1"}
    await store.append("p", b"x", 10)
    assert [each.payload for each in await store.read("p", "0", 0)] == [b"x"]


async def test_a_field_that_is_no_text_hides_no_state(redis_world: RedisWorld) -> None:
    """One damaged name among the engines' states leaves the others readable."""
    store = redis_world.store()
    await store.put_states("p", {"a": b"1"})
    redis_world.raw.hset(f"{redis_world.prefix}:{{p}}:states", b"\xff\xfe", b"junk")
    assert await store.states("p") == {"a": b"1"}


async def test_a_feed_that_takes_no_more_begins_anew(redis_world: RedisWorld) -> None:
    """An entry of the last id that there is lets no other follow: the feed is begun again, and readers find it."""
    store, raw, key = redis_world.store(), redis_world.raw, f"{redis_world.prefix}:{{p}}:feed"
    await store.append("p", b"old", 100)
    last = raw.xadd(key, {"p": b"junk"}, id=f"{2**64 - 1}-{2**64 - 1}").decode()
    await store.put_snapshot("p", "a", last, [b"x"])
    await store.append("p", b"new", 100)
    assert [each.payload for each in await redis_world.store().read("p", last, 0)] == [b"new"]
    # Heads that name an entry which never comes would keep newer snapshots from being written.
    assert await store.snapshots("p") == {}
    assert list(raw.scan_iter(f"{redis_world.prefix}:{{p}}:snapshot:*")) == []


async def test_a_store_that_lost_everything_says_so(redis_world: RedisWorld) -> None:
    """Each replica hears of it once, from its next heartbeat on, whatever was decided in between."""
    store, raw = redis_world.stores[0], redis_world.raw
    for _ in range(2):
        assert [(await store.heartbeat("p", name, LEASE_MS)).emptied for name in ("r1", "r2")] == [False, False]
    redis_world.age(14.0)
    assert not (await store.heartbeat("p", "r1", LEASE_MS)).emptied
    raw.delete(*raw.scan_iter(f"{redis_world.prefix}:*"))
    await store.reserve(ask("c1", candidate("a")))
    assert [(await store.heartbeat("p", name, LEASE_MS)).emptied for name in ("r1", "r2")] == [True, True]
    assert [(await store.heartbeat("p", name, LEASE_MS)).emptied for name in ("r1", "r2")] == [False, False]

"""What only documents in Redis can get wrong: keys, lives, ages, damage, and connections."""

import time
from typing import Any

import pytest

from extproc.errors import StoreError
from extproc.state.document_store import Document
from extproc.state.redis import RedisStore
from extproc.state.store import Store
from tests.contract.conftest import RedisWorld

GROUP = "rollouts"
MINUTE_MS = 60_000
DAY_MS = 86_400_000


def base(world: RedisWorld) -> str:
    """First part of the group's keys."""
    return f"{world.prefix}:{{documents/{GROUP}}}:"


async def told(store: Store, name: str) -> list[bytes]:
    """Payloads of records, newest first."""
    return [each.payload for each in await store.records(GROUP, name, 1000)]


async def test_every_key_carries_the_groups_hash_tag(redis_world: RedisWorld) -> None:
    """All of them hash to one slot, whatever the names; none is a key of the pool that is called as the group is."""
    store = redis_world.store()
    await store.put_document(GROUP, "m{1}", Document(1, b"x"))
    await store.put_part(GROUP, "e{1}", "r{1}", b"x", MINUTE_MS)
    await store.record(GROUP, "m{1}", b"x", 10, MINUTE_MS)
    await store.put_states(GROUP, {"a": b"x"})
    keys = {key.decode() for key in redis_world.raw.scan_iter(f"{redis_world.prefix}:*")}
    own = {base(redis_world) + name for name in ("documents", "parts:e{1}", "records:m{1}")}
    assert keys == own | {f"{redis_world.prefix}:{{{GROUP}}}:states"}


@pytest.mark.parametrize("group", ["a{b", "a}b"])
async def test_groups_that_would_break_the_tag_are_refused(redis_world: RedisWorld, group: str) -> None:
    """Braces in a group would scatter its keys."""
    with pytest.raises(ValueError, match="braces"):
        await redis_world.store().documents(group)


async def test_the_time_is_redis_own(redis_world: RedisWorld) -> None:
    """It lies between two answers of TIME around the call."""
    store, raw = redis_world.store(), redis_world.raw
    before, now, after = raw.time(), (await store.documents(GROUP)).now, raw.time()
    assert before[0] + before[1] / 1e6 <= now <= after[0] + after[1] / 1e6


async def test_documents_and_time_are_one_call(redis_world: RedisWorld) -> None:
    """One round trip a verb, whose script Redis knows."""
    store = redis_world.stores[0]
    await store.put_document(GROUP, "m", Document(1, b"x"))
    before = _scripts_run(redis_world.raw)
    for _ in range(5):
        await store.documents(GROUP)
    assert _scripts_run(redis_world.raw) - before == 5


def _scripts_run(raw: Any) -> int:
    stats = raw.info("commandstats")
    return sum(int(stats.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in ("evalsha", "eval"))


async def test_scripts_come_back_after_a_script_flush(redis_world: RedisWorld) -> None:
    """A server that forgot the script is handed it again."""
    store = redis_world.stores[0]
    for revision in (1, 2):
        redis_world.raw.script_flush()
        assert await store.put_document(GROUP, "m", Document(revision, b"x"))


async def test_calls_of_documents_do_not_queue_before_decisions(redis_world: RedisWorld) -> None:
    """They have a connection of their own, one for all calls of a group that follow one another."""
    store, raw = redis_world.stores[0], redis_world.raw
    for turn in range(3):
        await store.documents(GROUP)
        await store.put_part(GROUP, f"e{turn}", "r", b"x", MINUTE_MS)
        await store.records(GROUP, f"m{turn}", 1)
    named = [each["name"] for each in raw.client_list() if each["name"].startswith("warmpath")]
    assert named.count("warmpath-feed") == 1
    assert named.count("warmpath") == len(redis_world.stores)


async def test_parts_and_records_end_by_themselves(redis_world: RedisWorld) -> None:
    """Parts their life after the last, records their age after the last; documents and history that is kept do not."""
    store, raw, keys = redis_world.store(), redis_world.raw, base(redis_world)
    await store.put_document(GROUP, "m", Document(1, b"x"))
    await store.put_part(GROUP, "e", "r", b"x", 10 * MINUTE_MS)
    await store.put_part(GROUP, "e", "s", b"x", MINUTE_MS)
    await store.record(GROUP, "m", b"x", 10, MINUTE_MS)
    await store.record(GROUP, "n", b"x", 10, MINUTE_MS)
    await store.record(GROUP, "n", b"x", 10, 0)
    lives = [raw.pttl(keys + name) for name in ("documents", "parts:e", "records:m", "records:n")]
    assert [lives[0], lives[3]] == [-1, -1]
    assert all(0 < life <= MINUTE_MS for life in lives[1:3])


async def test_records_older_than_their_age_go_with_the_next(redis_world: RedisWorld) -> None:
    """Exactly those: each record takes away what has passed its age meanwhile, and 0 takes nothing away."""
    store, raw, key = redis_world.store(), redis_world.raw, base(redis_world) + "records:m"
    now_ms = int(time.time() * 1000)
    for days in (40, 31, 29, 1):
        raw.xadd(key, {"p": b"%d days" % days}, id=f"{now_ms - days * DAY_MS}-0")
    await store.record(GROUP, "m", b"now", 100, 0)
    assert await told(store, "m") == [b"now", b"1 days", b"29 days", b"31 days", b"40 days"]
    await store.record(GROUP, "m", b"later", 100, 30 * DAY_MS)
    assert await told(store, "m") == [b"later", b"now", b"1 days", b"29 days"]


async def test_the_oldest_age_is_no_error(redis_world: RedisWorld) -> None:
    """Older than the epoch is any age."""
    store = redis_world.store()
    await store.record(GROUP, "m", b"x", 10, 100 * 365 * DAY_MS)
    assert await told(store, "m") == [b"x"]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"1",
        b"x",
        b"0 x",
        b"-1 x",
        b"01 x",
        b" 1 x",
        b"1.5 x",
        b"1e3 x",
        b"9" * 16 + b" x",
        b"9" * 400 + b" x",
        b"\xff\xfe 1",
        b"nan x",
        b"\xd9\xa1 x",
    ],
)
async def test_documents_that_cannot_be_read_are_absent(redis_world: RedisWorld, damage: bytes) -> None:
    """Damage hides no other document, and is written over by the next that is put: script and reader agree."""
    store, raw, key = redis_world.store(), redis_world.raw, base(redis_world) + "documents"
    await store.put_document(GROUP, "good", Document(1, b"x"))
    raw.hset(key, "bad", damage)
    raw.hset(key, b"\xff\xfe", b"1 x")
    assert (await store.documents(GROUP)).found == {"good": Document(1, b"x")}
    assert await store.put_document(GROUP, "bad", Document(7, b"y"))
    assert (await store.documents(GROUP)).found == {"good": Document(1, b"x"), "bad": Document(7, b"y")}


async def test_documents_that_somebody_else_wrote_well_are_read(redis_world: RedisWorld) -> None:
    """What reads as a document is one, up to the last revision, and its successor follows it."""
    store, raw, key = redis_world.store(), redis_world.raw, base(redis_world) + "documents"
    for digits, revision in ((b"1", 1), (b"9" * 15, 10**15 - 1), (b"9" * 14, 10**14 - 1)):
        raw.hset(key, "m", digits + b" 2 x")
        assert (await store.documents(GROUP)).found == {"m": Document(revision, b"2 x")}
        assert not await store.put_document(GROUP, "m", Document(revision, b"other"))
    assert await store.put_document(GROUP, "m", Document(10**14, b"next"))


async def test_keys_of_another_type_are_mended_by_the_next_write(redis_world: RedisWorld) -> None:
    """Nothing crashes: they are absent until somebody puts one, who may want to read them before."""
    store, raw, keys = redis_world.store(), redis_world.raw, base(redis_world)
    for name in ("documents", "parts:e", "records:m"):
        raw.set(keys + name, "junk")
    assert await store.parts(GROUP, "e") == {}
    assert await told(store, "m") == []
    with pytest.raises(StoreError):
        await store.drop_document(GROUP, "m")
    assert (await store.documents(GROUP)).found == {}
    raw.set(keys + "documents", "junk")
    assert await store.put_document(GROUP, "m", Document(1, b"x"))
    await store.put_part(GROUP, "e", "r", b"x", MINUTE_MS)
    await store.record(GROUP, "m", b"x", 10, MINUTE_MS)
    assert (await store.documents(GROUP)).found == {"m": Document(1, b"x")}
    assert await store.parts(GROUP, "e") == {"r": b"x"}
    assert await told(store, "m") == [b"x"]


async def test_a_part_of_no_text_name_hides_no_other(redis_world: RedisWorld) -> None:
    """One damaged name leaves the others readable."""
    store = redis_world.store()
    await store.put_part(GROUP, "e", "r", b"x", MINUTE_MS)
    redis_world.raw.hset(base(redis_world) + "parts:e", b"\xff\xfe", b"junk")
    assert await store.parts(GROUP, "e") == {"r": b"x"}


async def test_parts_without_end_are_given_up(redis_world: RedisWorld) -> None:
    """Far more than can be put: the reader says so, rather than read for ever."""
    store, raw = redis_world.store(), redis_world.raw
    raw.hset(base(redis_world) + "parts:e", mapping={f"r{number}": b"x" for number in range(20_000)})
    with pytest.raises(StoreError, match="far more parts"):
        await store.parts(GROUP, "e")


async def test_records_begin_anew_when_no_other_may_follow(
    redis_world: RedisWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """An entry of the last id lets no other follow: the stream is begun again, and a warning says so."""
    store, raw, key = redis_world.store(), redis_world.raw, base(redis_world) + "records:m"
    await store.record(GROUP, "m", b"old", 100, MINUTE_MS)
    raw.xadd(key, {"p": b"junk"}, id=f"{2**64 - 1}-{2**64 - 1}")
    await store.record(GROUP, "m", b"new", 100, MINUTE_MS)
    assert await told(store, "m") == [b"new"]
    assert "takes no more; beginning it anew" in caplog.text


async def test_records_of_another_shape_are_an_error(redis_world: RedisWorld) -> None:
    """Ids that are none of Redis' are refused by it, not by a crash."""
    store = redis_world.store()
    await store.record(GROUP, "m", b"x", 100, MINUTE_MS)
    for before in (f"{2**64}-0", f"1-{2**64}", "-5-1", "5--3"):
        with pytest.raises((StoreError, ValueError)):
            await store.records(GROUP, "m", 1, before)


async def test_errors_name_no_values(redis_world: RedisWorld) -> None:
    """A refused command is told by its code alone: no name, writer or payload in the text."""
    store, raw, keys = redis_world.store(), redis_world.raw, base(redis_world)
    raw.set(keys + "documents", "secret")
    with pytest.raises(StoreError) as caught:
        await store.drop_document(GROUP, "secret-name")
    assert "secret" not in str(caught.value)
    with pytest.raises(StoreError) as caught:
        await store.put_part(GROUP, "secret-name", "secret-writer\udfff", b"secret", MINUTE_MS)
    assert "secret" not in str(caught.value)


async def test_a_flush_takes_all_and_all_can_be_put_again(redis_world: RedisWorld) -> None:
    """With everything gone the verbs answer as at the beginning."""
    store: RedisStore = redis_world.stores[0]
    await store.put_document(GROUP, "m", Document(5, b"x"))
    await store.put_part(GROUP, "e", "r", b"x", MINUTE_MS)
    await store.record(GROUP, "m", b"x", 10, 0)
    redis_world.raw.delete(*redis_world.raw.scan_iter(f"{redis_world.prefix}:*"))
    assert (await store.documents(GROUP)).found == {}
    assert await store.parts(GROUP, "e") == {}
    assert await told(store, "m") == []
    assert await store.put_document(GROUP, "m", Document(6, b"y"))

"""Redis frozen, killed, restarted, flushed: decisions go on, counts come back, nothing is restarted on our side."""

import asyncio

import msgspec
import pytest

import redis
from extproc.clock import SystemClock
from extproc.errors import StoreError
from extproc.state.memory import MemoryStore
from extproc.state.redis import RedisStore
from extproc.state.resilient import ResilientStore
from extproc.state.trouble import Trouble
from extproc.state.values import Candidate, Reserve, Settle
from tests.chaos.traffic import DEADLINE_MS, ENGINES, FLOWS, PROBE_S, Traffic, all_is_well, counts_are, running
from tests.valkey import Valkey
from tests.waiting import until, until_async


async def test_a_frozen_server_stops_no_decision(server: Valkey, traffic: Traffic, witness: RedisStore) -> None:
    """SIGSTOP: those under way wait once, later decisions do not ask; SIGCONT mends everything."""
    await traffic.reserve(6)
    waited = traffic.waited
    server.freeze()
    await traffic.settle(2)
    assert traffic.store.degraded_in("p")
    asked = traffic.store.stats.calls
    for _ in range(20):
        await traffic.reserve()
    await traffic.settle(10)
    assert traffic.store.stats.calls == asked
    assert traffic.waited - waited == 2
    assert traffic.store.troubles() == {"p": Trouble.SLOW}
    server.thaw()
    await all_is_well(traffic, witness)
    assert traffic.store.troubles() == {}


async def test_a_freeze_amid_traffic_costs_each_request_under_way_one_wait(
    server: Valkey, traffic: Traffic, witness: RedisStore
) -> None:
    """However many requests come during the freeze: no more calls waited than were under way when it began."""
    async with traffic.flowing():
        waited = traffic.waited
        server.freeze()
        await until(lambda: traffic.store.degraded_in("p"))
        await traffic.made(20 * FLOWS)
        assert traffic.waited - waited <= FLOWS
        server.thaw()
        await until(lambda: not traffic.store.degraded)
        await traffic.made(2 * FLOWS)
    await all_is_well(traffic, witness)


async def test_a_long_freeze_is_survived(server: Valkey, traffic: Traffic, witness: RedisStore) -> None:
    """Frozen for so long that the connection is given up: what lay in its buffers does no harm afterwards."""
    await traffic.reserve(4)
    server.freeze()
    for _ in range(5):
        await traffic.reserve(2)
        await traffic.settle(1)
        await asyncio.sleep(0.7)
    server.thaw()
    await all_is_well(traffic, witness)


async def test_more_ends_than_can_be_kept_leave_nothing_behind(server: Valkey, witness: RedisStore) -> None:
    """A worker that cannot keep all the ends of a long outage gives up its charges and tells those that are open."""
    shared = RedisStore(server.url, DEADLINE_MS)
    store = ResilientStore(shared, MemoryStore(SystemClock()), probe_s=PROBE_S, max_queued=10)
    await store.ping()
    traffic = Traffic(store)
    await traffic.reserve(40)
    server.freeze()
    await traffic.settle(25)
    assert store.stats.dropped > 0
    server.thaw()
    await until(lambda: store.settled)
    await counts_are(witness, 15)
    await all_is_well(traffic, witness)
    await store.close()


async def test_a_killed_and_restarted_server_is_told_what_is_open(
    server: Valkey, traffic: Traffic, witness: RedisStore
) -> None:
    """SIGKILL loses all data: decisions go on meanwhile, and the new server counts what is still in flight."""
    await traffic.reserve(5)
    server.kill()
    for _ in range(10):
        await traffic.reserve()
    await traffic.settle(4)
    assert traffic.store.degraded_in("p")
    server.start()
    await until(lambda: traffic.store.settled)
    await counts_are(witness, 11)
    for session, endpoint in traffic.pins.items():
        assert await witness.pinned("p", session) == endpoint
    await all_is_well(traffic, witness)


async def test_a_new_server_learns_what_open_requests_hold_and_where_they_are_pinned(
    server: Valkey, store: ResilientStore, witness: RedisStore
) -> None:
    """Sequences, output tokens and next turns' pins are told again, made before the loss or during it.

    Of their prompts, only what a decision without the server may still have to prefill.
    """
    queued = Candidate("e1", 0.0, 100.0, 1e-6, floor_tokens=5000.0)
    turn = Reserve(
        "p", "before", "worker", (queued,), next_pin_key="t1", sequences=4, output_tokens=100.5, backlog_weight=0.0
    )
    await store.reserve(turn)
    server.kill()
    both = (ENGINES[0], queued)
    got = await store.reserve(
        msgspec.structs.replace(turn, charge_id="during", candidates=both, pin_key="t1", next_pin_key="t2")
    )
    assert (got.endpoint, got.pinned, got.running, got.output_tokens) == ("e1", True, 4, 100.5)
    server.start()
    await until(lambda: store.settled)
    await counts_are(witness, 8)
    loads = await witness.loads("p")
    assert (list(loads), loads["e1"].output_tokens) == (["e1"], 201.0)
    assert loads["e1"].backlog_tokens == pytest.approx(100.0)
    for pin in ("t1", "t2"):
        assert await witness.pinned("p", pin) == "e1"
    for charge in ("before", "during"):
        await store.settle(Settle("p", charge, "worker", refund=True))
    await counts_are(witness, 0)


async def test_what_a_flush_took_is_back_with_the_next_heartbeat(
    server: Valkey, traffic: Traffic, witness: RedisStore
) -> None:
    """FLUSHALL fails no call: a heartbeat finds the loss. Idle sessions are pinned again too."""
    await traffic.reserve(40)
    await traffic.settle(10)
    with redis.Redis(port=server.port) as raw:
        raw.flushall()
    assert await running(witness) == 0
    await traffic.beat()
    await until(lambda: traffic.store.settled)
    assert await running(witness) == 30
    assert traffic.store.stats.lost == 30
    assert traffic.store.stats.opens == 0
    for session, endpoint in traffic.pins.items():
        assert await witness.pinned("p", session) == endpoint
    await all_is_well(traffic, witness)


async def test_a_flush_is_noticed_by_who_has_nothing_open(
    server: Valkey, traffic: Traffic, witness: RedisStore
) -> None:
    """No charge is missing, and yet the heartbeat finds the loss: sessions that are idle keep their engines."""
    await traffic.reserve(40)
    await traffic.settle()
    await traffic.beat()
    with redis.Redis(port=server.port) as raw:
        raw.flushall()
    await traffic.beat()
    assert traffic.store.stats.emptied == 1
    await until(lambda: traffic.store.settled)
    for session, endpoint in traffic.pins.items():
        assert await witness.pinned("p", session) == endpoint
    await traffic.beat()
    assert (traffic.store.stats.emptied, traffic.store.stats.lost) == (1, 0)


async def test_flushing_everything_fails_nothing(server: Valkey, traffic: Traffic, witness: RedisStore) -> None:
    """FLUSHALL and SCRIPT FLUSH amid traffic: no call fails, no count goes below zero or stays behind."""
    with redis.Redis(port=server.port) as raw:
        async with traffic.flowing():
            for _ in range(10):
                await asyncio.to_thread(raw.flushall)
                await traffic.made(FLOWS)
                await traffic.beat()
                await asyncio.to_thread(raw.script_flush)
                await traffic.made(FLOWS)
    await all_is_well(traffic, witness)


async def test_a_replica_that_was_taken_for_dead_is_told_by_its_heartbeat(
    traffic: Traffic, witness: RedisStore
) -> None:
    """A worker that stood still for longer than its lease was reaped by others; its charges come back with it."""
    await traffic.reserve(7)
    await witness.release("p", "worker")
    assert await running(witness) == 0
    await traffic.beat()
    await until(lambda: traffic.store.settled)
    assert await running(witness) == 7
    await all_is_well(traffic, witness)


async def test_a_server_that_is_not_there_yet(witness: RedisStore, server: Valkey) -> None:
    """A worker that starts before Redis decides locally and joins when it comes."""
    server.kill()
    store = ResilientStore(RedisStore(server.url, DEADLINE_MS), MemoryStore(SystemClock()), probe_s=PROBE_S)
    traffic = Traffic(store)
    await traffic.reserve(3)
    assert store.degraded_in("p")
    server.start()
    await all_is_well(traffic, witness)
    await store.close()


async def test_the_feed_survives_a_restart(server: Valkey, store: ResilientStore) -> None:
    """A reader is told that the server died, and goes on with what comes after its return, from the same position."""
    last = await store.append("p", b"before", 100)
    reader = asyncio.create_task(store.read("p", last, 30_000))
    await asyncio.sleep(0.05)
    server.kill()
    with pytest.raises(StoreError):
        await reader
    server.start()

    async def appended() -> bool:
        try:
            return bool(await store.append("p", b"after", 100))
        except StoreError:
            return False

    await until_async(appended)
    assert [each.payload for each in await store.read("p", last, 30_000)] == [b"after"]

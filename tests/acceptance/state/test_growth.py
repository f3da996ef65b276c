"""Unique prompts without end: memory of the workers and of the store levels off under its caps.

`WARMPATH_GROWTH_PROMPTS` sets the number of prompts; the whole measure is a million, which takes about half an hour.
"""

import asyncio
import gc
import itertools
import os
from array import array
from pathlib import Path
from resource import getpagesize
from typing import Any

import msgspec

import redis
from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.clock import SystemClock
from extproc.config import Config
from extproc.deciding import Asked, Outcome
from extproc.gossip import Gossip
from extproc.request.model import Request, RouteKind
from extproc.router import Router, Surroundings
from extproc.state.feed import Answered
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.redis import RedisStore
from tests.valkey import Valkey
from tests.waiting import until

PROMPTS = int(os.environ.get("WARMPATH_GROWTH_PROMPTS", "6000"))
POOL = "main"
TOKENS = 32_000
BLOCKS = TOKENS // 64
ENDPOINTS = [f"10.0.0.{at}:8000" for at in range(1, 5)]
KV_TOKENS = 400_000
FEED_BYTES = 8 * 1024 * 1024
SESSIONS = 1000
MAXMEMORY = 48 * 1024 * 1024
AT_ONCE = 16
MOST_GROWTH = 24 * 1024 * 1024
"""Of this process, two workers' knowledge and the test itself, in the second half. Without bounds 6,000 prompts of 500
blocks in two indexes are 216 MB."""
MOST_STORE_GROWTH = 4 * 1024 * 1024
"""Of the store in the second half; the feed of 6,000 such prompts is 26 MB."""


class Silent:
    """Counts nothing."""

    def decided(self, outcome: Outcome) -> None:
        """See `Recorder.decided`."""

    def settled(self, pool: str) -> None:
        """See `Recorder.settled`."""


class Replica:
    """One worker: a router over knowledge of its own, and its part in the feed."""

    def __init__(self, store: RedisStore, name: str) -> None:
        clock, numbers = SystemClock(), itertools.count()
        self.known = PoolKnowledge(Priors(kv_tokens=KV_TOKENS))
        fleet = Fleet(
            {POOL: Pool(POOL, "predicted_ttft", tuple(Endpoint(each, each, 8000.0) for each in ENDPOINTS))},
            {"m": POOL},
            POOL,
        )
        self.gossip = Gossip(store, {POOL: self.known}, name, 20_000, FEED_BYTES)
        self.around = Surroundings(
            config=msgspec.convert(SETTINGS, Config),
            fleet=fleet,
            knowledge={POOL: self.known},
            store=store,
            replica=name,
            new_charge_id=lambda: f"{name}-{next(numbers):x}",
        )
        self._clock = clock
        self._router = Router(self.around, self.gossip, Silent(), clock)

    async def serve(self, number: int) -> None:
        """Decide for a prompt that nobody ever sent, in a session of its own, and learn from its answer."""
        blocks = array("Q", os.urandom(8 * BLOCKS))
        turn = number.to_bytes(16, "little")
        request = Request(kind=RouteKind.CHAT, model="m", session=f"s{number}", max_tokens=64, turn=turn)
        asked = Asked(request, blocks, TOKENS * 4.0)
        pool = self.around.fleet.pools[POOL]
        decision = await self._router.choose(asked, pool, None, self._clock.monotonic())
        await self._router.settle(decision)
        endpoint = str(decision.metadata["endpoint"])
        answer = Answered(
            charge_id=decision.charge_id,
            endpoint=endpoint,
            work_tokens=float(TOKENS),
            ttft_s=TOKENS / 8000.0,
            prompt_bytes=TOKENS * 4.0,
            prompt_tokens=float(TOKENS),
            cached_tokens=0.0,
            output_tokens=50.0,
        )
        self.gossip.learn(POOL, answer)

    @property
    def evicted(self) -> int:
        """Blocks that were put into profiles and are not held any more."""
        inserted = sum(self.known.caches.of(name).inserted for name in ENDPOINTS)
        return inserted - sum(map(self.known.held, ENDPOINTS))


SETTINGS: dict[str, Any] = {
    "models": {"m": {"pool": POOL}},
    "pools": {POOL: {"endpoints": ENDPOINTS}},
    "routing": {"session": {"max": SESSIONS}},
}


async def test_a_stream_of_unique_prompts_levels_off() -> None:
    """Half of the prompts fill every cap; the other half add nothing: blocks are evicted, the feed is trimmed.

    The store is not allowed to evict, and has a memory of 48 MB: it must not have refused anything either.
    """
    with Valkey(0, "--maxmemory", str(MAXMEMORY), "--maxmemory-policy", "noeviction") as valkey:
        stores = [RedisStore(valkey.url, 10_000.0) for _ in range(2)]
        for store in stores:
            await store.ping()
        replicas = [Replica(store, f"r{at}") for at, store in enumerate(stores)]
        raw: Any = redis.Redis(port=valkey.port)
        running = [asyncio.create_task(replica.gossip.run()) for replica in replicas]
        for replica in replicas:
            await replica.gossip.caught_up(60.0)
        await drive(replicas, 0, PROMPTS // 2)
        half, half_store = resident(), used(raw)
        await drive(replicas, PROMPTS // 2, PROMPTS)
        end, end_store = resident(), used(raw)
        print(  # the figures are what a long run is made for
            f"{PROMPTS} prompts: process {half >> 20} to {end >> 20} MiB, store {half_store >> 20} to"
            f" {end_store >> 20} MiB, evicted {[replica.evicted for replica in replicas]} blocks,"
            f" written {[replica.gossip.counts.written for replica in replicas]} snapshots"
        )
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for store in stores:
            await store.close()
        assert end - half <= MOST_GROWTH
        assert end_store - half_store <= MOST_STORE_GROWTH
        assert all(replica.evicted > 0 for replica in replicas)
        assert all(
            replica.known.held(name) <= replica.known.capacity(name) for replica in replicas for name in ENDPOINTS
        )
        assert [replica.gossip.counts.lost for replica in replicas] == [0, 0]
        assert raw.info("stats")["evicted_keys"] == 0
        assert "errorstat_OOM" not in raw.info("errorstats")
        raw.close()


async def drive(replicas: list[Replica], first: int, end: int) -> None:
    """Prompts by turns, some at a time; then wait until both have heard of all."""
    for start in range(first, end, AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, end))
        await asyncio.gather(*(replicas[number % len(replicas)].serve(number) for number in numbers))
    for replica in replicas:
        await replica.gossip.flush()
    followers = [replica.gossip._pools[POOL].follower for replica in replicas]
    await until(lambda: len({follower.frontier for follower in followers}) == 1)


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * getpagesize()


def used(raw: Any) -> int:
    """Bytes that the store has in use."""
    return int(raw.info("memory")["used_memory"])

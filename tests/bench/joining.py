"""A worker that joins: how long until it knows what the others know, from a real Valkey, and what a decision tells."""

import asyncio
import gc
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

import msgspec

import redis
from extproc.gossip import FEED_BYTES, Gossip
from extproc.state import feed
from extproc.state.feed import Answered, Delta, Held, Measured, Turned
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.learn import marks
from extproc.state.redis import RedisStore
from extproc.state.snapshots import POOL
from tests.bench.machine import cpu_s
from tests.bench.processes import run
from tests.bench.report import Check, Findings, Row, Scale
from tests.valkey import Valkey

_ENTRIES = 5_000_000
_ENDPOINTS = 64
_HEADS = 200
_HEAD_BLOCKS = 20
_PROMPT_BLOCKS = 100
_LATER = 0.25
"""Part of a feed's window that was written after the snapshots: who writes them lets it come to no more."""
_READY_S = 10.0
_PAUSE_MS = 3.0


def bench(scale: Scale) -> Findings:
    """Fill one worker's knowledge, let it write its snapshots, let another join; then encode what decisions tell."""
    entries = scale.pick(_ENTRIES, _ENTRIES // 10)
    findings = Findings(f"a worker that joins: {entries:,} entries at {_ENDPOINTS} endpoints, snapshots and a feed")
    with Valkey() as valkey:
        findings.rows += run(_Fleet(valkey, entries).run())
    found = {str(row["what"]): float(row["value"]) for row in findings.rows}
    findings.rows += _told(scale.pick(2000, 400))
    findings.checks += [
        Check("a worker that joins knows what the others do", found["join"], _READY_S, "s"),
        Check("longest pause of its event loop meanwhile", found["join, longest pause"], _PAUSE_MS, "ms"),
        Check("longest pause of who writes the snapshots", found["write, longest pause"], _PAUSE_MS, "ms"),
    ]
    findings.notes += [
        f"the feed has {_LATER:.0%} of its window written after the snapshots, {FEED_BYTES >> 20} MiB at most",
        "pauses: the most work of the event loop's thread between two turns of a task that sleeps for a millisecond; by"
        " the clock it is how much later than asked that task wakes, other processes' share of the cores included",
        "a decision tells four deltas: what an endpoint holds, who answered, its lengths, its turn",
    ]
    return findings


class _Fleet:
    """One worker that knows everything, and one that joins."""

    def __init__(self, valkey: Valkey, entries: int) -> None:
        self._valkey = valkey
        self._entries = entries
        self._rng = random.Random(1)
        self._names = [f"10.0.0.{at}:8000" for at in range(_ENDPOINTS)]
        self._heads = [_random(self._rng, _HEAD_BLOCKS) for _ in range(_HEADS)]

    async def run(self) -> list[Row]:
        """Figures of both."""
        store = RedisStore(self._valkey.url, 2000.0)
        await store.ping()
        raw = redis.Redis(port=self._valkey.port)
        old = self._knowledge()
        self._fill(old)
        gossip = Gossip(store, {"main": old}, "old", 20_000)
        following = asyncio.create_task(gossip.run())
        await gossip.caught_up(60.0)
        saving = gossip._pools["main"].saving

        async def write() -> None:
            for name in (POOL, *self._names):
                await saving.write(name)

        wrote = await _measured(write)
        snapshots = int(raw.info("memory")["used_memory"])
        await self._later(gossip, old)
        whole = int(raw.info("memory")["used_memory"])
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        joining = RedisStore(self._valkey.url, 2000.0)
        await joining.ping()
        new = self._knowledge()
        gc.collect()
        busy = cpu_s(self._valkey.pid)
        joiner = Gossip(joining, {"main": new}, "new", 20_000)
        reading = asyncio.create_task(joiner.run())
        joined = await _measured(lambda: joiner.caught_up(600.0))
        busy = cpu_s(self._valkey.pid) - busy
        held = sum(map(new.held, self._names))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        for each in (store, joining):
            await each.close()
        raw.close()
        return [
            _row("entries of who was there", sum(map(old.held, self._names)), ""),
            _row("entries of who joined", held, ""),
            _row("snapshots in Redis", snapshots / 1e6, "MB"),
            _row("feed in Redis", (whole - snapshots) / 1e6, "MB"),
            _row("write all snapshots", wrote.seconds, "s"),
            _row("write, CPU", wrote.cpu, "s"),
            _row("write, longest pause", wrote.pause_ms, "ms"),
            _row("write, longest pause by the clock", wrote.late_ms, "ms"),
            _row("join", joined.seconds, "s"),
            _row("join, CPU", joined.cpu, "s"),
            _row("join, CPU of Valkey", busy, "s"),
            _row("join, longest pause", joined.pause_ms, "ms"),
            _row("join, longest pause by the clock", joined.late_ms, "ms"),
        ]

    def _knowledge(self) -> PoolKnowledge:
        # 64 tokens a block; on average a full profile uses 63/64 of its capacity.
        known = PoolKnowledge(Priors(kv_tokens=self._entries // _ENDPOINTS * 64 * 64 // 63))
        for name in self._names:
            known.engine_seen(name, 0, 1_700_000_000.0)
        return known

    def _fill(self, known: PoolKnowledge) -> None:
        own = _PROMPT_BLOCKS - _HEAD_BLOCKS
        for at in range(int(1.2 * self._entries / own)):
            known.caches.hold(self._names[at % _ENDPOINTS], self._prompt())

    async def _later(self, gossip: Gossip, known: PoolKnowledge) -> None:
        """Decisions that only the feed has: as many bytes as may come between two snapshots of a pool."""
        start = _LATER * min(1.0, self._entries / _ENTRIES)
        most, told = start * FEED_BYTES, 0
        while told < most:
            for _ in range(32):
                name = self._rng.choice(self._names)
                for delta in known.decided(f"old-{told:x}", name, self._prompt()):
                    gossip.publish("main", delta)
                    told += feed.size(delta)
            await gossip.flush()

    def _prompt(self) -> list[int]:
        return self._rng.choice(self._heads) + _random(self._rng, _PROMPT_BLOCKS - _HEAD_BLOCKS)


class _Measured(msgspec.Struct, frozen=True):
    """What something took: by the clock, of this process' CPUs, and of the event loop in one piece: CPU and clock."""

    seconds: float
    cpu: float
    pause_ms: float
    late_ms: float


async def _measured(work: Callable[[], Awaitable[object]]) -> _Measured:
    pause = late = 0.0

    async def watch() -> None:
        nonlocal pause, late
        while True:
            asked, spent = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            pause = max(pause, time.thread_time() - spent)
            late = max(late, time.perf_counter() - asked - 0.001)

    watching = asyncio.create_task(watch())
    began, cpu = time.perf_counter(), time.process_time()
    await work()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    return _Measured(seconds, cpu, 1000 * pause, 1000 * late)


def _told(decisions: int) -> Iterator[Row]:
    """Bytes of feed that a decision takes, as it is and without packing, and what packing costs."""
    for what, grown, shared in (
        ("chat, 20 blocks shared, 20 a turn", 20, 20),
        ("agents, 100 shared, 100 a turn", 100, 100),
        ("long shared beginning, 500", 10, 500),
    ):
        batches = list(_batches(decisions, grown, shared))
        plain = sum(len(msgspec.msgpack.encode(batch)) for batch in batches)
        blocks = sum(len(each.blocks) for batch in batches for each in batch if isinstance(each, Held | Measured))
        began = time.process_time()
        packed = [feed.encode("0123456789abcdef", batch, 1) for batch in batches]
        encoded = time.process_time()
        for entry in packed:
            feed.decode(entry)
        decoded = time.process_time()
        yield _row(f"{what}: bytes plain", plain / decisions, "B")
        yield _row(f"{what}: of these blocks", blocks / decisions, "B")
        yield _row(f"{what}: bytes told", sum(map(len, packed)) / decisions, "B")
        yield _row(f"{what}: encode", 1e6 * (encoded - began) / decisions, "us")
        yield _row(f"{what}: decode", 1e6 * (decoded - encoded) / decisions, "us")


def _batches(decisions: int, grown: int, shared: int) -> Iterator[Sequence[Delta]]:
    """Batches of five decisions over 100 conversations that grow by so many blocks a turn, twenty turns each."""
    rng = random.Random(2)
    heads = [_random(rng, shared) for _ in range(3)]
    conversations = [list(rng.choice(heads)) for _ in range(100)]
    batch: list[Delta] = []
    for number in range(decisions):
        at = rng.randrange(len(conversations))
        if len(conversations[at]) > shared + 20 * grown:
            conversations[at] = list(rng.choice(heads))
        blocks = conversations[at]
        blocks += _random(rng, grown)
        name, charge_id, tokens = f"10.0.0.{rng.randrange(64)}:8000", f"0123456789abcdef-{number:x}", 64.0 * len(blocks)
        batch += [
            Held(name, feed.pack(blocks), charge_id, 1_764_470_000.25, blocks[shared - 1]),
            Answered(
                charge_id, name, 64.0 * grown, rng.random(), 4 * tokens, tokens, 0.0, tokens - 64.0 * grown, 200.0
            ),
            Measured(feed.pack(marks(blocks)), 4.0 + rng.random(), 200.0),
            Turned(os.urandom(16), name, tokens, 200.0, 1_764_470_000.25),
        ]
        if number % 5 == 4:
            yield batch
            batch = []


def _row(what: str, value: float, unit: str) -> Row:
    return {"what": what, "value": float(value), "unit": unit}


def _random(rng: random.Random, count: int) -> list[int]:
    return [rng.getrandbits(64) for _ in range(count)]

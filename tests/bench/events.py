"""What KV events cost: 50,000 blocks a second, stored and removed, from 100 engines, read by one keeper."""

import asyncio
import time
from collections.abc import Sequence

from aiohttp import ClientSession

from extproc.clock import SystemClock
from extproc.config import Config, Model, Pool
from extproc.fleet.asking import new_session
from extproc.fleet.holding import Holding
from extproc.fleet.kv_reader import ROUND_S, WORK, KvReader
from extproc.outbox import Outbox
from extproc.state.endpoint import EndpointState, Source
from extproc.state.exact_blocks import chain, root
from extproc.state.feed import Cached, decode, unpack
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from extproc.telemetry.metrics import Metrics
from tests.bench.kv_publishers import BLOCK, CACHE, REMOVED, STEPS, STORED, WATCHED, tokens
from tests.bench.processes import listening, run
from tests.bench.report import Check, Findings, Row, Scale

_ENGINES = 100
_FILL_S = CACHE / STORED / STEPS
"""Time in which the caches fill up; removals begin then."""
_BLOCKS = _ENGINES * STEPS * (STORED + REMOVED)
_APPENDED = tuple[float, bytes]


class _Feed(MemoryStore):
    """Notes when each entry was appended; a worker's part is measured afterwards."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.entries: list[_APPENDED] = []

    async def append(self, pool: str, payload: bytes, cap: int) -> str:  # noqa: ARG002 - the verb's own
        """See `Store.append`."""
        self.entries.append((time.time(), payload))
        return f"{len(self.entries)}-0"


def bench(scale: Scale) -> Findings:
    """Read while the engines publish, then let one worker apply what was told."""
    seconds = scale.pick(20, 5)
    findings = Findings(f"{_ENGINES} engines, {_BLOCKS:,} blocks/s stored and removed, one keeper, one worker")
    findings.rows += run(_measure(seconds))
    found = {str(row["what"]): float(row["value"]) for row in findings.rows}
    findings.checks += [
        Check("keeper's CPU for all events", found["keeper"], 1.0, "core"),
        Check("worker's CPU for all events", found["worker"], 0.25, "core"),
        Check("published to told, 99th percentile", found["lag, 99th"], 250.0, "ms"),
    ]
    findings.notes += [
        f"each engine publishes {STEPS} batches a second with {STORED} blocks of {BLOCK} tokens stored and {REMOVED}"
        " removed, over TCP on loopback; one other process publishes for all",
        f"lag: from the time in a batch to its first block's entry being handed to the store, of {WATCHED} engines; it"
        " waits up to 20 ms to be read and up to 50 ms to be sent",
        "CPU is that of the blocks that were read, scaled to the full rate: on a busy machine fewer are published",
        "longest pause: how much later than asked a task of the keeper's event loop woke that sleeps for a millisecond,"
        " other processes' share of the cores included",
    ]
    return findings


async def _measure(seconds: int) -> list[Row]:
    total = _FILL_S + 1.0 + seconds
    arguments = ("--engines", str(_ENGINES), "--seconds", str(total))
    async with listening("kv_publishers", *arguments) as (_, said), new_session("bench") as session:
        begin, ports = float(said[0]), said[1:]
        store = _Feed()
        reader, metrics = _reader(store, ports)
        idle, busy = _Watch(), _Watch()
        await _read_until(reader, session, begin - 1.5, _Watch())
        await _read_until(reader, session, begin, idle)
        await _read_until(reader, session, begin + _FILL_S + 1.0, _Watch())
        before, first = _blocks(metrics), len(store.entries)
        await _read_until(reader, session, begin + total - 0.5, busy)
        blocks = _blocks(metrics) - before
        last = len(store.entries)
        async with asyncio.timeout(60):
            await _read_until(reader, session, time.time() + 1.0, _Watch())
            while len(said) == 1 + _ENGINES:
                await _read_until(reader, session, time.time() + 0.5, _Watch())
        await reader.close()
    published = [float(at) for at in said[1 + _ENGINES :]]
    lags = _lags(store.entries, published, begin + _FILL_S + 1.0)
    at_full_rate = _BLOCKS / blocks
    applied_s, known = _applied(store.entries[:last], first)
    sent = sum(len(payload) for _, payload in store.entries[first:last])
    return [
        {"what": "blocks read", "value": blocks / busy.took_s, "unit": "1/s"},
        {"what": "keeper", "value": busy.spent_s * at_full_rate, "unit": "core"},
        {"what": "keeper, no events", "value": idle.spent_s / idle.took_s, "unit": "core"},
        {"what": "keeper, longest pause", "value": busy.longest_ms, "unit": "ms"},
        {"what": "worker", "value": applied_s * at_full_rate, "unit": "core"},
        {"what": "blocks a worker knows", "value": known, "unit": ""},
        {"what": "lag, median", "value": _percentile(lags, 0.5), "unit": "ms"},
        {"what": "lag, 99th", "value": _percentile(lags, 0.99), "unit": "ms"},
        {"what": "entries", "value": (last - first) / busy.took_s, "unit": "1/s"},
        {"what": "feed", "value": sent / busy.took_s / 1e6, "unit": "MB/s"},
        {"what": "gaps", "value": _total(metrics, "warmpath_kv_event_faults_total", '"gaps"'), "unit": ""},
    ]


class _Watch:
    """What the process spent while it was read."""

    spent_s = 0.0
    took_s = 0.0
    longest_ms = 0.0


def _reader(store: _Feed, ports: Sequence[str]) -> tuple[KvReader, Metrics]:
    states = {
        f"127.0.0.1:{port}": EndpointState(
            f"127.0.0.1:{port}", started_at=1.0, block_tokens=BLOCK, sources=(Source(endpoint=f"tcp://*:{port}"),)
        )
        for port in ports
    }
    metrics, clock = Metrics(), SystemClock()
    holding = Holding(store, WORK, "bench", clock)
    reader = KvReader(lambda: {"main": states}, store, holding, lambda: Outbox("bench-kv"), metrics.kv, clock)
    pool = Pool(endpoints=list(states), profiles="precise")
    reader.apply(Config(models={"m": Model(pool="main")}, pools={"main": pool}))
    return reader, metrics


async def _read_until(reader: KvReader, session: ClientSession, wall: float, watch: _Watch) -> None:
    """Let the reader run as it does in a keeper."""
    began, spent = time.monotonic(), time.process_time()
    ended = asyncio.Event()
    reading = asyncio.create_task(_rounds(reader, session, ended))
    while time.time() < wall:
        asked = time.monotonic()
        await asyncio.sleep(0.001)
        watch.longest_ms = max(watch.longest_ms, (time.monotonic() - asked - 0.001) * 1000)
    # A round that is cancelled loses what it has fetched.
    ended.set()
    await reading
    watch.took_s = time.monotonic() - began
    watch.spent_s = time.process_time() - spent


async def _rounds(reader: KvReader, session: ClientSession, ended: asyncio.Event) -> None:
    while not ended.is_set():
        await reader.round(session)
        await asyncio.sleep(ROUND_S)


def _applied(entries: Sequence[_APPENDED], first: int) -> tuple[float, int]:
    """CPU seconds in which a worker reads and applies the entries from `first` on; the blocks that it knows then."""
    known = PoolKnowledge(Priors())
    spent = 0.0
    for number, (_, payload) in enumerate(entries):
        if number == first:
            spent = time.process_time()
        for delta in decode(payload).deltas:
            known.apply(delta, origin="bench-kv")
    return time.process_time() - spent, len(known.caches.exact.index)


def _total(metrics: Metrics, name: str, label: str = "") -> float:
    lines = (line for line in metrics.page().decode().splitlines() if line.startswith(name) and label in line)
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _blocks(metrics: Metrics) -> float:
    """Blocks stored and removed so far, as shown once a second."""
    stored, removed = (_total(metrics, "warmpath_kv_events_total", f'"{kind}"') for kind in ("stored", "removed"))
    return stored * STORED + removed


def _lags(entries: Sequence[_APPENDED], published: Sequence[float], since: float) -> list[float]:
    """Milliseconds from publishing to the feed, sorted, of batches published since then."""
    seen: dict[int, float] = {}
    for at, payload in entries:
        for delta in decode(payload).deltas:
            if isinstance(delta, Cached):
                for block in unpack(delta.blocks):
                    seen.setdefault(block, at)
    lags = list[float]()
    for slot, at in enumerate(published):
        (block,) = chain(tokens(slot % WATCHED, slot // WATCHED)[:BLOCK], BLOCK, root(""))
        if at >= since and block in seen:
            lags.append((seen[block] - at) * 1000)
    return sorted(lags)


def _percentile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))] if values else 0.0

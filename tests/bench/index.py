"""The prefix indexes by themselves: memory of an entry, time of a match, and the longest pause an insert makes."""

import gc
import multiprocessing
import random
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path
from resource import getpagesize

from extproc.state.exact import ALL_TIERS, ExactIndex
from extproc.state.profile import PrefixIndex
from tests.bench.report import Check, Findings, Row, Scale, middle

_ENDPOINTS = 64
_SYSTEM_BLOCKS = 20
_PROMPT_BLOCKS = 100
_LONG = 2000
_SHORT = 32
_EVENT = 512
_BUDGET_ENTRIES = 5_000_000
_BUDGET_MB = 400
_PAUSE_MS = 3


def bench(scale: Scale) -> Findings:
    """Memory of full profiles, matches against 8, 64 and 1,000 endpoints, inserts into small and large profiles."""
    entries = scale.pick(_BUDGET_ENTRIES, _BUDGET_ENTRIES // 10)
    findings = Findings(f"the prefix index of {entries:,} entries at {_ENDPOINTS} endpoints: bytes, matches, inserts")
    for part in (partial(_estimated, scale, entries), partial(_exact, scale, 1), partial(_exact, scale, 5)):
        found = _apart(part)
        findings.rows += found.rows
        findings.checks += found.checks
    for capacity in (entries // _ENDPOINTS, scale.pick(1_000_000, 200_000)):
        findings.rows += [_inserts(capacity, blocks) for blocks in (_SHORT, _LONG)]
    _check(findings)
    findings.notes.append("resident: growth of a process of its own; tables: bytes of the slots and rows themselves")
    findings.notes.append("middle is the median, most the greatest; times are CPU of the thread")
    return findings


def _apart(part: Callable[[], Findings]) -> Findings:
    """Measure in a new process: in one that held an index before, another one fills its free memory and grows nothing.

    Raises:
        BrokenProcessPool: the process died, mostly for want of memory.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(part).result()


def _estimated(scale: Scale, entries: int) -> Findings:
    """The index of estimated profiles: memory and matches."""
    findings = Findings("")
    gc.collect()
    before = _resident()
    index = _full(entries)
    gc.collect()
    held = len(index)
    resident, slots = (_resident() - before) / held, index.nbytes / held
    findings.rows += [
        _row("bytes an entry, resident", _ENDPOINTS, 1, [resident]),
        _row("bytes an entry, tables", _ENDPOINTS, 1, [slots]),
    ]
    findings.checks.append(
        Check(
            f"memory of {_BUDGET_ENTRIES:,} entries (measured: {held:,})",
            max(resident, slots) * _BUDGET_ENTRIES / 1e6,
            _BUDGET_MB,
            "MB",
        )
    )
    rounds = scale.pick(31, 11)
    for endpoints in (8, _ENDPOINTS, 1000):
        findings.rows += _matches(index if endpoints <= _ENDPOINTS else PrefixIndex(), endpoints, rounds)
    return findings


def _exact(scale: Scale, copies: int) -> Findings:
    """The exact index: entries that share no block, or entries of which each block is at several random endpoints.

    The first fills the table most, the second makes the most different sets of holders.
    """
    findings = Findings("")
    gc.collect()
    before = _resident()
    index = _full_exact(scale.pick(_BUDGET_ENTRIES, _BUDGET_ENTRIES // 5), copies)
    gc.collect()
    resident = (_resident() - before) / len(index)
    what = "exact, own blocks" if copies == 1 else f"exact, each block at {copies}"
    findings.rows.append(_row(f"{what}: bytes an entry, resident", _ENDPOINTS, 1, [resident]))
    megabytes = resident * _BUDGET_ENTRIES / 1e6
    name = f"{what}: memory of {_BUDGET_ENTRIES:,} entries (measured: {len(index):,})"
    findings.checks.append(Check(name, megabytes, _BUDGET_MB, "MB"))
    if copies == 1:
        _exact_times(findings, index, scale.pick(31, 11))
    return findings


def _full_exact(entries: int, copies: int) -> ExactIndex:
    rng = random.Random(1)
    index = ExactIndex()
    for at in range(_ENDPOINTS):
        index.begin(_name(at), 0, 16)
    while len(index) < entries:
        blocks = _random(rng, _PROMPT_BLOCKS)
        for run in [blocks] if copies == 1 else [[block] for block in blocks]:
            for at in rng.sample(range(_ENDPOINTS), copies):
                index.stored(_name(at), 0, 0, run)
    return index


def _exact_times(findings: Findings, index: ExactIndex, rounds: int) -> None:
    """Matches of a long prompt against all endpoints at once, and what one event of 512 blocks takes."""
    rng = random.Random(2)
    everywhere, parted, lower = (_random(rng, _LONG) for _ in range(3))
    for at in range(_ENDPOINTS):
        index.stored(_name(at), 0, 0, everywhere)
        index.stored(_name(at), 0, 0, parted[: _LONG * (at + 1) // _ENDPOINTS])
        index.stored(_name(at), 0, 0, lower[: _LONG * at // _ENDPOINTS])
        index.stored(_name(at), 0, 1, lower)
    for what, blocks in (("all hold all", everywhere), ("all hold parts", parted), ("parts in host memory", lower)):
        took = [_us(partial(index.match, {16: blocks}, 16 * _LONG + 1, (0.8, 0.5))) for _ in range(rounds)]
        row = _row(f"exact, match us, {what}", _ENDPOINTS, _LONG, took)
        findings.rows.append(row)
        findings.checks.append(Check(f"exact, match, {what}", float(row["middle"]) / 1000, 1, "ms"))
    events = [_random(rng, _EVENT) for _ in range(rounds)]
    stored = [_us(partial(index.stored, _name(0), 0, 0, blocks)) for blocks in events]
    evicted = [_us(partial(index.evicted, _name(0), 0, ALL_TIERS, blocks)) for blocks in events]
    findings.rows += [
        _row("exact, stored us", 1, _EVENT, stored),
        _row("exact, evicted us", 1, _EVENT, evicted),
    ]


def _full(entries: int) -> PrefixIndex:
    """Profiles that have turned over once and a half: prompts with one of 200 heads, half of them in two turns."""
    rng = random.Random(1)
    index = PrefixIndex()
    # On average a full profile has used 63/64 of its capacity.
    capacity = entries // _ENDPOINTS * 64 // 63
    heads = [_random(rng, _SYSTEM_BLOCKS) for _ in range(200)]
    own = _PROMPT_BLOCKS - _SYSTEM_BLOCKS
    for name, at in zip(cycle(map(_name, range(_ENDPOINTS))), range(int(1.5 * entries / own)), strict=False):
        prompt = rng.choice(heads) + _random(rng, own)
        if at // _ENDPOINTS % 2:
            index.add(name, prompt[: _PROMPT_BLOCKS // 2], capacity)
        index.add(name, prompt, capacity)
    return index


def _matches(index: PrefixIndex, endpoints: int, rounds: int) -> Iterator[Row]:
    """Matches of a long prompt that all hold, of one they hold different parts of, of a short one that eight hold."""
    rng = random.Random(endpoints)
    names = [_name(at) for at in range(endpoints)]
    long, parted, short = ([_random(rng, count) for _ in range(rounds)] for count in (_LONG, _LONG, _SHORT))
    for prompts in (long, parted):
        for blocks in prompts[: rounds if endpoints < 1000 else 1]:
            for at, name in enumerate(names):
                index.add(name, blocks if prompts is long else blocks[: _LONG * (at + 1) // endpoints], 1 << 20)
    for blocks in short:
        for at, name in enumerate(rng.sample(names, 8)):
            index.add(name, blocks[: 4 * at + 4], 1 << 20)
    if endpoints == 1000:
        long, parted = long[:1] * rounds, parted[:1] * rounds
    yield _row("match us, all hold all", endpoints, _LONG, [_us(partial(index.match, b)) for b in long])
    yield _row("match us, all hold parts", endpoints, _LONG, [_us(partial(index.match, b)) for b in parted])
    yield _row("match us, 8 hold parts", endpoints, _SHORT, [_us(partial(index.match, b)) for b in short])


def _inserts(capacity: int, blocks: int) -> Row:
    """Prompts into one profile, from its first to when half of it was evicted again."""
    rng = random.Random(capacity)
    index = PrefixIndex()
    took = array("d")
    for _ in range(capacity * 3 // 2 // blocks):
        prompt = _random(rng, blocks)
        began = time.thread_time()
        index.add("10.0.0.1:8000", prompt, capacity)
        took.append(1e6 * (time.thread_time() - began))
    return _row(f"insert us, profile of {capacity:,}", 1, blocks, took)


def _check(findings: Findings) -> None:
    rows = {(str(row["what"]), row["endpoints"], row["blocks"]): row for row in findings.rows}
    for (what, endpoints, blocks), row in rows.items():
        if what.startswith("match") and blocks == _LONG and int(endpoints) <= _ENDPOINTS:
            findings.checks.append(Check(f"{what}, {endpoints}", float(row["middle"]) / 1000, 1, "ms"))
        if what.startswith("insert"):
            findings.checks.append(
                Check(f"{what}: longest, {blocks} blocks", float(row["most"]) / 1000, _PAUSE_MS, "ms")
            )


def _row(what: str, endpoints: int, blocks: int, values: "array[float] | list[float]") -> Row:
    return {"what": what, "endpoints": endpoints, "blocks": blocks, "middle": middle(values), "most": max(values)}


def _name(at: int) -> str:
    return f"10.0.{at // 250}.{at % 250}:8000"


def _random(rng: random.Random, count: int) -> list[int]:
    return [rng.getrandbits(64) for _ in range(count)]


def _us(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return 1e6 * (time.thread_time() - began)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * getpagesize()

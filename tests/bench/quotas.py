"""Limits of use in a real Valkey: four limits taken at once, and corrected, alone and with others in the same turn."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from extproc.govern.quotas import Correction, Draw, Take
from extproc.state.redis import RedisStore
from tests.bench.machine import cpu_s
from tests.bench.report import Check, Findings, Row, Scale, middle
from tests.valkey import Valkey

_TENANTS = 1000
_BATCHES = (1, 16)


def bench(scale: Scale) -> Findings:
    """Rounds of takes, one at a time and 16 at a time, in turns."""
    findings = Findings(f"four limits of one of {_TENANTS} tenants at once, Valkey on a Unix socket")
    with TemporaryDirectory(prefix="bench-") as folder:
        at = Path(folder) / "s"
        with Valkey(0, "--unixsocket", str(at)) as valkey, contextlib.closing(valkey.client()) as raw:
            work = _Work(RedisStore(f"unix://{at}", deadline_ms=2000), valkey.pid, raw)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                findings.rows += runner.run(work.run(rounds=scale.pick(9, 3), calls=scale.pick(4000, 1500)))
    together = findings.rows[-1]
    findings.checks += [
        Check("takes a second of one Valkey core", float(together["a_valkey_core"]), 10_000, "/s", at_least=True),
        Check("round trips a take", max(float(row["commands"]) for row in findings.rows), 1, ""),
    ]
    findings.notes.append(
        "a_valkey_core = calls / CPU seconds of Valkey; a_second is by the clock, this process included"
    )
    return findings


class _Work:
    """Requests of many tenants, each taken and then corrected."""

    def __init__(self, store: RedisStore, pid: int, raw: Any) -> None:
        self._store = store
        self._pid = pid
        self._raw = raw
        self._numbers = itertools.count()

    async def run(self, rounds: int, calls: int) -> list[Row]:
        """One row for each batch size."""
        await self._store.ping()
        await self._round(64, 16)
        taken: dict[int, list[Row]] = {batch: [] for batch in _BATCHES}
        for _ in range(rounds):
            for batch in _BATCHES:
                taken[batch].append(await self._round(calls, batch))
        await self._store.close()
        return [
            {"at_once": batch} | {name: middle([float(row[name]) for row in rows]) for name in rows[0]}
            for batch, rows in taken.items()
        ]

    async def _round(self, calls: int, batch: int) -> Row:
        draws = [_draws(next(self._numbers) % _TENANTS) for _ in range(calls - calls % batch)]
        commands, began = self._commands(), time.time()
        take = await self._timed(lambda at: self._store.take(Take(draws[at])), len(draws), batch)
        sent = self._commands() - commands
        correct = await self._timed(lambda at: self._store.correct(Correction(began, draws[at])), len(draws), batch)
        return {
            "a_second": 1 / take[0],
            "python_us": 1e6 * take[1],
            "valkey_us": 1e6 * take[2],
            "a_valkey_core": 1 / take[2],
            "correct_python_us": 1e6 * correct[1],
            "correct_valkey_us": 1e6 * correct[2],
            "commands": sent / len(draws),
        }

    async def _timed(
        self, call: Callable[[int], Coroutine[Any, Any, object]], calls: int, batch: int
    ) -> tuple[float, float, float]:
        """Seconds a call: by the clock, CPU of this process, CPU of Valkey."""
        wall, here, there = time.monotonic(), time.process_time(), cpu_s(self._pid)
        for start in range(0, calls, batch):
            await asyncio.gather(*(call(at) for at in range(start, start + batch)))
        wall, here, there = time.monotonic() - wall, time.process_time() - here, cpu_s(self._pid) - there
        return wall / calls, here / calls, there / calls

    def _commands(self) -> int:
        """Scripts that clients ran so far."""
        stats = self._raw.info("commandstats")
        return sum(int(stats.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in ("evalsha", "eval"))


def _draws(tenant: int) -> list[Draw]:
    """Requests and tokens by the minute, tokens by the day and month; far below their limits."""
    shard, name = f"quota/{tenant % 16:x}", f"{tenant:032x}"
    return [
        Draw(shard, name + "1", "requests", "minute", 1e9, 1e7, 1.0),
        Draw(shard, name + "2", "tokens", "minute", 1e9, 1e6, 1500.0),
        Draw(shard, name + "3", "tokens", "day", 1e12, 0.0, 1500.0),
        Draw(shard, name + "4", "tokens", "month", 1e12, 0.0, 1500.0),
    ]

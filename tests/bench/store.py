"""Reservations in a real Valkey: what one costs Python and Valkey, alone and with others in the same turn."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

import redis
from extproc.state.redis import RedisStore
from extproc.state.values import Candidate, Reserve, Settle
from tests.bench.machine import cpu_s
from tests.bench.report import Check, Findings, Row, Scale, middle
from tests.valkey import Valkey

_CANDIDATES = 16
_BATCHES = (1, 16)
_REPLICA = "0123456789abcdef"


def bench(scale: Scale) -> Findings:
    """Rounds of reservations, one at a time and 16 at a time, in turns."""
    findings = Findings(f"reserve with {_CANDIDATES} candidates and a session pin, Valkey on a Unix socket")
    with TemporaryDirectory(prefix="bench-") as folder:
        at = Path(folder) / "s"
        with Valkey(0, "--unixsocket", str(at)) as valkey:
            work = _Work(RedisStore(f"unix://{at}", deadline_ms=2000), valkey.pid, at)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                findings.rows += runner.run(work.run(rounds=scale.pick(9, 3), calls=scale.pick(4000, 1500)))
    together = findings.rows[-1]
    findings.checks += [
        Check(
            "reservations a second of one Valkey core", float(together["a_valkey_core"]), 10_000, "/s", at_least=True
        ),
        Check("round trips a reservation", max(float(row["commands"]) for row in findings.rows), 1, ""),
    ]
    findings.notes.append(
        "a_valkey_core = calls / CPU seconds of Valkey; a_second is by the clock, this process included"
    )
    return findings


class _Work:
    """Reservations of many sessions, settled after each round."""

    def __init__(self, store: RedisStore, pid: int, socket: Path) -> None:
        self._store = store
        self._pid = pid
        self._redis = redis.Redis(unix_socket_path=str(socket))
        self._numbers = itertools.count()
        self._candidates = [Candidate(f"10.0.0.{at}:8000", at * 0.5, 900.0, 8000.0) for at in range(_CANDIDATES)]

    async def run(self, rounds: int, calls: int) -> list[Row]:
        """One row for each batch size."""
        await self._store.ping()
        await self._round(64, 16)
        taken: dict[int, list[Row]] = {batch: [] for batch in _BATCHES}
        for _ in range(rounds):
            for batch in _BATCHES:
                taken[batch].append(await self._round(calls, batch))
        await self._store.close()
        self._redis.close()
        return [
            {"at_once": batch} | {name: middle([float(row[name]) for row in rows]) for name in rows[0]}
            for batch, rows in taken.items()
        ]

    async def _round(self, calls: int, batch: int) -> Row:
        asks = [self._ask() for _ in range(calls - calls % batch)]
        commands = self._commands()
        reserve = await self._timed(lambda at: self._store.reserve(asks[at]), len(asks), batch)
        sent = self._commands() - commands
        ends = [Settle(ask.pool, ask.charge_id, ask.replica) for ask in asks]
        settle = await self._timed(lambda at: self._store.settle(ends[at]), len(asks), batch)
        return {
            "a_second": 1 / reserve[0],
            "python_us": 1e6 * reserve[1],
            "valkey_us": 1e6 * reserve[2],
            "a_valkey_core": 1 / reserve[2],
            "settle_python_us": 1e6 * settle[1],
            "settle_valkey_us": 1e6 * settle[2],
            "commands": sent / len(asks),
        }

    async def _timed(
        self, call: Callable[[int], Coroutine[Any, Any, object]], calls: int, batch: int
    ) -> tuple[float, float, float]:
        """Seconds a call: by the clock, CPU of this process, CPU of Valkey."""
        wall, here, there = time.monotonic(), time.process_time(), cpu_s(self._pid)
        for start in range(0, calls, batch):
            if batch == 1:
                await call(start)
            else:
                await asyncio.gather(*(call(at) for at in range(start, start + batch)))
        wall, here, there = time.monotonic() - wall, time.process_time() - here, cpu_s(self._pid) - there
        return wall / calls, here / calls, there / calls

    def _ask(self) -> Reserve:
        number = next(self._numbers)
        return Reserve(
            pool="main",
            charge_id=f"{_REPLICA}-{number:x}",
            replica=_REPLICA,
            candidates=self._candidates,
            pin_key=f"{number % 5000:032x}",
            pin_ttl_ms=60_000,
            break_out_ms=1000.0,
            running_ms=2.0,
            backlog_weight=1.0,
            tie_ms=3.0,
            lease_ms=15_000,
        )

    def _commands(self) -> int:
        """Scripts that clients ran so far; commands inside a script are counted by their own names."""
        stats = self._redis.info("commandstats")
        return sum(int(stats.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in ("evalsha", "eval"))

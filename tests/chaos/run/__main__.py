"""`python -m tests.chaos.run`: ten minutes of a steady load while everything but Envoy is killed, stopped and misled.

The exit code is 1 when a request failed that a healthy engine could have served, when the ledger is not exactly 0 at
the end, or when too few sessions kept their engine. The logs of all processes are then kept, in a folder that is named.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

# gRPC's fork handlers abort children that are forked while a thread is inside gRPC. Read when grpc is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import msgspec

from extproc.errors import StackError, StoreError
from extproc.state.redis import RedisStore
from tests.bench.machine import load_average
from tests.chaos.run import plan, report
from tests.chaos.run.faults import Faults
from tests.chaos.run.judge import Seen
from tests.chaos.run.load import Load
from tests.chaos.run.plan import Fault, Part
from tests.chaos.run.report import Asked, Ledger, Run
from tests.chaos.run.stack import POOL, Fleet, faketime

_CACHE = Path("run/faketime")
_ZERO_S = 40.0
"""How long the ledger may take to reach 0: a lease, and a pause of a restarted worker, of up to 15 s each."""
_STORE_MS = 2000


def main() -> int:
    """Run, print, and say whether all held."""
    asked, keep, alone = _arguments()
    folder = Path(tempfile.mkdtemp(prefix="warmpath-chaos-"))
    good = False
    try:
        run = asyncio.run(_interruptible(_run(asked, folder, alone=alone)))
        (folder / "run.json").write_bytes(msgspec.json.encode(run))
        result, by_verdict = report.judge(run)
        good = result.good
        path = report.write(run, result)
        sys.stdout.write(f"\n{report.text(run, result, by_verdict)}        {path}\n")
    except (KeyboardInterrupt, asyncio.CancelledError):
        _say("interrupted; everything is stopped")
        return 130
    except StackError as error:
        _say(str(error))
    finally:
        if good and not keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            _say(f"logs: {folder}")
    return 0 if good else 1


def _arguments() -> tuple[Asked, bool, bool]:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the load (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one minute")
    parser.add_argument("--seed", type=int, default=0, help="repeats a run's faults and questions; 0 draws one")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second (%(default)s)")
    parser.add_argument("--store", choices=("sentinel", "alone"), default="sentinel", help="(%(default)s)")
    parser.add_argument("--keep-logs", action="store_true", help="keep them after a good run as well")
    given = parser.parse_args()
    seconds = 60.0 * (1.0 if given.quick else given.minutes)
    seed = given.seed or secrets.randbelow(1_000_000) + 1
    clock = faketime(_CACHE) is not None
    return Asked(seed, seconds, given.rate, given.store, clock), given.keep_logs, given.store == "alone"


async def _interruptible(work: Coroutine[Any, Any, Run]) -> Run:
    """Let SIGTERM end the run as Ctrl-C does: everything is stopped first."""
    task = asyncio.create_task(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


async def _run(asked: Asked, folder: Path, *, alone: bool) -> Run:
    before = load_average()
    fleet = Fleet(folder, faketime(_CACHE), alone=alone)
    parts = [one for one in Part if (one is not Part.SENTINEL or not alone) and (one is not Part.CLOCK or asked.clock)]
    planned = plan.schedule(asked.seed, asked.seconds, parts)
    _say(f"seed {asked.seed}: {len(planned)} faults in {asked.seconds:.0f} s; logs in {folder}")
    for rule in plan.rules():
        _say(f"  {rule}")
    faults, load = Faults(fleet), Load(list(fleet.envoys), asked.rate, asked.seed)
    try:
        try:
            await fleet.start()
        except TimeoutError:
            raise StackError("the fleet does not come up; its logs say why") from None
        _say("everything is up")
        began = time.monotonic()

        def tell(fault: Fault, name: str) -> None:
            failed = sum(one.failure is not None for one in load.sent)
            _say(
                f"{time.monotonic() - began:6.1f} s  {fault.kind} {name} for {fault.lasts_s:.1f} s; {failed} not whole"
            )

        async with asyncio.TaskGroup() as group:
            group.create_task(load.run(asked.seconds))
            group.create_task(faults.run(planned, tell))
        ledger = await _ledger(fleet)
    finally:
        faults.thaw()
        await fleet.stop()
    return Run(
        asked=asked,
        sent=sorted(load.sent, key=lambda one: one.sent_s),
        seen=_seen(fleet),
        happened=faults.happened,
        missed=len(faults.missed),
        ledger=ledger,
        load_before=before,
    )


async def _ledger(fleet: Fleet) -> Ledger:
    """Wait until nothing is in flight; what is, when that takes too long."""
    ended, running, tokens = time.monotonic(), -1, -1.0
    redis = fleet.config.redis
    store = RedisStore(fleet.storage.url, _STORE_MS, redis.key_prefix)
    try:
        while time.monotonic() < ended + _ZERO_S:
            with contextlib.suppress(StoreError):
                loads = (await store.loads(POOL)).values()
                running, tokens = sum(one.running for one in loads), sum(one.output_tokens for one in loads)
                if running == 0 and tokens == 0:
                    return Ledger(0, 0.0, time.monotonic() - ended)
            await asyncio.sleep(0.1)
    finally:
        await store.close()
    return Ledger(running, tokens, None)


def _seen(fleet: Fleet) -> dict[int, Seen]:
    return {
        int(one["number"]): Seen(
            served=one["served"] or "",
            picked=(one["picked"] or "").split(",")[0],
            attempts=int(one["attempts"] or 0),
            flags=one["flags"] or "",
            details=one["details"] or "",
        )
        for one in fleet.accesses()
    }


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

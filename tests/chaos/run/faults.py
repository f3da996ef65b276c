"""Does to a fleet what a plan says, and notes when each fault really began and ended."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence

from extproc.processes import Child
from tests.chaos.run.judge import Happened
from tests.chaos.run.plan import Fault, Kind, Part
from tests.chaos.run.stack import MISLED, WORKERS, Fleet
from tests.waiting import until, until_async

_AGAIN_S = 20.0
"""How long a part is given to come back before its fault counts as over all the same."""

Target = tuple[str, int, Callable[[], Awaitable[None]]]
"""Name and process id of what a fault hits, and what brings it back; process id 0 while it does not run."""


class Faults:
    """The faults of one run.

    Attributes:
        happened: those that are over, in the order they ended.
        missed: those that found their part not running: it had not come back from an earlier one.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._stopped: set[int] = set()
        self.happened: list[Happened] = []
        self.missed: list[Fault] = []

    async def run(self, plan: Sequence[Fault], tell: Callable[[Fault, str], None]) -> None:
        """Do every fault at its time; ends when the last one has ended. `tell` hears of each as it begins."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for fault in plan:
                await asyncio.sleep(began + fault.at_s - time.monotonic())
                group.create_task(self._do(fault, tell))

    def thaw(self) -> None:
        """Wake whatever still stands, and set the clock right."""
        for pid in self._stopped:
            _send(pid, signal.SIGCONT)
        self._fleet.mislead(0)

    async def _do(self, fault: Fault, tell: Callable[[Fault, str], None]) -> None:
        name, pid, again = await self._find(fault)
        from_s = time.monotonic()
        if not (pid and self._begin(fault, pid)):
            self.missed.append(fault)
            return
        tell(fault, name)
        await asyncio.sleep(fault.lasts_s)
        match fault.kind:
            case Kind.KILL:
                await again()
            case Kind.STOP:
                _send(pid, signal.SIGCONT)
                self._stopped.discard(pid)
            case Kind.JUMP:
                self._fleet.mislead(0)
        self.happened.append(Happened(fault.kind, fault.part, name, from_s, time.monotonic()))

    def _begin(self, fault: Fault, pid: int) -> bool:
        """Whether there was still a process to hit."""
        match fault.kind:
            case Kind.KILL:
                return _send(pid, signal.SIGKILL)
            case Kind.STOP:
                self._stopped.add(pid)
                return _send(pid, signal.SIGSTOP)
            case Kind.JUMP:
                self._fleet.mislead(fault.jump_s)
                return True

    async def _find(self, fault: Fault) -> Target:
        fleet, number = self._fleet, fault.number
        match fault.part:
            case Part.WORKER:
                target = self._served(number // WORKERS, f"worker --index {number % WORKERS}")
            case Part.KEEPER:
                target = self._served(number, "keeper")
            case Part.CLOCK:
                target = f"host-{MISLED}", fleet.sidecars[MISLED].pid, _nothing
            case Part.ENGINE:
                at = list(fleet.engines)[number]
                target = _child(at, fleet.engines[at], int(at.rpartition(":")[2]))
            case Part.STORE:
                port = await fleet.storage.master()
                target = _child(f"valkey:{port}", fleet.storage.servers[port], port)
            case Part.SENTINEL:
                port = list(fleet.storage.sentinels)[number]
                target = _child(f"sentinel:{port}", fleet.storage.sentinels[port], port)
        return target

    def _served(self, host: int, what: str) -> Target:
        """A child of `warmpath serve`, which starts it again by itself."""
        fleet, pid = self._fleet, self._fleet.pid(host, what)

        async def again() -> None:
            with contextlib.suppress(TimeoutError):
                await until(lambda: fleet.pid(host, what) not in (0, pid), _AGAIN_S)

        return f"host-{host} {what}", pid, again


def _send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False when the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _child(name: str, child: Child, port: int) -> Target:
    """A process of our own, which this starts again; it is back when it listens."""

    async def again() -> None:
        await child.start()
        with contextlib.suppress(TimeoutError):
            await until_async(lambda: _listens(port), _AGAIN_S)

    return name, child.pid if child.running else 0, again


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def _nothing() -> None:
    """Bring nothing back."""

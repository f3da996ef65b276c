"""Child processes of a bench: started in a context, ended with it, silent unless they fail."""

import asyncio
import contextlib
import json
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import uvloop
import yaml

from extproc.processes import Child
from tests.bench.prompts import MODEL
from tests.waiting import until

_T = TypeVar("_T")


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run on a uvloop, as the sidecar does."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


@contextlib.asynccontextmanager
async def child(
    name: str, argv: Sequence[str], ready: Callable[[], bool] | None = None, heard: Callable[[str], None] | None = None
) -> AsyncIterator[Child]:
    """Run a program; the block starts once `ready` holds.

    Args:
        name: for errors.
        argv: the command.
        ready: what to wait for; None for nothing.
        heard: takes every line it prints.

    Raises:
        RuntimeError: it ended before it was ready; the text holds what it said last.
    """
    said: deque[str] = deque(maxlen=20)

    def sink(_name: str, line: str) -> None:
        said.append(line)
        if heard:
            heard(line)

    process = Child(name, argv, sink)
    await process.start()
    try:
        if ready is not None:
            await until(lambda: ready() or not process.running)
            if not process.running:
                raise RuntimeError(f"{name} ended with {process.code}: {' / '.join(said)}")
        yield process
    finally:
        await process.stop()


@contextlib.asynccontextmanager
async def listening(module: str, *arguments: str) -> AsyncIterator[tuple[Child, list[str]]]:
    """Run a module of this package that prints its addresses as one JSON list when it listens."""
    addresses: list[str] = []

    def heard(line: str) -> None:
        if line.startswith("["):
            addresses.extend(json.loads(line))

    argv = [sys.executable, "-m", f"tests.bench.{module}", *arguments]
    async with child(module, argv, lambda: bool(addresses), heard) as process:
        yield process, addresses


def write_config(path: Path, endpoints: Sequence[str], gateway: Mapping[str, object], **sections: object) -> Path:
    """Write a `warmpath.yaml` with one pool of these endpoints; returns `path`."""
    plain = {
        "models": {MODEL: {"pool": "main"}},
        "pools": {"main": {"endpoints": list(endpoints)}},
        "gateway": dict(gateway),
        **sections,
    }
    path.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    return path

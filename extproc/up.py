"""`warmpath up`: a whole stack in the foreground, logs prefixed by their part, gone on Ctrl-C."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from extproc.processes import stop_requested
from extproc.stack import Stack, StackSettings

_WIDTH = 8


def say(name: str, line: str) -> None:
    """Print one line of a child, prefixed."""
    sys.stdout.write(f"{name:<{_WIDTH}} | {readable(line)}\n")
    sys.stdout.flush()


def readable(line: str) -> str:
    """A line of our own structured log as people read it; any other line as it is."""
    if not line.startswith('{"time"'):
        return line
    try:
        fields = json.loads(line)
    except ValueError:
        return line
    known = [str(fields.pop(key, "")) for key in ("time", "process", "level", "message")]
    fields.pop("logger", None)
    more = " ".join(f"{key}={value}" for key, value in fields.items())
    return f"{known[1]}: {known[2]}: {known[3]}{f' ({more})' if more else ''}"


async def up(path: Path, settings: Sequence[str], engines: int) -> int:
    """Run until Ctrl-C (0), or until a part ends by itself (1).

    Raises:
        ConfigError: the configuration cannot be used.
        StackError: a part did not come up.
    """
    stopping = asyncio.create_task(stop_requested())
    stack = Stack(StackSettings(path=path, settings=tuple(settings), engines=engines), say)
    starting = asyncio.create_task(stack.__aenter__())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return 0
    await starting
    try:
        say("warmpath", f"ready: {stack.url}   metrics: {stack.metrics_url}   stop with Ctrl-C")
        ended = asyncio.create_task(stack.ended())
        await asyncio.wait([ended, stopping], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            say("warmpath", ended.result())
            return 1
        ended.cancel()
        return 0
    finally:
        await stack.__aexit__()
        say("warmpath", "stopped")

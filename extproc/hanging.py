"""Finds a child process that runs but answers nobody, and ends it, so that it is started again.

What waits for such a process waits for as long as it hangs: Envoy's health checks keep new requests from it, but leave
those that it has taken (1.40, also with `close_connections_on_host_health_failure`).
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Final

from extproc.processes import Child

_EVERY_S: Final = 1.0
_PATIENCE_S: Final = 2.0
_MISSES: Final = 4
"""So often in a row: a busy machine stalls a process for a second or two, and may stall this one, too."""

log = logging.getLogger(__name__)


async def watch(child: Child, hangs: Callable[[], Awaitable[bool]]) -> None:
    """Ask every second whether the child hangs, and kill one that did each of four times; lasts until cancelled."""
    misses, asked = 0, 0
    while True:
        before, asked = asked, child.pid
        silent = await hangs() and child.running and child.pid == asked
        misses = (misses if before == asked else 0) + 1 if silent else 0
        if misses >= _MISSES:
            log.error("a process answers nobody and is ended", extra={"child": child.name})
            child.send(signal.SIGKILL)
            misses = 0
        await asyncio.sleep(_EVERY_S)


async def silent_at(address: str, path: str, patience_s: float = _PATIENCE_S) -> bool:
    """Whether `unix:PATH` or `host:port` takes connections, and leaves a GET of `path` without an answer.

    Where nobody takes connections, nobody waits: a process that starts, or that drains, does not hang.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(patience_s):
            if address.startswith("unix:"):
                reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
            else:
                host, _, port = address.rpartition(":")
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
            return not await reader.readline()
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:  # no answer in time (TimeoutError), or a queue of connections that is full
        return True
    finally:
        if writer is not None:
            writer.close()

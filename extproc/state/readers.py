"""Calls that wait in Redis for something to happen: each under way has a connection of its own, since it blocks it."""

import asyncio
from collections import defaultdict
from typing import Any

from extproc.errors import StoreError
from extproc.state.hello import Command
from extproc.state.link import Link
from extproc.state.nodes import Nodes


class Readers:
    """Connections for blocking calls, used again by the next call for the same key.

    Args:
        nodes: the servers to connect to.
        name: what CLIENT LIST shows.
    """

    def __init__(self, nodes: Nodes, name: str) -> None:
        self._nodes = nodes
        self._name = name
        self._idle: defaultdict[str, list[Link]] = defaultdict(list)
        self._busy: set[Link] = set()

    async def call(self, key: str, command: Command, deadline_s: float) -> Any:
        """Reply to a command that may wait. Raises `StoreError` for none within `deadline_s` seconds.

        Where keys have moved it is asked once more, of the node that has them.
        """
        try:
            return await self._try(key, command, deadline_s)
        except StoreError as error:
            if not self._nodes.failed(error):
                raise
        return await self._try(key, command, deadline_s)

    async def _try(self, key: str, command: Command, deadline_s: float) -> Any:
        idle = self._idle[key]
        link = idle.pop() if idle else self._nodes.open(key, self._name)
        self._busy.add(link)
        try:
            await link.ready()
            reply = await link.call(command, deadline_s)
        except (StoreError, asyncio.CancelledError):
            # Redis may still be blocked in the call: a later one must not queue behind it.
            await link.close()
            raise
        else:
            idle.append(link)
        finally:
            self._busy.discard(link)
        return reply

    async def close(self) -> None:
        """Drop all connections; calls under way fail."""
        for link in [*self._busy, *(link for idle in self._idle.values() for link in idle)]:
            await link.close()
        self._idle.clear()

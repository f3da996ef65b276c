"""Hands copies of answers to the worker that waits for them: Envoy sends them to any worker of the fleet.

The id of the process that decided is the first part of the charge's. Which worker has which id is asked of all of them
when one is not known; a copy that cannot be handed on is lost, and with it one comparison.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import grpc

from extproc import inner
from extproc.background import Background
from extproc.clock import Clock
from extproc.envoy.contract import Copy
from extproc.envoy.copies import Copies
from extproc.errors import WorkerError

_LOOK_S: Final = 2.0
"""Workers are asked for their ids no more often."""
_MOST_TASKS: Final = 64
_CLOSE_S: Final = 1.0
"""What is being handed on has as long as a call may take."""

log = logging.getLogger(__name__)

Resolve = Callable[[], Awaitable[Sequence[str]]]


class HandingOn:
    """Connects the copies of one process with the other processes of the fleet."""

    def __init__(self, copies: Copies, replica: str, resolve: Resolve, clock: Clock) -> None:
        """Begin.

        Args:
            copies: those of this process; what nobody here waits for is handed on from now on.
            replica: its id.
            resolve: where the workers of the fleet listen.
            clock: time.
        """
        self._copies = copies
        self._replica = replica
        self._resolve = resolve
        self._clock = clock
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._owners: dict[str, str] = {}
        self._looked_at = -_LOOK_S
        self._looking = asyncio.Lock()
        self._background = Background()
        copies.hand_on = self.hand_on

    def __len__(self) -> int:
        """Workers that it has connections for."""
        return len(self._channels)

    def hand_on(self, charge_id: str, copy: Copy | None) -> None:
        """See `copies.HandOn`. Must be called in a loop."""
        owner = charge_id.rpartition("-")[0]
        if not owner or owner == self._replica or len(self._background) >= _MOST_TASKS:
            return
        self._background.keep(self._send(owner, charge_id, copy))

    async def taken(self, charge_id: str, copy: Copy | None) -> None:
        """Another worker hands a copy to this one."""
        self._copies.give(charge_id, copy)

    async def idle(self) -> None:
        """Return once nothing is being handed on."""
        await self._background.idle()

    async def close(self) -> None:
        """Let go of all connections."""
        self._background.cancel()
        await self._background.idle()
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        self._channels.clear()

    async def _send(self, owner: str, charge_id: str, copy: Copy | None) -> None:
        if owner not in self._owners:
            await self._look()
        address = self._owners.get(owner)
        if address is None:
            log.debug("nobody is found who waits for a copy")
            return
        try:
            await inner.captured(self._channels[address], charge_id, copy)
        except WorkerError as error:
            self._owners.pop(owner, None)
            log.debug("a copy is not handed on", extra={"error": str(error)})

    async def _look(self) -> None:
        """Ask all workers who they are."""
        async with self._looking:
            now = self._clock.monotonic()
            if now - self._looked_at < _LOOK_S:
                return
            found = await self._resolve()
            for address in found:
                if address not in self._channels:
                    self._channels[address] = inner.channel(address)
            gone = [self._channels.pop(address) for address in self._channels.keys() - set(found)]
            self._owners = {owner: address for owner, address in self._owners.items() if address in found}
            await asyncio.gather(*(each.close(_CLOSE_S) for each in gone))
            answers = await asyncio.gather(*(self._id_of(address) for address in found))
            self._owners = {owner: address for owner, address in zip(answers, found, strict=True) if owner}
            self._looked_at = now

    async def _id_of(self, address: str) -> str:
        try:
            return await inner.end(self._channels[address], {})
        except WorkerError:
            return ""

"""Ends requests whose time limit has run out, in whichever process of the fleet they were decided.

The process that decided holds the gateway's stream, and it alone can end the request. Its id is the first part of the
charge's. Which process has which id is learnt from its answers; until then every worker is told. No store is needed,
and a call that fails loses nothing: a request is named again and again as long as it goes on.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import grpc

from extproc import addresses, inner
from extproc.background import Background
from extproc.clock import Clock
from extproc.config import Sidecar
from extproc.envoy.endable import Endable
from extproc.errors import FirstTokenLimitError, StallLimitError, TimeLimitError, WorkerError
from extproc.govern.stages import Stage
from extproc.telemetry.limit_metrics import LimitMetrics

_RESOLVED_S: Final = 10.0
"""How long the addresses of the fleet's workers are kept: names change when hosts come and go."""
_MOST: Final = 1000
"""Requests named in one call, and waiting for the next; more are named again half a second later."""

log = logging.getLogger(__name__)

Resolve = Callable[[], Awaitable[Sequence[str]]]
Ask = Callable[[grpc.aio.Channel, Mapping[str, str]], Awaitable[str]]


def error_of(stage: str) -> TimeLimitError:
    """What the client is told of a limit, if it can still be told."""
    if stage == "first_token":
        return FirstTokenLimitError("The first token did not come in time; try again.")
    if stage == "stall":
        return StallLimitError("The answer stood still for too long.")
    return TimeLimitError("The request took longer than this gateway allows.")


async def workers(sidecar: Sidecar) -> list[str]:
    """Where all workers of the fleet listen: names of several hosts give all of them. Unknown names are left out."""
    if sidecar.socket_dir:
        return [addresses.worker(sidecar, index) for index in range(sidecar.workers)]
    loop, found = asyncio.get_running_loop(), dict[str, None]()
    for host in sidecar.hosts:
        try:
            told = await loop.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
        except OSError as error:
            log.debug("a host of the fleet has no address", extra={"host": host, "error": error.strerror})
            continue
        for *_, where in told:
            ip = f"[{where[0]}]" if ":" in str(where[0]) else where[0]
            found |= {f"{ip}:{sidecar.worker_port + index}": None for index in range(sidecar.workers)}
    return list(found)


class _Peer:
    """A worker of the fleet, and the requests that it is to be told of."""

    def __init__(self, address: str, ask: Ask, metrics: LimitMetrics) -> None:
        self.owner = ""
        self._channel = inner.channel(address)
        self._ask = ask
        self._metrics = metrics
        self._waiting: dict[str, str] = {}
        self._telling: asyncio.Task[None] | None = None

    def tell(self, charge_id: str, stage: Stage) -> None:
        """Name a request in the next call."""
        if len(self._waiting) < _MOST:
            self._waiting[charge_id] = stage
        if self._telling is None:
            self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        # What else came in the turn of the loop that began this goes into the same call.
        while self._waiting:
            told, self._waiting = self._waiting, {}
            try:
                self.owner = await self._ask(self._channel, told)
            except WorkerError as error:
                self.owner = ""
                self._metrics.told("unreachable")
                log.debug("a worker is not told of requests to end", extra={"error": str(error)})
            else:
                self._metrics.told("told")
        self._telling = None

    async def close(self) -> None:
        """Let go of the connection."""
        if self._telling is not None:
            self._telling.cancel()
        await self._channel.close()


class Ending:
    """Ends requests anywhere in the fleet.

    Args:
        endable: requests of this process.
        replica: its id.
        resolve: where the workers of the fleet listen.
        metrics: counts.
        clock: time.
        ask: asks a worker; returns its id.
    """

    def __init__(
        self,
        endable: Endable,
        replica: str,
        resolve: Resolve,
        metrics: LimitMetrics,
        clock: Clock,
        ask: Ask = inner.end,
    ) -> None:
        self._endable = endable
        self._replica = replica
        self._resolve = resolve
        self._metrics = metrics
        self._clock = clock
        self._ask = ask
        self._peers: dict[str, _Peer] = {}
        self._resolved_at = -_RESOLVED_S
        self._background = Background()

    def end(self, charge_id: str, stage: Stage) -> None:
        """See that a request ends; returns at once. Must be called in a loop."""
        owner = charge_id.rpartition("-")[0]
        if owner == self._replica:
            self._background.keep(self._end_here({charge_id: stage}))
            return
        if known := next((peer for peer in self._peers.values() if peer.owner == owner), None):
            known.tell(charge_id, stage)
        else:
            self._background.keep(self._tell_all(charge_id, stage))

    async def asked(self, told: Mapping[str, str]) -> str:
        """Another worker names requests, by charge and stage: end those that are ours. Returns our id."""
        await self._end_here(told)
        return self._replica

    async def idle(self) -> None:
        """Return once nothing is under way here; calls to others may be."""
        await self._background.idle()

    async def close(self) -> None:
        """Let go of all connections."""
        self._background.cancel()
        await asyncio.gather(*(peer.close() for peer in self._peers.values()))
        self._peers.clear()

    async def _end_here(self, told: Mapping[str, str]) -> None:
        for charge_id, stage in told.items():
            await self._endable.end(charge_id, error_of(stage))

    async def _tell_all(self, charge_id: str, stage: Stage) -> None:
        await self._look()
        for peer in self._peers.values():
            peer.tell(charge_id, stage)

    async def _look(self) -> None:
        """Know the workers of the fleet, as they are now or were a moment ago."""
        now = self._clock.monotonic()
        if now - self._resolved_at < _RESOLVED_S:
            return
        self._resolved_at = now
        found = await self._resolve()
        for address in found:
            if address not in self._peers:
                self._peers[address] = _Peer(address, self._ask, self._metrics)
        for gone in self._peers.keys() - set(found):
            await self._peers.pop(gone).close()

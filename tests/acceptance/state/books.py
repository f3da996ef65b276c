"""What the shared store has on its books, read beside the replicas."""

import struct
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import redis.asyncio

from extproc.state.keys import Keys
from extproc.state.redis import RedisStore
from extproc.state.values import Load
from tests.acceptance.local import POOL
from tests.waiting import until_async

_PATIENT_MS = 10_000.0
_SEQUENCES = 3
"""Which of the doubles of an entry of the load hash counts sequences in flight; see `extproc.state.keys`."""


class Books:
    """A reader of its own; it charges nothing."""

    def __init__(self, url: str, prefix: str = "warmpath") -> None:
        self.store = RedisStore(url, _PATIENT_MS, prefix)
        self._url = url
        self.keys = Keys(prefix).pool(POOL)

    @cached_property
    def raw(self) -> Any:
        """The store as it is, where it is one server. redis-py's stubs cannot tell bytes from decoded replies."""
        return redis.asyncio.Redis.from_url(self._url)

    async def close(self) -> None:
        """Disconnect."""
        await self.store.close()
        if "raw" in self.__dict__:
            await self.raw.aclose()

    async def loads(self) -> Mapping[str, Load]:
        """Load by endpoint. Raises StoreError when the store does not answer."""
        await self.store.ping()
        return await self.store.loads(POOL)

    async def in_flight(self) -> int:
        """Requests in flight over all endpoints."""
        return sum(load.running for load in (await self.loads()).values())

    async def holds(self, number: int) -> None:
        """Wait until exactly so many requests are in flight."""

        async def equal() -> bool:
            return await self.in_flight() == number

        await until_async(equal)

    async def written(self) -> list[float]:
        """Counts of sequences in flight as they are written, before anybody makes sense of them."""
        entries = (await self.raw.hvals(self.keys.load)) or []
        return [struct.unpack(f"<{len(entry) // 8}d", entry)[_SEQUENCES] for entry in entries]

    async def leases(self) -> dict[str, float]:
        """End of each worker's lease, milliseconds since the epoch."""
        pairs = await self.raw.zrange(self.keys.leases, 0, -1, withscores=True)
        return {name.decode(): score for name, score in pairs}

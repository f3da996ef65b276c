"""Requests of one worker against a store that is being ill-treated, and what the others see of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from extproc.errors import StoreError
from extproc.state.redis import RedisStore
from extproc.state.resilient import ResilientStore
from extproc.state.trouble import Trouble
from extproc.state.values import Candidate, Reserve, Settle
from tests.waiting import until, until_async

DEADLINE_MS = 200.0
"""Wide, so that no pause of a busy machine looks like an outage."""
PROBE_S = 0.05
LEASE_MS = 15_000
ENGINES = tuple(Candidate(f"e{i}", 0.0, 100.0, 1e-6) for i in range(4))
FLOWS = 8


class Traffic:
    """Reservations and settles of one worker; any call that fails fails the test.

    Attributes:
        open: charges not settled yet.
        pins: by session, the endpoint that its last decision named.
    """

    def __init__(self, store: ResilientStore) -> None:
        self.store = store
        self._count = 0
        self.open: list[str] = []
        self.pins: dict[str, str] = {}

    async def reserve(self, count: int = 1) -> None:
        """Charge `count` requests, all at the same time, each of a session of its own."""
        charges = [f"c{self._count + i}" for i in range(count)]
        self._count += count
        self.open += charges
        got = await asyncio.gather(
            *(self.store.reserve(Reserve("p", each, "worker", ENGINES, pin_key=each)) for each in charges)
        )
        assert all(each.endpoint for each in got)
        self.pins.update(zip(charges, (each.endpoint for each in got), strict=True))

    async def settle(self, count: int | None = None) -> None:
        """End `count` open requests, or all."""
        ending, self.open = self.open[:count], self.open[len(self.open[:count]) :]
        await asyncio.gather(*(self.store.settle(Settle("p", each, "worker")) for each in ending))

    @contextlib.asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        """Requests that begin and end all the time, some at once; each that began has ended afterwards."""
        ending = asyncio.Event()

        async def flow() -> None:
            while not ending.is_set():
                await self.reserve()
                await asyncio.sleep(0.005)
                await self.settle(1)

        async with asyncio.TaskGroup() as flows:
            for _ in range(FLOWS):
                flows.create_task(flow())
            await self.made(2 * FLOWS)
            try:
                yield
            finally:
                ending.set()

    async def made(self, more: int) -> None:
        """Wait until so many more requests were decided."""
        goal = self._count + more
        await until(lambda: self._count >= goal)

    async def beat(self) -> None:
        """Renew the lease, as a worker does every few seconds."""
        await self.store.heartbeat("p", "worker", LEASE_MS)

    @property
    def waited(self) -> int:
        """Calls that waited for their whole deadline."""
        return self.store.stats.failures.get(Trouble.SLOW, 0)


async def running(store: RedisStore) -> int:
    """Requests in flight over all endpoints, as the shared store counts them; -1 when it does not answer."""
    try:
        await store.ping()
        return sum(load.running for load in (await store.loads("p")).values())
    except StoreError:
        return -1


async def counts_are(witness: RedisStore, number: int) -> None:
    """Wait until the shared store counts exactly `number` requests in flight."""

    async def equal() -> bool:
        return await running(witness) == number

    await until_async(equal)


async def all_is_well(traffic: Traffic, witness: RedisStore) -> None:
    """Wait until the shared store was told everything, and see it count what is open; then, ended, nothing."""
    store = traffic.store
    await until(lambda: store.settled)
    await traffic.beat()
    await until(lambda: store.settled and not store.degraded)
    await counts_are(witness, len(traffic.open))
    await traffic.reserve(3)
    await counts_are(witness, len(traffic.open))
    await traffic.settle()
    await until(lambda: store.settled)
    await counts_are(witness, 0)
    assert all(load.running == 0 for load in (await witness.loads("p")).values())

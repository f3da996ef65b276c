"""A keeper that reads KV events over real sockets, a worker that hears of it, and a store that can be down."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count

from extproc.clock import SystemClock
from extproc.config import Config, EventSettings, Model, Pool, ProfileMode, Redis
from extproc.errors import StoreError
from extproc.fleet.holding import Holding
from extproc.fleet.kv_reader import WORK, KvReader
from extproc.outbox import Outbox
from extproc.state.endpoint import EndpointState, Source
from extproc.state.memory import MemoryStore
from extproc.telemetry.metrics import Metrics
from tests.kv_events import BLOCK, Worker
from tests.waiting import until_async

AT = "127.0.0.1:8000"


class Shelf(MemoryStore):
    """A store that can be down."""

    down = False

    async def append(self, pool: str, payload: bytes, cap: int) -> str:
        """See `Store.append`."""
        if self.down:
            raise StoreError("the store is down")
        return await super().append(pool, payload, cap)


class Scene:
    """A keeper that reads one endpoint, a worker that hears of it, and what the endpoint's state says."""

    def __init__(self, store: Shelf, mode: ProfileMode, events: EventSettings, *sources: Source) -> None:
        self.store = store
        self.worker = Worker(AT)
        self.metrics = Metrics()
        self.state = EndpointState(AT, started_at=100.0, block_tokens=BLOCK, kv_blocks=1000, sources=sources)
        clock, numbers = SystemClock(), count()
        self.reader = KvReader(
            lambda: {"main": {AT: self.state}},
            store,
            Holding(store, WORK, f"keeper-{id(self)}", clock),
            lambda: Outbox(f"keeper-{id(self)}-kv-{next(numbers)}"),
            self.metrics.kv,
            clock,
        )
        self.reader.apply(
            Config(
                models={"m": Model(pool="main")},
                pools={"main": Pool(endpoints=[AT], profiles=mode, events=events)},
                redis=Redis(hold_ms=1000),
            )
        )

    async def knows(self, blocks: set[int]) -> None:
        """Wait until the worker's exact profile is just these blocks."""

        async def same() -> bool:
            await self.worker.follow(self.store, "main")
            return bool(self.worker.block_tokens) and self.worker.blocks == blocks

        await until_async(same)

    async def hears(self, begun: int, *, used: bool) -> None:
        """Wait until so many profiles have begun, and the last one is in use or has ended."""

        async def same() -> bool:
            await self.worker.follow(self.store, "main")
            return self.worker.begun == begun and bool(self.worker.block_tokens) == used

        await until_async(same)

    def samples(self) -> str:
        """The keeper's metrics, as of now."""
        self.reader._show()
        return self.metrics.page().decode()

    def faults(self) -> dict[str, float]:
        """What went wrong so far, by its kind."""
        found = re.findall(r'kv_event_faults_total{kind="(\w+)",pool="main"} ([0-9.]+)', self.samples())
        return {kind: float(total) for kind, total in found if float(total)}


Begin = Callable[..., Awaitable[Scene]]


@contextlib.asynccontextmanager
async def scenes() -> AsyncIterator[Begin]:
    """Makes scenes whose keepers run."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(
            *sources: Source,
            mode: ProfileMode = "precise",
            store: Shelf | None = None,
            running: bool = True,
            events: EventSettings = EventSettings(),  # noqa: B008 -- it is frozen
        ) -> Scene:
            scene = Scene(store or Shelf(SystemClock()), mode, events, *sources)
            stack.push_async_callback(scene.reader.close)
            if running:
                task = asyncio.create_task(scene.reader.run())

                async def stop() -> None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task

                stack.push_async_callback(stop)
            return scene

        yield make

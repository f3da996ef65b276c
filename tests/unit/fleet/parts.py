"""What tests of the keeper's work share: engines with a page, a store that can be down, keepers in one process."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Mapping

from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from extproc.clock import ManualClock
from extproc.config import Config, Model, Pool, Telemetry
from extproc.engines.detect import all_adapters
from extproc.errors import StoreError
from extproc.fleet.asking import new_session
from extproc.fleet.holding import Holding
from extproc.fleet.membership import Membership
from extproc.fleet.scraper import WORK, Scraper
from extproc.state.endpoint import EndpointState, decode
from extproc.state.memory import MemoryStore
from extproc.telemetry.metrics import Metrics


class Engine:
    """An HTTP server with a metrics page that the test sets."""

    def __init__(self) -> None:
        self.running = 1
        self.status = 200
        self.page: bytes | None = None
        self.pages: dict[str, bytes] = {}
        self.routes: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = 0
        self.open = 0
        self.most_open = 0
        self.connections: set[object] = set()
        self.address = ""
        self._runner: web.AppRunner | None = None
        self._event = asyncio.Condition()

    async def start(self, port: int = 0) -> None:
        """Serve on a free port, or again on the one it had."""
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/elsewhere", self._elsewhere)
        app.router.add_get("/{path:.*}", self._other)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.address = "{}:{}".format(*self._runner.addresses[0][:2])

    async def stop(self) -> None:
        """Close the listening socket and all connections."""
        if self._runner is not None:
            self.gate.set()
            await self._runner.cleanup()
            self._runner = None

    async def _elsewhere(self, _: web.Request) -> web.StreamResponse:
        return web.Response(text="vllm:num_requests_running 99\n")

    async def _other(self, request: web.Request) -> web.StreamResponse:
        if request.path in self.routes:
            return await self.routes[request.path](request)
        page = self.pages.get(request.path)
        return web.Response(body=page) if page is not None else web.Response(status=404)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; it is looked at when a request begins or ends."""
        async with self._event:
            await self._event.wait_for(condition)

    async def _happened(self) -> None:
        async with self._event:
            self._event.notify_all()

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self.connections.add(request.transport)
        try:
            await self._happened()
            await self.gate.wait()
        finally:
            self.open -= 1
            await self._happened()
        body = self.page if self.page is not None else f"vllm:num_requests_running {self.running}\n".encode()
        return web.Response(body=body, status=self.status, headers={"Location": "/elsewhere"})


class SkewedClock(ManualClock):
    """A clock of a host whose wall clock is wrong by `skew_s`."""

    skew_s = 0.0

    def wall(self) -> float:
        """See `Clock.wall`."""
        return self.now + self.skew_s


class Shelf(MemoryStore):
    """A store that keeps every write of states, and can be down."""

    def __init__(self, clock: SkewedClock) -> None:
        super().__init__(clock)
        self.writes: list[tuple[str, dict[str, EndpointState]]] = []
        self.down = False

    def _answer(self) -> None:
        if self.down:
            raise StoreError("the store is down")

    async def put_states(self, pool: str, states: Mapping[str, bytes]) -> None:
        """See `Store.put_states`."""
        self._answer()
        self.writes.append((pool, {endpoint: decode(state) for endpoint, state in states.items()}))
        await super().put_states(pool, states)

    async def states(self, pool: str) -> Mapping[str, bytes]:
        """See `Store.states`."""
        self._answer()
        return await super().states(pool)

    async def hold(self, pool: str, group: str, holder: str, names: Collection[str], lease_ms: int) -> Collection[str]:
        """See `Store.hold`."""
        self._answer()
        return await super().hold(pool, group, holder, names, lease_ms)


def configuration(scrape_ms: int = 2000, **pools: list[str]) -> Config:
    """Pools of these endpoints."""
    return Config(
        models={"m": Model(pool=next(iter(pools)))},
        pools={name: Pool(endpoints=endpoints) for name, endpoints in pools.items()},
        telemetry=Telemetry(scrape_ms=scrape_ms),
    )


class Keeper:
    """A scraper with its surroundings; several may share a shelf and a clock."""

    def __init__(self, name: str = "keeper", shelf: Shelf | None = None, clock: SkewedClock | None = None) -> None:
        self.clock = clock or SkewedClock()
        self.shelf = shelf or Shelf(self.clock)
        self.metrics = Metrics()
        self.look_up_with(Membership(), name)
        self.session = new_session(name)

    def look_up_with(self, membership: Membership, name: str = "keeper") -> None:
        """Start anew with this membership."""
        self.membership = membership
        self.holding = Holding(self.shelf, WORK, name, self.clock)
        self.scraper = Scraper(
            membership,
            self.shelf,
            self.holding,
            all_adapters(),
            self.metrics,
            self.clock,
            random.Random(1),
        )

    async def configure(self, scrape_ms: int = 2000, **pools: list[str]) -> None:
        """Point membership and scraper at these pools."""
        config = configuration(scrape_ms, **pools)
        await self.membership.apply(config)
        self.scraper.apply(config)

    async def round(self) -> None:
        """One round."""
        await self.scraper.round(self.session)

    async def close(self) -> None:
        """Leave, and close all connections."""
        await self.scraper.close()
        await self.session.close()

    def samples(self) -> dict[tuple[str, str], float]:
        """Values on the metrics page by name and endpoint (or outcome, or reason)."""
        page, names = self.metrics.page().decode(), ("endpoint", "outcome", "reason")
        return {
            (sample.name, next((sample.labels[name] for name in names if sample.labels.get(name)), "")): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }

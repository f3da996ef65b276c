"""An engine restarts at the address it had: its profile is gone with the next scrape."""

import random

from aiohttp import web

from extproc.clock import ManualClock
from extproc.engines.detect import all_adapters
from extproc.fleet.asking import new_session
from extproc.fleet.holding import Holding
from extproc.fleet.membership import Membership
from extproc.fleet.scraper import WORK, Scraper
from extproc.state.memory import MemoryStore
from extproc.telemetry.metrics import Metrics
from extproc.upkeep import Upkeep
from tests.unit.top.parts import config, surroundings


class Engine:
    """A metrics page with a start time and a counter."""

    def __init__(self) -> None:
        self.started_at = 100.0
        self.queries = 5000.0
        self.tells_start = True

    async def metrics(self, _: web.Request) -> web.Response:
        """One page."""
        start = f"process_start_time_seconds {self.started_at}\n" if self.tells_start else ""
        page = f"vllm:num_requests_running 0\nvllm:prefix_cache_queries_total {self.queries}\n{start}"
        return web.Response(text=page)


async def test_one_scrape_after_a_restart_every_worker_predicts_nothing() -> None:
    """Two workers read one keeper's states: by start time, and by a counter that fell where no start time is told."""
    engine = Engine()
    app = web.Application()
    app.router.add_get("/metrics", engine.metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = "{}:{}".format(*runner.addresses[0][:2])

    clock, settings = ManualClock(), config(pools={"main": {"endpoints": [address]}}, telemetry={"scrape_ms": 2000})
    store, membership = MemoryStore(clock), Membership()
    holding = Holding(store, WORK, "keeper", clock)
    scraper = Scraper(membership, store, holding, all_adapters(), Metrics(), clock, random.Random(1))
    scraper.apply(settings)
    workers = [surroundings(settings=settings) for _ in range(2)]
    upkeeps = [Upkeep(worker, membership, clock) for worker in workers]
    try:
        async with new_session("keeper") as session:
            await membership.apply(settings)
            for change in ({}, {"started_at": 200.0}, {"tells_start": False}, {"queries": 10.0}):
                for name, value in change.items():
                    setattr(engine, name, value)
                clock.advance(1.0)
                await scraper.round(session)
                for worker, upkeep in zip(workers, upkeeps, strict=True):
                    worker.store = store
                    await upkeep.apply(settings)
                    known = worker.knowledge["main"]
                    emptied = "started_at" in change or "queries" in change
                    assert known.matched_tokens([1, 2]) == ({} if emptied or not change else {address: 128.0}), change
                    known.decided("c", address, [1, 2])
    finally:
        await scraper.close()
        await runner.cleanup()

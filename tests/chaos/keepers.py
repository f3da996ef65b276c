"""Keepers as processes on hosts of their own, and engines that note who asks them."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from tests.unit.top.parts import Running, command, document, free_sidecar, write
from tests.waiting import until

MODEL_PAGE = b"vllm:num_requests_running 1\nvllm:prefix_cache_queries_total 7\n"


class Asked(NamedTuple):
    """One scrape: which engine, by which keeper, when on the monotonic clock."""

    engine: str
    keeper: str
    at: float


class Engines:
    """Engines in this process."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.addresses: list[str] = []

    def since(self, at: float, keepers: Collection[str] = ()) -> list[Asked]:
        """Scrapes from `at` on, by any of these keepers; by any at all when there are none."""
        return [each for each in self.asked if each.at >= at and (not keepers or each.keeper in keepers)]

    def keepers_of(self, at: float) -> dict[str, set[str]]:
        """By engine, who asked it from `at` on."""
        found: dict[str, set[str]] = {address: set() for address in self.addresses}
        for each in self.since(at):
            found[each.engine].add(each.keeper)
        return found


@contextlib.asynccontextmanager
async def serve_engines(number: int) -> AsyncIterator[Engines]:
    """Engines on free ports."""
    engines, runners = Engines(), list[web.AppRunner]()
    try:
        for _ in range(number):
            runner = await _serve(engines)
            runners.append(runner)
            engines.addresses.append("{}:{}".format(*runner.addresses[0][:2]))
        yield engines
    finally:
        for runner in runners:
            await runner.cleanup()


async def _serve(engines: Engines) -> web.AppRunner:
    app = web.Application()

    async def metrics(request: web.Request) -> web.Response:
        keeper = request.headers["User-Agent"].removeprefix("warmpath-keeper/")
        engines.asked.append(Asked(request.host, keeper, time.monotonic()))
        return web.Response(body=MODEL_PAGE)

    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


class KeeperProcess:
    """One keeper of one host."""

    def __init__(self, running: Running) -> None:
        self._running = running

    @property
    def id(self) -> str:
        """The id under which it asks engines; empty before it is ready."""
        said = self._running.said("keeper is ready")
        return str(said[0]["keeper"]) if said else ""

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self._running.child.pid, number)

    async def stop(self) -> None:
        """End it in good order."""
        await self._running.child.stop()


@contextlib.asynccontextmanager
async def keeper(folder: Path, redis_url: str, endpoints: Iterable[str], **redis: Any) -> AsyncIterator[KeeperProcess]:
    """One more keeper, ready, with a folder of its own."""
    await asyncio.to_thread(folder.mkdir, exist_ok=True)
    content = document(
        pools={"main": {"endpoints": list(endpoints)}},
        redis={"url": redis_url, **redis},
        gateway=free_sidecar(socket_dir=str(folder)),
        telemetry={"scrape_ms": 100},
    )
    path = write(folder / "warmpath.yaml", content)
    async with command("keeper", "--config", str(path)) as running:
        process = KeeperProcess(running)
        await until(lambda: bool(process.id))
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send(signal.SIGCONT)

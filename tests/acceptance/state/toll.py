"""A toll in front of an engine: it notes which keeper reads the engine's metrics page, and passes the page on."""

import contextlib
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from tests.acceptance.local import Engine
from tests.ports import free_port


class Toll:
    """One toll.

    Attributes:
        address: its own `ip:port`.
        readers: who read the page, in order.
    """

    def __init__(self, address: str, engine: str, http: aiohttp.ClientSession) -> None:
        self.address = address
        self.readers: list[str] = []
        self._engine = engine
        self._http = http

    async def handle(self, request: web.Request) -> web.Response:
        """Note who asks for the page and hand it over; every other page is passed on too."""
        if request.path == "/metrics":
            # A keeper's client names itself, and each keeper otherwise than any other.
            self.readers.append(request.headers["User-Agent"])
        async with self._http.get(f"http://{self._engine}{request.path}") as answer:
            return web.Response(body=await answer.read(), status=answer.status)


@contextlib.asynccontextmanager
async def tolls(engine: Engine, number: int) -> AsyncIterator[list[Toll]]:
    """So many, all in front of one engine, which thereby looks like so many engines."""
    async with contextlib.AsyncExitStack() as cleanup:
        http = await cleanup.enter_async_context(aiohttp.ClientSession())
        made = []
        for _ in range(number):
            port = free_port()
            toll = Toll(f"127.0.0.1:{port}", engine.address, http)
            app = web.Application()
            app.router.add_get("/{path:.*}", toll.handle)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            cleanup.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", port).start()
            made.append(toll)
        yield made

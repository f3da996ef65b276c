"""A veil in front of an engine: requests pass, its metrics page is late, or does not come."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from tests.ports import free_port

_HOP_BY_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
_PATIENT = aiohttp.ClientTimeout(total=60.0)


class Veil:
    """The knobs of one veil.

    Attributes:
        address: its own `ip:port`.
        late_s: how long the metrics page is held back, in seconds.
        failing: how many of the next metrics pages are answered 503.
    """

    def __init__(self, address: str, engine: str, http: aiohttp.ClientSession) -> None:
        self.address = address
        self.late_s = 0.0
        self.failing = 0
        self._engine = engine
        self._http = http

    async def handle(self, request: web.Request) -> web.Response:
        """Pass a request on, and its whole answer back."""
        if request.path == "/metrics":
            await asyncio.sleep(self.late_s)
            if self.failing > 0:
                self.failing -= 1
                return web.Response(status=503)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        url = f"http://{self._engine}{request.path_qs}"
        async with self._http.request(request.method, url, data=await request.read(), headers=headers) as answer:
            kind = {"content-type": answer.headers.get("content-type", "application/json")}
            return web.Response(body=await answer.read(), status=answer.status, headers=kind)


@contextlib.asynccontextmanager
async def veiled(engine: str) -> AsyncIterator[Veil]:
    """Run one in front of the engine at this address."""
    port = free_port()
    async with aiohttp.ClientSession(timeout=_PATIENT) as http:
        veil = Veil(f"127.0.0.1:{port}", engine, http)
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", veil.handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            yield veil
        finally:
            await runner.cleanup()

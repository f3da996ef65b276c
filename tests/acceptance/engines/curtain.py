"""A curtain in front of a server: pages of it come late, or fail; all else passes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import aiohttp
from aiohttp import web

from tests.acceptance.local import Engine
from tests.ports import free_port

LOAD_PAGES = ("/metrics", "/prometheus/metrics", "/v1/loads")
"""Pages that keepers read an engine's load from."""
_HOP_BY_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
_PATIENT = aiohttp.ClientTimeout(total=60.0)


class Curtain:
    """The knobs of one curtain.

    Attributes:
        address: its own `ip:port`.
        engine: `ip:port` of what stands behind it.
        late_s: how long its pages are held back, in seconds.
        failing: how many of them will be answered 503.
        readers: who asked for them, in order.
        passed: requests that went through, the held ones aside.
    """

    def __init__(self, address: str, engine: str, paths: Sequence[str], http: aiohttp.ClientSession) -> None:
        self.address = address
        self.engine = engine
        self.late_s = 0.0
        self.failing = 0
        self.readers: list[str] = []
        self.passed = 0
        self._paths = frozenset(paths)
        self._http = http

    async def handle(self, request: web.Request) -> web.Response:
        """Pass a request on, and its whole answer back."""
        if request.path in self._paths:
            self.readers.append(request.headers.get("User-Agent", ""))
            await asyncio.sleep(self.late_s)
            if self.failing > 0:
                self.failing -= 1
                return web.Response(status=503)
        else:
            self.passed += request.method == "POST"
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        url = f"http://{self.engine}{request.path_qs}"
        async with self._http.request(request.method, url, data=await request.read(), headers=headers) as answer:
            kind = {"content-type": answer.headers.get("content-type", "application/json")}
            return web.Response(body=await answer.read(), status=answer.status, headers=kind)


@contextlib.asynccontextmanager
async def curtains(engines: Sequence[Engine], paths: Sequence[str] = LOAD_PAGES) -> AsyncIterator[list[Curtain]]:
    """One in front of each engine, for these pages."""
    async with contextlib.AsyncExitStack() as cleanup:
        http = await cleanup.enter_async_context(aiohttp.ClientSession(timeout=_PATIENT))
        made = []
        for engine in engines:
            port = free_port()
            curtain = Curtain(f"127.0.0.1:{port}", engine.address, paths, http)
            app = web.Application(client_max_size=64 * 1024 * 1024)
            app.router.add_route("*", "/{path:.*}", curtain.handle)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            cleanup.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", port).start()
            made.append(curtain)
        yield made

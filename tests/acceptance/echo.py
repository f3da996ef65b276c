"""An engine that tells what reached it: the body's length and digest, the headers, the address it has."""

import contextlib
import hashlib
import json
from collections.abc import AsyncIterator

from aiohttp import web

from tests.ports import free_port

_LARGEST = 64 * 1024 * 1024


async def _tell(request: web.Request) -> web.Response:
    body = await request.read()
    told = {
        "method": request.method,
        "target": request.path_qs,
        "bytes": len(body),
        "sha256": hashlib.sha256(body).hexdigest(),
        "headers": {name.lower(): value for name, value in request.headers.items()},
        "endpoint": request.app[_ADDRESS],
    }
    return web.Response(body=json.dumps(told).encode(), content_type="application/json")


_ADDRESS = web.AppKey("address", str)


@contextlib.asynccontextmanager
async def echoing() -> AsyncIterator[str]:
    """Run one; yields its `ip:port`."""
    port = free_port()
    app = web.Application(client_max_size=_LARGEST)
    app[_ADDRESS] = f"127.0.0.1:{port}"
    app.router.add_route("*", "/{path:.*}", _tell)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield app[_ADDRESS]
    finally:
        await runner.cleanup()

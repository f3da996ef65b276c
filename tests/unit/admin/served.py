"""The operator API over HTTP on a free port, over a stage."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from extproc.admin import rollout_pages
from extproc.admin.entry import Entry
from extproc.admin.rollouts import RolloutCalls
from tests.unit.admin.stage import Stage

JSON = {"content-type": "application/json"}


class Api:
    """A running listener, and a client of it."""

    def __init__(self, at: Stage, url: str, http: aiohttp.ClientSession) -> None:
        self.at = at
        self.url = url
        self.http = http

    async def get(self, path: str = "", **headers: str) -> tuple[int, Any]:
        """Status and JSON of a page below `/v1/rollouts`, its path as it is."""
        async with self.http.get(URL(f"{self.url}{path}", encoded=True), headers=headers) as answer:
            return answer.status, await answer.json()

    async def post(self, path: str, body: object = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """The same with a body: bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        url = URL(f"{self.url}{path}", encoded=True)
        async with self.http.post(url, data=data, headers=JSON if headers is None else headers) as answer:
            return answer.status, await answer.json()


@contextlib.asynccontextmanager
async def serving(at: Stage, calls: RolloutCalls | None = None, token: Path | None = None) -> AsyncIterator[Api]:
    """The pages on a free port."""
    app = web.Application()
    app.add_routes(rollout_pages.routes(calls or at.calls, Entry(token, "127.0.0.1")))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as http:
            yield Api(at, f"http://127.0.0.1:{port}/v1/rollouts", http)
    finally:
        await runner.cleanup()

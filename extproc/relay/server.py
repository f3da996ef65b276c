"""The HTTP server of a relay: takes requests from Envoy, and tells of its health and metrics."""

import asyncio
from collections.abc import Set as AbstractSet
from typing import Final

from aiohttp import web

from extproc.config_relay import HEALTH
from extproc.errors import BodyTooLargeError, OverloadedError, RelayError, ShuttingDownError, WarmpathError
from extproc.relay.asked import PATHS, Api, read
from extproc.relay.client import Client, Gone, refusal
from extproc.relay.gateway import Gateway
from extproc.relay.limits import Limits, Room
from extproc.relay.passage import Passage
from extproc.telemetry.relay_metrics import RelayMetrics

METRICS: Final = "/metrics"
_MAX_HELD: Final = 512 * 1024 * 1024


class _UnknownPathError(WarmpathError):
    """Only chats and completions are relayed; Envoy sends nothing else."""

    status = 404
    reason = "unknown_path"
    kind = "not_found_error"


class Server:
    """Relays requests. One instance serves all of a process.

    Attributes:
        metrics: what happened.
    """

    def __init__(
        self,
        gateway: Gateway,
        limits: Limits,
        metrics: RelayMetrics,
        *,
        max_open: int = 1000,
        telling: AbstractSet[str] = frozenset(),
    ) -> None:
        """`telling` are models whose streams report usage unasked; `max_open` is how many requests it has at once."""
        self.metrics = metrics
        self._gateway = gateway
        self._limits = limits
        self._max_open = max_open
        self._telling = telling
        self._room = Room(_MAX_HELD, metrics)
        self._open = 0
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()

    def app(self) -> web.Application:
        """What an `aiohttp` runner serves; it has to be told to cancel handlers whose client leaves."""
        app = web.Application()
        app.add_routes(
            [
                web.get(HEALTH, self._health),
                web.get(METRICS, self._page),
                web.post("/{path:.*}", self._relay),
            ]
        )
        return app

    def take(self, limits: Limits, telling: AbstractSet[str]) -> None:
        """Take a changed configuration; requests in the relay go on as they began."""
        self._limits, self._telling = limits, telling

    async def drain(self, patience_s: float) -> None:
        """Take no new requests, and wait for those that are open, but no longer than this."""
        self._stopping = True
        try:
            async with asyncio.timeout(patience_s):
                await self._idle.wait()
        except TimeoutError:
            return

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=503 if self._stopping else 200)

    async def _page(self, _request: web.Request) -> web.Response:
        headers = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self.metrics.page(), headers=headers)

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        api = PATHS.get(_ending(request.path))
        if api is None:
            return refusal(_UnknownPathError(f"the relay takes {' and '.join(PATHS)}"))
        if self._stopping:
            return refusal(ShuttingDownError("the relay is stopping: try again"))
        if self._open >= self._max_open:
            return refusal(OverloadedError("the relay has as many requests as it may: try again, or without it"))
        self._open += 1
        self._idle.clear()
        self.metrics.opened()
        passage: Passage | None = None
        refused = False
        try:
            body = await self._body(request)
            try:
                passage = self._passage(api, request, body)
                return await passage.run(self._gateway, Client(request), self._room, self.metrics)
            finally:
                self._room.give(len(body))
        except Gone:
            # Nobody is there to read it, but aiohttp wants an answer.
            return web.Response(status=499)
        except (BodyTooLargeError, OverloadedError, RelayError) as error:
            refused = passage is None
            if passage is not None:
                passage.outcome = "failed"
            return refusal(error)
        finally:
            self.metrics.closed("refused" if refused else passage.outcome if passage else "gone")
            self._open -= 1
            if not self._open:
                self._idle.set()

    def _passage(self, api: Api, request: web.Request, body: bytes) -> Passage:
        asked = read(api, body, self._telling)
        return Passage(asked, request.raw_path, request.headers, body, self._limits)

    async def _body(self, request: web.Request) -> bytes:
        """The whole body, which counts as held.

        Raises:
            BodyTooLargeError: it is larger than one may be.
            OverloadedError: there is no room for it.
        """
        body = bytearray()
        try:
            async for piece in request.content.iter_any():
                self._room.take(len(piece))
                body += piece
                self._check_size(len(body))
        except BaseException as error:
            self._room.give(len(body))
            if isinstance(error, (ConnectionError, web.RequestPayloadError)):
                raise Gone from error
            raise
        return bytes(body)

    def _check_size(self, size: int) -> None:
        if size > self._limits.max_body:
            raise BodyTooLargeError(f"The request body is larger than {self._limits.max_body} bytes.")


def _ending(path: str) -> str:
    """The last part of a path that names an API, as `request.shapes` reads it: behind any prefix."""
    path = path.rstrip("/")
    return next((ending for ending in PATHS if path.endswith(ending)), "")

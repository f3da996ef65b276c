"""A stand-in for Envoy's inner listener: answers each request of a relay as it is told, and dies as it is told."""

import asyncio
from collections.abc import Sequence
from typing import Literal

import msgspec
from aiohttp import web

from tests.ports import free_port


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """One answer.

    Attributes:
        status: HTTP status.
        headers: further headers.
        pieces: the body, piece by piece.
        then: how it ends: with its `end`, by a connection that is `cut`, or not at all (`hang`); `flood` sends the
            last piece again and again.
        kind: content type.
        served: engine that answers.
        late_s: silence between the last piece and the end.
        silent: nothing comes, not even a status.
    """

    status: int = 200
    headers: dict[str, str] = {}
    pieces: Sequence[bytes] = ()
    then: Literal["end", "cut", "hang", "flood"] = "end"
    kind: str = "text/event-stream"
    served: str = "10.0.0.1:8000"
    late_s: float = 0.0
    silent: bool = False


class Heard(msgspec.Struct):
    """One request that came.

    Attributes:
        path: path and query.
        headers: names in lower case.
        body: as it came.
        sent: bytes of the answer so far.
        left: whether the relay closed the connection before the end.
        over: whether nothing more happens with it.
    """

    path: str
    headers: dict[str, str]
    body: bytes
    sent: int = 0
    left: bool = False
    over: bool = False


class InnerListener:
    """Plays one answer after the other; use it with `async with`.

    Attributes:
        address: `ip:port`.
        plays: what is left to play.
        heard: requests in the order they came.
    """

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.plays: list[Play] = []
        self.heard: list[Heard] = []
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> "InnerListener":
        app = web.Application()
        app.add_routes([web.post("/{path:.*}", self._play)])
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        host, _, port = self.address.partition(":")
        await web.TCPSite(self._runner, host, int(port)).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner:
            await self._runner.cleanup()

    async def _play(self, request: web.Request) -> web.StreamResponse:
        names = {name.lower(): value for name, value in request.headers.items()}
        heard = Heard(request.raw_path, names, await request.read())
        self.heard.append(heard)
        try:
            return await self._answer(request, heard, self.plays.pop(0))
        except (asyncio.CancelledError, ConnectionError):
            heard.left = True
            raise
        finally:
            heard.over = True

    async def _answer(self, request: web.Request, heard: Heard, play: Play) -> web.StreamResponse:
        if play.silent:
            await asyncio.Event().wait()
        headers = {"x-warmpath-served": play.served, "content-type": play.kind, **play.headers}
        response = web.StreamResponse(status=play.status, headers=headers)
        await response.prepare(request)
        for piece in play.pieces:
            await response.write(piece)
            heard.sent += len(piece)
        while play.then == "flood":
            await response.write(play.pieces[-1])
            heard.sent += len(play.pieces[-1])
        if play.then == "hang":
            await asyncio.Event().wait()
        if play.then == "cut":
            # What was written leaves before the connection does.
            await asyncio.sleep(0.02)
            if request.transport:
                request.transport.abort()
            return response
        await asyncio.sleep(play.late_s)
        await response.write_eof()
        return response

"""The client's side of a relayed request: what was sent so far, and how fast more may come."""

from collections.abc import Mapping

from aiohttp import web

from extproc.errors import WarmpathError
from extproc.relay.events import event_of

_REASON = "x-warmpath-reason"


class Gone(Exception):  # noqa: N818 -- a client may leave
    """The client has left."""


class Client:
    """Sends a stream to one client. Nothing is sent before the first piece, so the status stays open until then."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        """Whether the head of the answer was sent."""
        return self._response is not None

    async def send(self, pieces: list[bytes], headers: Mapping[str, str]) -> None:
        """Send pieces; returns once the connection has room for more.

        Args:
            pieces: bytes of the body.
            headers: headers of the answer, should these be its first pieces.

        Raises:
            Gone: the client has left.
        """
        if not pieces:
            return
        try:
            response = await self._begin(headers)
            await response.write(b"".join(pieces))
        except ConnectionError as error:
            raise Gone from error

    async def end(self, pieces: list[bytes], headers: Mapping[str, str]) -> web.StreamResponse:
        """Send the last pieces. Raises Gone when the client has left."""
        await self.send(pieces, headers)
        try:
            response = await self._begin(headers)
            await response.write_eof()
        except ConnectionError as error:
            raise Gone from error
        return response

    async def fail(self, error: WarmpathError) -> web.StreamResponse:
        """Tell of an error: as the answer, or as the last event of one that has begun. Raises Gone as `end` does."""
        if self._response is None:
            return refusal(error)
        return await self.end([event_of(error.body())], {})

    async def _begin(self, headers: Mapping[str, str]) -> web.StreamResponse:
        if self._response is None:
            self._response = web.StreamResponse(status=200, headers=headers)
            await self._response.prepare(self._request)
        return self._response


def refusal(error: WarmpathError) -> web.Response:
    """An error as the whole answer."""
    headers = {**error.headers, _REASON: error.reason}
    return web.Response(status=error.status, body=error.body(), content_type="application/json", headers=headers)

"""The way from a relay back into Envoy: one request to an engine, its answer in pieces, and how that ends early."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Final

import aiohttp
from multidict import CIMultiDict

from extproc.config_relay import ASKING, AVOID, SERVED_BY
from extproc.relay.answer import Lost

_REQUEST_ID: Final = "x-request-id"
_ONCE: Final = ("idempotency-key", "x-idempotency-key")
"""Headers by which a gateway refuses what it runs already: further tries are the relay's own."""
_HOP_BY_HOP: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
        *("host", "content-length", "accept-encoding", "expect"),
    }
)
"""Headers of one connection, not of the request (RFC 9110 section 7.6.1), and those that the client library writes."""
_OWN: Final = frozenset({SERVED_BY, "date", "server", _REQUEST_ID})
_CONNECT_S: Final = 5.0
_FINISH_S: Final = 1.0

Headers = Mapping[str, str]


class Reply:
    """An answer whose head has come.

    Attributes:
        status: HTTP status.
        served: `ip:port` of the engine that answers; empty where Envoy did.
        headers: those that are the client's to see.
    """

    def __init__(self, response: aiohttp.ClientResponse, stall_s: float) -> None:
        self._response = response
        self._stall_s = stall_s
        self.status = response.status
        self.served = response.headers.get(SERVED_BY, "")
        self.headers = CIMultiDict(
            (name, value)
            for name, value in response.headers.items()
            if name.lower() not in _HOP_BY_HOP | _OWN and not name.lower().startswith("x-envoy-")
        )

    @property
    def streams(self) -> bool:
        """Whether it is a stream of events."""
        return self.status == 200 and self._response.content_type == "text/event-stream"

    async def piece(self) -> bytes:
        """The next bytes; empty at the end. Raises Lost when they do not come."""
        try:
            async with asyncio.timeout(self._stall_s):
                return await self._response.content.readany()
        except TimeoutError:
            raise Lost("stalled") from None
        except (aiohttp.ClientError, OSError):
            raise Lost("cut") from None

    async def finish(self) -> None:
        """Let an answer whose last event has come end by itself: closed before, it would count as left by a client."""
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(_FINISH_S):
                while await self._response.content.readany():
                    pass


class Gateway:
    """Sends requests to Envoy's inner listener."""

    def __init__(self, address: str, stall_s: float) -> None:
        """To be made in a running event loop, and closed.

        Args:
            address: `unix:PATH` or `host:port`; connections are made as they are needed.
            stall_s: a stream that says nothing for so many seconds counts as lost.
        """
        path = address.removeprefix("unix:")
        # A kept connection may be closing just when it is used, which would look like the death of an engine.
        connector: aiohttp.BaseConnector = (
            aiohttp.TCPConnector(limit=0, force_close=True)
            if path == address
            else aiohttp.UnixConnector(path, limit=0, force_close=True)
        )
        self._base = f"http://{address}" if path == address else "http://gateway"
        self._stall_s = stall_s
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            auto_decompress=False,
            skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    @contextlib.asynccontextmanager
    async def send(self, path: str, headers: Headers, body: bytes, *, stream: bool) -> AsyncIterator[Reply]:
        """Send a request; the answer is given up when the block ends.

        Args:
            path: path and query.
            headers: as `headers_of` makes them.
            body: the body.
            stream: whether a stream is asked for, whose head has to come within the limit of a stall. Another answer's
                comes when it is complete.

        Raises:
            Lost: no answer began.
        """
        asking = self._session.post(self._base + path, headers=headers, data=body, allow_redirects=False)
        try:
            async with asyncio.timeout(self._stall_s if stream else None):
                response = await asking
        except TimeoutError:
            raise Lost("stalled") from None
        except (aiohttp.ClientError, OSError):
            raise Lost("cut") from None
        try:
            yield Reply(response, self._stall_s)
        finally:
            # Not read to its end, the connection is closed: Envoy ends the request at the engine then.
            response.close()


def headers_of(client: Headers, attempt: int, avoid: Mapping[str, None]) -> CIMultiDict[str]:
    """Headers of one try.

    Args:
        client: headers as Envoy handed them on; names in any case.
        attempt: number of the try, from 1. Later ones have a request id of their own, so that each can be explained.
        avoid: `ip:port` of the engines that were lost.
    """
    kept = CIMultiDict((name, value) for name, value in client.items() if name.lower() not in _HOP_BY_HOP)
    for name in (ASKING, AVOID):
        kept.popall(name, None)
    if attempt > 1:
        for name in _ONCE:
            kept.popall(name, None)
        if given := kept.get(_REQUEST_ID):
            kept[_REQUEST_ID] = f"{given}-{attempt}"
    if avoid:
        kept[AVOID] = ",".join(avoid)
    kept["accept-encoding"] = "identity"
    return kept

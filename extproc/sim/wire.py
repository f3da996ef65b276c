"""HTTP/1.1 on an asyncio transport: just what an engine's surface needs, at few system calls a request."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from typing import cast

import httptools

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TOO_LARGE = b"Request body is too large."
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


@dataclass(slots=True)
class Request:
    """One request, whole. Header names are lower case."""

    method: bytes = b""
    target: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    keep_alive: bool = True
    chunked_answer: bool = True

    @property
    def path(self) -> bytes:
        """The target without its query."""
        return self.target.partition(b"?")[0]


Handler = Callable[[Request, "Exchange"], None]


class Exchange:
    """The answer to one request: either `send`, or `start`, any number of `write`, and a last one.

    Attributes:
        on_disconnect: called once if the client leaves before the answer is complete.
    """

    __slots__ = ("_connection", "_request", "on_disconnect", "open")

    def __init__(self, connection: "Connection", request: Request) -> None:
        self._connection = connection
        self._request = request
        self.on_disconnect: Callable[[], None] | None = None
        self.open = True

    def send(
        self, status: int, body: bytes = b"", kind: bytes = JSON, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        """Answer with one body."""
        if not self.open:
            return
        head = self._head(status, kind if body or status == HTTPStatus.OK else b"", headers)
        payload = b"" if self._request.method == b"HEAD" else body
        self._finish(b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), payload))

    def start(self, kind: bytes) -> None:
        """Send status 200 and the headers of an answer that comes piece by piece."""
        if self.open:
            framing = b"transfer-encoding: chunked\r\n\r\n" if self._request.chunked_answer else b"\r\n"
            self._connection.transmit(self._head(200, kind, ()) + framing)

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Send a piece; `last` completes the answer in the same write."""
        if not self.open:
            return
        if self._request.chunked_answer:
            chunk = b"%x\r\n%s\r\n" % (len(data), data) if data else b""
            data = chunk + b"0\r\n\r\n" if last else chunk
        if last:
            self._finish(data)
        else:
            self._connection.transmit(data)

    def cut(self) -> None:
        """Reset the connection, as an engine that dies does."""
        self._connection.abort()

    def _head(self, status: int, kind: bytes, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
        lines = [
            b"HTTP/1.1 %d %s\r\ndate: %s\r\nserver: uvicorn\r\n" % (status, _REASONS[status], _date(int(time.time())))
        ]
        if kind:
            lines.append(b"content-type: %s\r\n" % kind)
        lines += [b"%s: %s\r\n" % pair for pair in headers]
        if not self._request.keep_alive:
            lines.append(b"connection: close\r\n")
        return b"".join(lines)

    def _finish(self, data: bytes) -> None:
        self.open = False
        self.on_disconnect = None
        self._connection.transmit(data)
        self._connection.answered(keep=self._request.keep_alive)


class Connection(asyncio.Protocol):
    """One client connection: reads whole requests, answers them in order, closes when idle for too long.

    Attributes:
        lost: set once the connection is gone.
    """

    def __init__(self, handler: Handler, peers: "set[Connection]", max_body: int, keep_alive_s: float) -> None:
        self.lost = asyncio.Event()
        self._handler = handler
        self._peers = peers
        self._max_body = max_body
        self._keep_alive_s = keep_alive_s
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._request = Request()
        self._pieces: list[bytes] = []
        self._size = 0
        self._ready: deque[Request] = deque()
        self._exchange: Exchange | None = None
        self._busy = False
        self._idle_since = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport (called by the event loop)."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has the methods but not the base class
        self._peers.add(self)
        self._note_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the exchange in progress that its client has left (called by the event loop)."""
        del exc
        self.lost.set()
        self._peers.discard(self)
        self._transport = None
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._ready.clear()
        exchange, self._exchange = self._exchange, None
        if exchange is not None and exchange.open:
            exchange.open = False
            if exchange.on_disconnect is not None:
                exchange.on_disconnect()

    def data_received(self, data: bytes) -> None:
        """Parse what came; answer 400 to what is no HTTP and close (called by the event loop)."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.close()
        except httptools.HttpParserError:
            self._turn_away(400, b"Invalid HTTP request received.")

    def on_message_begin(self) -> None:
        """Start a request (called by the parser)."""
        self._request = Request()
        self._pieces = []
        self._size = 0

    def on_url(self, url: bytes) -> None:
        """Take a piece of the target (called by the parser)."""
        self._request.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header (called by the parser)."""
        self._request.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Take the method and let a client that waits for leave go on (called by the parser)."""
        request = self._request
        request.method = self._parser.get_method()
        request.keep_alive = self._parser.should_keep_alive()
        request.chunked_answer = self._parser.get_http_version() != "1.0"
        if not request.chunked_answer:
            request.keep_alive = False
        if request.headers.get(b"expect", b"").lower() == b"100-continue" and not self._busy:
            if int(request.headers.get(b"content-length", b"0")) > self._max_body:
                self._turn_away(413, _TOO_LARGE)
            else:
                self.transmit(_CONTINUE)

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body (called by the parser)."""
        self._size += len(body)
        if self._size <= self._max_body:
            self._pieces.append(body)
        else:
            self._pieces.clear()

    def on_message_complete(self) -> None:
        """Serve the request, or keep it until the one before is answered (called by the parser)."""
        if self._size > self._max_body:
            # Read to its end first: closing on a client that still sends would lose the answer.
            self._turn_away(413, _TOO_LARGE)
            return
        request = self._request
        request.body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        self._ready.append(request)
        self._serve_next()

    def transmit(self, data: bytes) -> None:
        """Write bytes if the client is still there."""
        if self._transport is not None:
            self._transport.write(data)

    def answered(self, *, keep: bool) -> None:
        """Go on to the next request, or close (called by the exchange that is complete)."""
        self._exchange = None
        self._busy = False
        if not keep:
            self.close()
            return
        self._note_idle()
        if self._ready:
            asyncio.get_running_loop().call_soon(self._serve_next)

    def close(self) -> None:
        """Close once everything written has gone out."""
        if self._transport is not None:
            self._transport.close()

    def end(self) -> None:
        """Close for the engine's own end: at once if an answer is in progress, else when the last is out."""
        if self._busy:
            self.abort()
        else:
            self.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def _serve_next(self) -> None:
        if self._busy or not self._ready or self._transport is None:
            return
        self._busy = True
        request = self._ready.popleft()
        self._exchange = exchange = Exchange(self, request)
        self._handler(request, exchange)

    def _turn_away(self, status: int, text: bytes) -> None:
        self._ready.clear()
        if not self._busy:
            self._busy = True
            Exchange(self, Request(keep_alive=False)).send(status, text, b"text/plain; charset=utf-8")
        else:
            self.close()

    def _note_idle(self) -> None:
        """Start to count idle time. One timer a connection looks from time to time: cheaper than one a request."""
        loop = asyncio.get_running_loop()
        self._idle_since = loop.time()
        if self._idle_timer is None:
            self._idle_timer = loop.call_later(self._keep_alive_s, self._check_idle)

    def _check_idle(self) -> None:
        self._idle_timer = None
        loop = asyncio.get_running_loop()
        if self._busy:
            return
        left = self._idle_since + self._keep_alive_s - loop.time()
        if left <= 0:
            self.close()
        else:
            self._idle_timer = loop.call_later(left, self._check_idle)


@lru_cache(maxsize=2)
def _date(second: int) -> bytes:
    """Return the value of a `date` header; formatted once a second."""
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(second)).encode()

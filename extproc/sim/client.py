"""A client that shares its cores with what it measures: HTTP/1.1 on an asyncio transport, connections kept alive."""

import asyncio
from enum import StrEnum
from typing import Protocol, Self, cast
from urllib.parse import urlsplit

import httptools


class Failure(StrEnum):
    """Why a request does not count as answered. What is none of these is a complete, well-formed answer."""

    CONNECT = "connect"
    """No connection could be made."""
    BROKEN = "broken"
    """The connection ended before the answer did."""
    TIMEOUT = "timeout"
    """The answer was not complete within the request's time limit."""
    STATUS = "status"
    """The status was not 200."""
    ERROR_EVENT = "error_event"
    """An error stood inside an answer of status 200."""
    NO_DONE = "no_done"
    """A stream ended in good order, but without `[DONE]`."""
    MALFORMED = "malformed"
    """What came is not HTTP, not the JSON of an answer, or lacks content or `usage`."""
    CLIENT_LIMIT = "client_limit"
    """Not sent: too many requests of this client were in flight."""
    STOPPED = "stopped"
    """In flight when the whole run reached its time limit."""
    UNSENT = "unsent"
    """Not sent: the whole run reached its time limit first."""


class Receiver(Protocol):
    """Takes an answer as it comes."""

    def status(self, code: int) -> None:
        """The head of the answer is complete."""
        ...

    def body(self, data: bytes) -> None:
        """A piece of the body, chunk framing removed; pieces may end anywhere."""
        ...


class Client:
    """Requests to one origin. Use as an async context manager, inside a running event loop."""

    def __init__(self, url: str) -> None:
        """`url` is `http://host:port`; a path is not used."""
        parts = urlsplit(url)
        self.authority = parts.netloc
        self._host = parts.hostname or ""
        self._port = parts.port or 80
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """Close every connection."""
        connections = tuple(self._open)
        for connection in connections:
            connection.abort()
        for connection in connections:
            await connection.lost.wait()

    async def send(self, request: bytes, receiver: Receiver, timeout_s: float) -> Failure | None:
        """Send one request, head and body, and pass the answer to `receiver`.

        There is no second try: a kept connection that its peer closes at the same moment counts as broken.

        Args:
            request: the bytes of an HTTP/1.1 request.
            receiver: takes status and body.
            timeout_s: seconds for everything, the connection included.

        Returns:
            None after a complete answer of any status, else what went wrong in transport.
        """
        connection: _Connection | None = None
        answered: asyncio.Future[Failure | None] | None = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = self._kept() or await self._connect()
                answered = connection.exchange(request, receiver)
                failure = await answered
        except TimeoutError:
            failure = Failure.TIMEOUT
        except OSError:
            failure = Failure.CONNECT
        finally:
            # Given up, by time limit or cancellation: what still comes would be taken for the next answer. A connection
            # that has answered may be another request's by now.
            if connection is not None and connection.owes(answered):
                connection.abort()
        return failure

    def _kept(self) -> "_Connection | None":
        """Take an idle connection that its peer has not begun to close."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(self._connection, self._host, self._port)
        return connection

    def _connection(self) -> "_Connection":
        return _Connection(self._idle, self._open)


class _Connection(asyncio.Protocol):
    """One connection, one request at a time. Puts itself among the idle ones after a complete answer."""

    def __init__(self, idle: "list[_Connection]", opened: "set[_Connection]") -> None:
        self.lost = asyncio.Event()
        self._idle = idle
        self._opened = opened
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._receiver: Receiver | None = None
        self._answered: asyncio.Future[Failure | None] | None = None

    def owes(self, answered: "asyncio.Future[Failure | None] | None") -> bool:
        """Whether the answer that this future stands for has not come yet."""
        return answered is not None and self._answered is answered

    @property
    def usable(self) -> bool:
        """Whether a request can still be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def exchange(self, request: bytes, receiver: Receiver) -> "asyncio.Future[Failure | None]":
        """Send `request`; the future ends with the answer."""
        self._receiver = receiver
        self._parser = httptools.HttpResponseParser(self)
        self._answered = answered = asyncio.get_running_loop().create_future()
        if self._transport is None:
            self._end(Failure.BROKEN)
        else:
            self._transport.write(request)
        return answered

    def abort(self) -> None:
        """Close without waiting for anything."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)
        self._opened.add(self)

    def connection_lost(self, _error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        self._opened.discard(self)
        if self in self._idle:
            self._idle.remove(self)
        self._end(Failure.BROKEN)
        self.lost.set()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._parser is None:
            self.abort()  # bytes that answer nothing
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a fault of the receiver, not of the bytes
        except httptools.HttpParserError:
            self._end(Failure.MALFORMED)
            self.abort()

    def on_headers_complete(self) -> None:
        """See `httptools`."""
        if self._parser is not None and self._receiver is not None:
            self._receiver.status(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        """See `httptools`."""
        if self._receiver is not None:
            self._receiver.body(data)

    def on_message_complete(self) -> None:
        """See `httptools`."""
        keep = self._parser is not None and self._parser.should_keep_alive()
        self._end(None)
        if keep and self.usable:
            self._idle.append(self)
        else:
            self.abort()

    def _end(self, failure: Failure | None) -> None:
        answered, self._answered = self._answered, None
        self._parser = self._receiver = None
        if answered is not None and not answered.done():
            answered.set_result(failure)

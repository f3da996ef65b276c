"""The load generator's connections: kept, handed on, never broken by the request before."""

import asyncio
from collections.abc import AsyncIterator
from typing import Self

import pytest

from extproc.sim.client import Client, Failure

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Answers each request at once, or never; counts connections."""

    def __init__(self) -> None:
        self.connections = 0
        self.silent = False
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                if not self.silent:
                    writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


class Taken:
    """Takes an answer and keeps its body."""

    def __init__(self) -> None:
        self.bytes = b""

    def status(self, code: int) -> None:
        """See `client.Receiver`."""
        assert code == 200

    def body(self, data: bytes) -> None:
        """See `client.Receiver`."""
        self.bytes += data


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server on loopback."""
    async with Server() as running:
        yield running


async def test_a_connection_taken_over_at_once_is_not_broken_by_its_last_user(server: Server) -> None:
    """Three requests share connections so closely that one is reused before the last user has seen its answer."""
    async with Client(f"http://127.0.0.1:{server.port}") as client:

        async def ask(times: int) -> list[Failure | None]:
            return [await client.send(REQUEST, Taken(), 10.0) for _ in range(times)]

        results = await asyncio.gather(*(ask(200) for _ in range(3)))
    assert [failure for each in results for failure in each if failure] == []
    assert server.connections <= 3


async def test_a_request_that_is_given_up_takes_its_connection_along(server: Server) -> None:
    """After a time-out the next request gets a fresh connection: a late answer cannot be taken for its own."""
    async with Client(f"http://127.0.0.1:{server.port}") as client:
        server.silent = True
        assert await client.send(REQUEST, Taken(), 0.05) is Failure.TIMEOUT
        server.silent = False
        taken = Taken()
        assert await client.send(REQUEST, taken, 10.0) is None
    assert taken.bytes == b"ok"
    assert server.connections == 2

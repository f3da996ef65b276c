"""Requests to a gateway: as fast as a number of connections goes, or at a rate whatever the answers."""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Self
from urllib.parse import urlsplit

from extproc.sim.client import Client
from tests.bench.prompts import PATH, Prompts

_TIMEOUT_S = 30.0


class _Answer:
    """Takes an answer and keeps its status."""

    def __init__(self) -> None:
        self.code = 0

    def status(self, code: int) -> None:
        self.code = code

    def body(self, _data: bytes) -> None:
        pass


class Traffic:
    """Requests to one gateway over a fixed number of connections. Use as an async context manager.

    Args:
        url: of the gateway.
        connections: requests under way at once, at most.
        size: bytes of a body.
        chunks: events of a streamed answer; 0 for answers in one piece.
    """

    def __init__(self, url: str, connections: int, size: int, chunks: int = 0) -> None:
        self._clients = [Client(url) for _ in range(connections)]
        self._free: asyncio.Queue[Client] = asyncio.Queue()
        self._authority = urlsplit(url).netloc
        self._prompts = Prompts(size)
        self._chunks = chunks

    async def __aenter__(self) -> Self:
        for client in self._clients:
            await client.__aenter__()
            self._free.put_nowait(client)
        return self

    async def __aexit__(self, *_exception: object) -> None:
        for client in self._clients:
            await client.__aexit__()

    def requests(self, count: int) -> list[bytes]:
        """Make requests beforehand, so that their making is no part of what is measured."""
        return [self._request(self._prompts.next(stream=self._chunks > 0)) for _ in range(count)]

    async def closed(self, requests: Sequence[bytes]) -> list[float]:
        """Send each connection's next request after the answer to its last; returns seconds of each."""
        waiting = iter(requests)
        took: list[float] = []

        async def one() -> None:
            for request in waiting:
                began = time.monotonic()
                took.append(await self._send(request) - began)

        await asyncio.gather(*(one() for _ in self._clients))
        return took

    async def open(self, requests: Sequence[bytes], rate: float, seed: int) -> list[float]:
        """Send requests as a Poisson stream of `rate` a second; returns seconds from when each was due."""
        rng = random.Random(seed)
        due = time.monotonic()
        sent: list[asyncio.Task[float]] = []
        for request in requests:
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            sent.append(asyncio.create_task(self._since(due, request)))
        return await asyncio.gather(*sent)

    async def _since(self, due: float, request: bytes) -> float:
        return await self._send(request) - due

    async def _send(self, request: bytes) -> float:
        """Returns the moment of the end. Raises RuntimeError for anything but a 200."""
        answer = _Answer()
        client = await self._free.get()
        failure = await client.send(request, answer, _TIMEOUT_S)
        self._free.put_nowait(client)
        if failure is not None or answer.code != 200:
            raise RuntimeError(f"a request of the bench failed: {failure or answer.code}")
        return time.monotonic()

    def _request(self, body: bytes) -> bytes:
        head = [f"POST {PATH} HTTP/1.1", f"host: {self._authority}", "content-type: application/json"]
        if self._chunks:
            head.append(f"x-bench-chunks: {self._chunks}")
        head.append(f"content-length: {len(body)}\r\n\r\n")
        return "\r\n".join(head).encode() + body

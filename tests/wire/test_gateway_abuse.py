"""Clients that mean harm, or behave as if: a real Envoy stays within its memory, and serves the others meanwhile."""

import asyncio
import contextlib
import gzip
import json
import resource
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import h2.connection
import h2.events
import pytest
import pytest_asyncio

from extproc.config import Gateway
from tests.wire.gateway import CHAT, MIB, Running, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT_MB = 200
IDLE = 10_000
BROKEN = ("ConnectionResetError", "BrokenPipeError")
SLACK_MB = 30
"""What clients may have sent between two looks of Envoy at its memory."""


@pytest.fixture(scope="module", autouse=True)
def _many_files() -> Iterator[None]:
    """Thousands of connections need as many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Running]:
    """A gateway that may take 200 MiB, and waits four seconds for a request."""
    gateway = Gateway(max_memory_mb=LIMIT_MB, receive_s=4.0, message_timeout_ms=5000)
    async with running_gateway(gateway) as running:
        yield running


class Bystander:
    """Another client, who asks again and again and has a stream open; and somebody who looks at Envoy's memory.

    Attributes:
        answers: status and reason of its requests.
        peak: most bytes that Envoy was seen to have.
        stream: what its stream brought.
    """

    def __init__(self, running: Running, stream_s: float) -> None:
        self.answers: Counter[tuple[int, str]] = Counter()
        self.peak = 0
        self.stream = b""
        self._running = running
        self._stream_s = stream_s
        self._over = False

    async def _look(self) -> None:
        while not self._over:
            self.peak = max(self.peak, await self._running.memory())
            await asyncio.sleep(0.05)

    async def _ask(self) -> None:
        while not self._over:
            answer = await self._running.ask()
            self.answers[answer.status, answer.reason] += 1
            await asyncio.sleep(0.05)

    async def _listen(self) -> None:
        self.stream = (await self._running.ask(path=f"{CHAT}?stream={self._stream_s}")).body

    @contextlib.asynccontextmanager
    async def around(self) -> AsyncIterator[None]:
        """All of it, while the block runs; its stream is heard to the end."""
        listening = asyncio.create_task(self._listen())
        tasks = [asyncio.create_task(self._look()), asyncio.create_task(self._ask())]
        await asyncio.sleep(0.2)
        try:
            yield
        finally:
            self._over = True
            await asyncio.gather(*tasks, listening)

    def was_served(self) -> bool:
        """Whether it got what it asked for."""
        return set(self.answers) == {(200, "")} and self.stream.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("kind", ["http1", "http2"])
async def test_a_thousand_half_sent_bodies_do_not_exhaust_memory(gateway: Running, kind: str) -> None:
    """1,000 clients send 1 MiB of two and stall: the largest are given up, others are served, and memory comes back."""
    before = await gateway.memory()
    others = Bystander(gateway, stream_s=8.0)
    async with others.around():
        flood = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.wire.flood", kind, *map(str, gateway.address), "1000", str(MIB)),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(60):
                told, _ = await flood.communicate()
        finally:
            if flood.returncode is None:
                flood.kill()
    ended = json.loads(told)
    assert others.peak < (LIMIT_MB + SLACK_MB) * MIB
    assert sum(ended.values()) == 1000
    # Who still sends when Envoy closes the connection may not get to read why.
    assert set(ended) <= {"503 gateway_full", "408 receive_time_limit", "reset", "closed", *BROKEN}
    refused = others.answers.pop((503, "gateway_full"), 0)
    assert others.was_served(), others.answers
    assert refused <= 0.3 * sum(others.answers.values())
    await asyncio.sleep(0.5)
    assert await gateway.memory() < before + 20 * MIB


async def test_ten_thousand_idle_connections_cost_little(gateway: Running) -> None:
    """A connection that sends nothing holds a few KiB; whoever comes after them is served."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < IDLE + 500:
        pytest.skip(f"a process may open {files} files here, and Envoy as many")
    before = await gateway.memory()
    others = Bystander(gateway, stream_s=0.5)
    async with others.around():
        idle = [await asyncio.open_connection(*gateway.address) for _ in range(IDLE)]
        await asyncio.sleep(0.5)
        during = await gateway.memory()
    assert (during - before) / len(idle) < 20_000
    for _, writer in idle:
        writer.close()
    assert others.was_served(), others.answers


async def test_slow_headers_of_many_are_given_up_together(gateway: Running) -> None:
    """Five hundred clients send a header a second each; all are answered 408 in the end."""
    others = Bystander(gateway, stream_s=2.0)

    async def loris() -> bytes:
        reader, writer = await asyncio.open_connection(*gateway.address)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n")
        answer = asyncio.create_task(reader.read(4096))
        with contextlib.suppress(ConnectionError):
            while not (await asyncio.wait({answer}, timeout=1.0))[0]:
                writer.write(b"x: y\r\n")
                await writer.drain()
        writer.close()
        return (await answer)[:13]

    async with others.around():
        told = Counter(await asyncio.gather(*(loris() for _ in range(500))))
    assert set(told) == {b"HTTP/1.1 408 "}
    assert others.was_served(), others.answers
    assert others.peak < LIMIT_MB * MIB


async def test_header_bombs_are_refused_as_they_come(gateway: Running) -> None:
    """Two hundred requests with megabytes of headers: 431, and hardly any memory."""
    bomb = b"GET / HTTP/1.1\r\nhost: a\r\n" + b"".join(b"x%d: " % n + b"y" * 1000 + b"\r\n" for n in range(2000))
    before = await gateway.memory()
    others = Bystander(gateway, stream_s=0.5)
    async with others.around():
        told = Counter([(await gateway.raw(bomb))[:13] for _ in range(200)])
    # Envoy closes while the client still sends; then the answer may be lost on its way.
    assert set(told) <= {b"HTTP/1.1 431 ", b""}
    assert others.was_served(), others.answers
    assert others.peak < before + 50 * MIB


async def test_gzip_bombs_are_stopped_at_the_limit(gateway: Running) -> None:
    """Twenty bodies of 64 KiB that unpack to 64 MiB each: 413, or 503 while others hold the memory."""
    bomb = gzip.compress(bytes(64 * MIB))
    others = Bystander(gateway, stream_s=0.5)
    async with others.around():
        for _ in range(5):
            answers = await asyncio.gather(
                *(gateway.ask(body=bomb, headers={"content-encoding": "gzip"}) for _ in range(4))
            )
            assert {answer.status for answer in answers} <= {413, 503}
            assert all(answer.reason in {"body_too_large", "gateway_full"} for answer in answers)
    assert others.peak < (LIMIT_MB + 4 * 33) * MIB
    assert set(others.answers) <= {(200, ""), (503, "gateway_full")}


class Http2:
    """One connection by prior knowledge."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.h2 = h2.connection.H2Connection()
        self.h2.initiate_connection()
        self.ended: Counter[str] = Counter()
        self.closed = False

    def ask(self, stream: int, *headers: tuple[str, str], end: bool = True) -> None:
        """Send the headers of a request."""
        pseudo = [(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/v1/models")]
        self.h2.send_headers(stream, [*pseudo, *headers], end_stream=end)

    async def hear(self, streams: int) -> None:
        """Send what waits, and listen until so many streams are over, or the connection is."""
        self._writer.write(self.h2.data_to_send())
        while sum(self.ended.values()) < streams:
            try:
                data = await self._reader.read(1 << 20)
            except ConnectionError:
                data = b""
            if not data:
                self.closed = True
                return
            for event in self.h2.receive_data(data):
                if isinstance(event, h2.events.ResponseReceived):
                    self.ended[dict(event.headers or ())[b":status"].decode()] += 1
                elif isinstance(event, h2.events.StreamReset):
                    self.ended["reset"] += 1
                elif isinstance(event, h2.events.ConnectionTerminated):
                    self.closed = True
                    return
            self._writer.write(self.h2.data_to_send())

    def close(self) -> None:
        """Leave."""
        self._writer.close()


@contextlib.asynccontextmanager
async def http2(running: Running) -> AsyncIterator[Http2]:
    """A connection, closed at the end."""
    connection = Http2(*await asyncio.open_connection(*running.address))
    try:
        yield connection
    finally:
        connection.close()


async def test_a_thousand_streams_of_one_connection_are_served(gateway: Running) -> None:
    """As many as Envoy admits at once; none is lost."""
    async with http2(gateway) as connection:
        await connection.hear(0)
        for number in range(1000):
            connection.ask(2 * number + 1)
        await connection.hear(1000)
        assert connection.ended == {"200": 1000}


async def test_a_small_frame_that_unpacks_to_large_headers_is_refused(gateway: Running) -> None:
    """HPACK names a long header again and again in a byte each: that counts at its full length."""
    async with http2(gateway) as connection:
        connection.h2.encoder.header_table_size = 65_536
        connection.ask(1, *[("x-long", "y" * 4000)] * 90)
        await connection.hear(1)
        assert connection.closed or set(connection.ended) <= {"431", "reset"}
    assert (await gateway.ask()).status == 200


async def test_streams_that_are_reset_at_once_end_the_connection(gateway: Running) -> None:
    """Requests that are taken back as soon as they are made cost the server more than the client."""
    others = Bystander(gateway, stream_s=1.0)
    async with others.around(), http2(gateway) as connection:
        for number in range(3000):
            connection.ask(2 * number + 1, end=False)
            connection.h2.reset_stream(2 * number + 1)
        await connection.hear(3000)
        assert connection.closed
    assert others.was_served(), others.answers

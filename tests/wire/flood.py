"""Clients that send half a body each and stall: a process of its own, so the parts under test keep their event loop.

    python -m tests.wire.flood http1 127.0.0.1 8080 1000 1048576

Prints as JSON, at the end, how many were answered with which status and reason.
"""

import asyncio
import contextlib
import json
import resource
import sys
from collections import Counter

import h2.connection
import h2.events
import h2.exceptions

PATH = "/v1/chat/completions"
_CHUNK = 16_384
_STREAMS = 500
"""Streams of one HTTP/2 connection."""
_AT_ONCE = 50


class Flood:
    """So many requests, each with `size` bytes of a body of twice that."""

    def __init__(self, host: str, port: int, size: int) -> None:
        self._at = (host, port)
        self._size = size
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self.ended: Counter[str] = Counter()

    async def http1(self) -> None:
        """One request on a connection of its own."""
        try:
            async with self._gate:
                reader, writer = await asyncio.open_connection(*self._at)
                length = 2 * self._size
                writer.write(f"POST {PATH} HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n".encode())
                for _ in range(0, self._size, _CHUNK):
                    writer.write(bytes(_CHUNK))
                    await writer.drain()
            head = await reader.read(_CHUNK)
            self.ended[_told(head)] += 1
            writer.close()
        except OSError as error:
            self.ended[type(error).__name__] += 1

    async def http2(self, streams: int) -> None:
        """So many requests on one connection."""
        reader, writer = await asyncio.open_connection(*self._at)
        connection = h2.connection.H2Connection()
        connection.initiate_connection()
        head = [(":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", PATH)]
        left = dict.fromkeys(range(1, 2 * streams, 2), self._size)
        for stream in left:
            connection.send_headers(stream, head)
        open_streams = set(left)
        while open_streams:
            for stream in [each for each in left if each in open_streams]:
                with contextlib.suppress(h2.exceptions.ProtocolError):
                    while left[stream] and (
                        room := min(connection.local_flow_control_window(stream), _CHUNK, left[stream])
                    ):
                        connection.send_data(stream, bytes(room))
                        left[stream] -= room
                if not left[stream]:
                    del left[stream]
            writer.write(connection.data_to_send())
            try:
                await writer.drain()
                data = await reader.read(1 << 20)
            except ConnectionError:
                data = b""
            if not data:
                self.ended["closed"] += len(open_streams)
                return
            self._take(connection.receive_data(data), open_streams)
        writer.close()

    def _take(self, events: list[h2.events.Event], open_streams: set[int]) -> None:
        for event in events:
            if isinstance(event, h2.events.ResponseReceived):
                told = dict(event.headers or ())
                status, reason = told[b":status"].decode(), told.get(b"x-warmpath-reason", b"").decode()
                self.ended[f"{status} {reason}".strip()] += 1
                open_streams.discard(event.stream_id or 0)
            elif isinstance(event, h2.events.StreamReset) and event.stream_id in open_streams:
                self.ended["reset"] += 1
                open_streams.discard(event.stream_id)


def _told(head: bytes) -> str:
    status = head[9:12].decode() or "closed"
    _, found, rest = head.partition(b"x-warmpath-reason: ")
    reason = rest.partition(b"\r\n")[0].decode()
    return f"{status} {reason}" if found else status


async def main(kind: str, host: str, port: int, count: int, size: int) -> None:
    """Flood until everything was answered."""
    flood = Flood(host, port, size)
    if kind == "http1":
        tasks = [asyncio.create_task(flood.http1()) for _ in range(count)]
    else:
        parts = [min(_STREAMS, count - at) for at in range(0, count, _STREAMS)]
        tasks = [asyncio.create_task(flood.http2(streams)) for streams in parts]
    await asyncio.gather(*tasks)
    print(json.dumps(flood.ended), flush=True)


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(main(sys.argv[1], sys.argv[2], *(int(each) for each in sys.argv[3:6])))

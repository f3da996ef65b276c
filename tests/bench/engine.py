"""A stand-in for engines that costs next to nothing, with real answers: `python -m tests.bench.engine --ports 16`.

It prints its addresses as one JSON list and answers at once: a chat completion with `usage`; a stream of N events,
one every two milliseconds, when the request carries the header `x-bench-chunks: N`; on the paths given (`--page
PATH=FILE`) the files given.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import httptools
import uvloop

_SPACING_S = 0.002
_USAGE = {"prompt_tokens": 256, "completion_tokens": 8, "total_tokens": 264}
_DETAILS = {"prompt_tokens_details": {"cached_tokens": 128}}
_HEAD = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
_ANSWER = json.dumps(
    _HEAD
    | {"choices": [{"index": 0, "message": {"role": "assistant", "content": "tok " * 8}, "finish_reason": "stop"}]}
    | {"usage": _USAGE | _DETAILS}
).encode()


def _event(value: dict[str, object]) -> bytes:
    data = b"data: " + json.dumps(value).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


_CHUNK = _HEAD | {"object": "chat.completion.chunk"}
_PIECE = _event(_CHUNK | {"choices": [{"index": 0, "delta": {"content": "tok "}, "finish_reason": None}]})
_LAST = _event(_CHUNK | {"choices": [], "usage": _USAGE | _DETAILS}) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _plain(body: bytes, kind: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(body), body)


class _Connection(asyncio.Protocol):
    """One connection; requests come one after the other."""

    def __init__(self, pages: Mapping[bytes, bytes]) -> None:
        self._pages = pages
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._path = b""
        self._chunks = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._chunks = 0

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-bench-chunks":
            self._chunks = int(value)

    def on_message_complete(self) -> None:
        if self._transport is None:
            return
        if self._chunks:
            self._transport.write(_STREAM_HEAD)
            self._stream(self._chunks)
        elif self._path in self._pages:
            self._transport.write(_plain(self._pages[self._path], b"text/plain; version=0.0.4"))
        else:
            self._transport.write(_plain(_ANSWER, b"application/json"))

    def _stream(self, left: int) -> None:
        if self._transport is None:
            return
        self._transport.write(_PIECE if left else _LAST)
        if left:
            asyncio.get_running_loop().call_later(_SPACING_S, self._stream, left - 1)


async def _serve(ports: int, pages: Mapping[bytes, bytes]) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: _Connection(pages), "127.0.0.1", 0) for _ in range(ports)]
    addresses = [f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    sys.stdout.write(json.dumps(addresses) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main() -> None:
    """Serve until terminated."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--ports", type=int, default=1)
    parser.add_argument("--page", action="append", default=[], metavar="PATH=FILE")
    arguments = parser.parse_args()
    given = (page.rpartition("=") for page in arguments.page)
    pages = {path.encode(): Path(file).read_bytes() for path, _, file in given}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(arguments.ports, pages))


if __name__ == "__main__":
    main()

"""An engine that misbehaves as it is told: vLLM's routes on a raw socket, with silence, slowness, errors and cuts.

What it does with a request stands in `BadEngine.behave`, or for one request in the header `x-test-behave`: JSON with
the fields of `Behave`. Its text is that of `tests.greedy`: any of these engines continues an answer as another would.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec

from tests.greedy import MODEL, about, answer_of, event, prompt_of, usage
from tests.ports import free_port
from tests.raw_http import Received, read_request, reset_on_close, write_head

HEADER = "x-test-behave"
"""Request header with a `Behave` as JSON."""

_LINE_LIMIT = 1 << 20
_ERRORS = {400: "BadRequestError", 429: "RateLimitError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


class Behave(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to do with a request; by default what a healthy engine does.

    Attributes:
        at: addresses of the engines that do so, others are healthy; empty for all.
        silent: read the request and never answer.
        hang_up: read the request and close the connection before any byte, as `how` says.
        garbage: answer with bytes that are not HTTP, and close.
        status: HTTP status; other than 200 with an error as vLLM writes it.
        retry_after: value of that header on errors; empty for none.
        headers_s: silence before the headers.
        first_s: silence between the headers of a stream and its first token; before an answer that is not streamed.
        gap_s: silence between two tokens of a stream, and per token before an answer that is not streamed.
        stall_after: tokens of a stream after which nothing comes any more, nor an end.
        cut_at: bytes of the body after which the connection closes, as `how` says. 0 is after the headers.
        how: `reset` sends RST, `close` sends FIN; `end` ends a stream in good order before, as if it were whole.
        length_off: `content-length` of an answer that is not streamed tells so many bytes more than there are; then
            the connection closes.
        tokens: length of the answer, whatever the request asks.
    """

    at: tuple[str, ...] = ()
    silent: bool = False
    hang_up: bool = False
    garbage: bool = False
    status: int = 200
    retry_after: str = ""
    headers_s: float = 0.0
    first_s: float = 0.0
    gap_s: float = 0.0
    stall_after: int | None = None
    cut_at: int | None = None
    how: Literal["reset", "close", "end"] = "reset"
    length_off: int = 0
    tokens: int | None = None

    def header(self) -> dict[str, str]:
        """The request header that asks for this."""
        return {HEADER: msgspec.json.encode(self).decode()}


class _Gone(Exception):  # noqa: N818  # no error: the client left, or the connection was cut as told
    """Nothing more can be sent."""


class BadEngine:
    """One engine; use it with `async with`, or `start` and `stop`.

    Attributes:
        address: `ip:port`.
        behave: what it does with requests that do not say so themselves.
        healthy: whether `/health` answers 200; 503 otherwise.
        received: generation requests in the order they came.
    """

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.behave = Behave()
        self.healthy = True
        self.received: list[Received] = []
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "BadEngine":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, on the same port as before."""
        host, _, port = self.address.rpartition(":")
        self._server = await asyncio.start_server(self._serve, host, int(port), limit=_LINE_LIMIT)

    async def stop(self) -> None:
        """Refuse connections from now on, and reset those that are open, as a killed process does."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for task in tuple(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """Refuse connections for a while."""
        await self.stop()
        try:
            yield
        finally:
            await self.start()

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return sum(not each.done for each in self.received)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            while await self._answer(reader, writer):
                pass
        except (_Gone, ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            # Ended by `stop`: the stream protocol would log a cancelled handler as an error.
            reset_on_close(writer)
        finally:
            writer.transport.abort()
            self._open.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer the next request of a connection; returns whether another may follow."""
        request = await read_request(reader)
        if request is None:
            return False
        path = request.path.partition("?")[0]
        if path in ("/v1/chat/completions", "/v1/completions"):
            self.received.append(request)
            behave = self._behaviour(request)
            sender = _Sender(reader, writer, request, behave)
            try:
                await _generate(sender, request, behave)
            finally:
                request.done = True
            return not behave.length_off
        status, kind, body = self._page(path)
        write_head(writer, status, {"content-type": kind, "content-length": str(len(body))})
        writer.write(body)
        await writer.drain()
        return True

    def _behaviour(self, request: Received) -> Behave:
        told = request.headers.get(HEADER)
        behave = msgspec.json.decode(told, type=Behave) if told else self.behave
        return behave if not behave.at or self.address in behave.at else Behave()

    def _page(self, path: str) -> tuple[int, str, bytes]:
        if path == "/health":
            return (200 if self.healthy else 503), "text/plain", b""
        if path == "/metrics":
            return 200, "text/plain", _metrics(self.running)
        if path == "/v1/models":
            card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "vllm", "root": MODEL, "parent": None}
            return 200, "application/json", json.dumps({"object": "list", "data": [card]}).encode()
        if path == "/version":
            return 200, "application/json", b'{"version":"0.32.0"}'
        return 404, "application/json", b'{"detail":"Not Found"}'


class _Sender:
    """Writes one answer, byte by byte as told; every wait ends when the client leaves."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Received, behave: Behave
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._request = request
        self._behave = behave
        self.chunked = False

    async def wait(self, seconds: float | None) -> None:
        """Send nothing for so long; None for ever. Raises _Gone as soon as the client closes."""
        if seconds == 0.0:
            return
        left = asyncio.ensure_future(self._reader.read(1))
        try:
            done, _ = await asyncio.wait({left}, timeout=seconds)
        finally:
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
        if done:
            self._request.left = True
            raise _Gone

    def head(self, status: int, headers: dict[str, str]) -> None:
        """Send status and headers; without a length the body goes in chunks."""
        self.chunked = "content-length" not in headers
        more = {"transfer-encoding": "chunked"} if self.chunked else {}
        write_head(self._writer, status, {**headers, **more})

    async def body(self, piece: bytes) -> None:
        """Send a piece of the body, or as much as may be sent of it. Raises _Gone after the cut."""
        cut = self._behave.cut_at
        room = len(piece) if cut is None else cut - self._request.sent
        part = piece[: max(0, room)]
        self._request.sent += len(part)
        if part:
            self._writer.write(b"%x\r\n%s\r\n" % (len(part), part) if self.chunked else part)
        try:
            await self._writer.drain()
        except ConnectionError:
            self._request.left = True
            raise _Gone from None
        if room < len(piece) or (cut is not None and room == len(piece)):
            await self.cut()

    async def raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    async def end(self) -> None:
        """The answer is complete."""
        if self.chunked:
            await self.raw(b"0\r\n\r\n")

    async def cut(self) -> None:
        """Close the connection. Raises _Gone."""
        await self._writer.drain()
        if self._behave.how == "end":
            await self.end()
        if self._behave.how == "reset":
            # A reset overtakes what is still in the buffers, and the cut would be earlier than told.
            await asyncio.sleep(0.05)
            reset_on_close(self._writer)
        raise _Gone


async def _generate(sender: _Sender, request: Received, behave: Behave) -> None:
    if behave.silent:
        await sender.wait(None)
    if behave.hang_up:
        await sender.cut()
    if behave.garbage:
        await sender.raw(b"\x00\xffnot HTTP at all\x80\r\n\r\n")
        await sender.cut()
    await sender.wait(behave.headers_s)
    if behave.status != 200:
        await _refuse(sender, behave.status, behave.retry_after)
        return
    try:
        body: dict[str, Any] = json.loads(request.body)
        chat = "messages" in body
        text = prompt_of(body)
    except (ValueError, KeyError, TypeError, AttributeError):
        await _refuse(sender, 400, "")
        return
    pieces, reason = answer_of(body, text, behave.tokens)
    if body.get("stream"):
        await _stream(sender, request, behave, chat=chat, body=body, answer=(text, pieces, reason))
        return
    await sender.wait(behave.first_s + behave.gap_s * len(pieces))
    said = "".join(pieces)
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": said}} if chat else {"text": said}
    whole = json.dumps({**about(chat=chat, stream=False), "choices": [choice], "usage": usage(text, pieces)}).encode()
    length = len(whole) + behave.length_off
    sender.head(200, {"content-type": "application/json", "content-length": str(length)})
    request.tokens = len(pieces)
    await sender.body(whole)


async def _stream(
    sender: _Sender,
    request: Received,
    behave: Behave,
    *,
    chat: bool,
    body: dict[str, Any],
    answer: tuple[str, list[str], str],
) -> None:
    text, pieces, reason = answer
    head = about(chat=chat, stream=True)
    sender.head(200, {"content-type": "text/event-stream; charset=utf-8"})
    await sender.wait(behave.first_s)
    for at, piece in enumerate(pieces):
        if behave.stall_after == at:
            await sender.wait(None)
        if at:
            await sender.wait(behave.gap_s)
        choice: dict[str, Any] = {"index": 0, "logprobs": None}
        choice["finish_reason"] = reason if at == len(pieces) - 1 else None
        choice |= {"delta": {"content": piece}} if chat else {"text": piece}
        opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        events = [{**head, "choices": [opening]}] if chat and not at else []
        await sender.body(b"".join(map(event, [*events, {**head, "choices": [choice]}])))
        request.tokens += 1
    if behave.stall_after == len(pieces):
        await sender.wait(None)
    if (body.get("stream_options") or {}).get("include_usage"):
        await sender.body(event({**head, "choices": [], "usage": usage(text, pieces)}))
    await sender.body(b"data: [DONE]\n\n")
    await sender.end()


async def _refuse(sender: _Sender, status: int, retry_after: str) -> None:
    error = {"message": f"told to answer {status}", "type": _ERRORS.get(status, "Error"), "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    more = {"retry-after": retry_after} if retry_after else {}
    sender.head(status, {"content-type": "application/json", "content-length": str(len(body)), **more})
    await sender.body(body)


def _metrics(running: int) -> bytes:
    """What the keeper reads of vLLM 0.32."""
    labels = f'engine="0",model_name="{MODEL}"'
    config = f'{labels},block_size="16",num_gpu_blocks="10000",enable_prefix_caching="True"'
    gauges = {
        f"vllm:num_requests_running{{{labels}}}": running,
        f"vllm:num_requests_waiting{{{labels}}}": 0,
        f"vllm:kv_cache_usage_perc{{{labels}}}": 0,
        f"vllm:cache_config_info{{{config}}}": 1,
    }
    return "".join(f"{name} {float(value)}\n" for name, value in gauges.items()).encode()

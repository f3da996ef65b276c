"""Asking a real HTTP server for a page: whatever it answers is a page, or an error that says what is wrong."""

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest

from extproc.engines.adapter import MAX_PAGE_BYTES
from extproc.errors import EngineError
from extproc.fleet.asking import fetch, new_session
from tests.ports import free_port

PAGE = b"vllm:num_requests_running 1\n"


class Server:
    """Answers every request with the same bytes, and closes."""

    def __init__(self) -> None:
        self.answer = b""
        self.head = b""
        self.address = ""
        self.stays = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.head = await reader.readuntil(b"\r\n\r\n")
        writer.write(self.answer)
        await writer.drain()
        if self.stays:
            await reader.read()
        writer.close()

    def say(self, body: bytes = PAGE, status: str = "200 OK", length: int | None = None, **headers: str) -> None:
        """Answer so from now on."""
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.answer = "\r\n".join([*lines, "", ""]).encode() + body


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server on a free port."""
    made = Server()
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening:
        yield made


@pytest.fixture
async def ask(server: Server) -> AsyncIterator[Callable[[], Awaitable[bytes]]]:
    """Fetches a page of the server."""
    async with new_session("keeper") as session:
        yield lambda: fetch(session, server.address, "/v1/loads?include=core")


Ask = Callable[[], Awaitable[bytes]]


async def fault_of(ask: Ask) -> str:
    """What is wrong with the page."""
    with pytest.raises(EngineError) as caught:
        await ask()
    return caught.value.fault


async def test_a_page_is_asked_for_as_it_is(server: Server, ask: Ask) -> None:
    """With its query, uncompressed, and by a name that an engine may log."""
    server.say()
    assert await ask() == PAGE
    lines = server.head.decode().split("\r\n")
    assert lines[0] == "GET /v1/loads?include=core HTTP/1.1"
    assert "Accept-Encoding: identity" in lines
    assert "User-Agent: warmpath-keeper/keeper" in lines


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(PAGE, mtime=0)),
        ("GZIP", gzip.compress(PAGE, mtime=0)),
        ("deflate", zlib.compress(PAGE)),
        ("identity", PAGE),
    ],
)
async def test_a_page_that_is_compressed_all_the_same_is_read(
    server: Server, ask: Ask, encoding: str, body: bytes
) -> None:
    """Some proxies do not ask what is accepted."""
    server.say(body, Content_Encoding=encoding)
    assert await ask() == PAGE


@pytest.mark.parametrize(
    ("encoding", "body", "fault"),
    [
        ("br", b"\x0b\x02\x80hello\x03", "encoding"),
        ("gzip", PAGE, "encoding"),
        ("gzip", gzip.compress(PAGE, mtime=0)[:-9], "encoding"),
        ("gzip", b"", "encoding"),
        ("gzip", gzip.compress(b"#" * (MAX_PAGE_BYTES + 1)), "too_long"),
    ],
)
async def test_a_page_whose_compression_cannot_be_undone_is_refused(
    server: Server, ask: Ask, encoding: str, body: bytes, fault: str
) -> None:
    """Unknown ones, broken ones, and those that would fill the memory."""
    server.say(body, Content_Encoding=encoding)
    assert await fault_of(ask) == fault


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        ("404 Not Found", "not_found"),
        ("401 Unauthorized", "forbidden"),
        ("403 Forbidden", "forbidden"),
        ("500 Internal Server Error", "status"),
        ("204 No Content", "status"),
        ("302 Found", "redirect"),
        ("308 Permanent Redirect", "redirect"),
    ],
)
async def test_another_status_is_no_page(server: Server, ask: Ask, status: str, fault: str) -> None:
    """Redirects are not followed: behind one stands something else than what is configured."""
    server.say(b"", status=status, Location="/elsewhere")
    assert await fault_of(ask) == fault


@pytest.mark.parametrize("kind", ["text/html", "TEXT/HTML; charset=utf-8", "application/xhtml+xml"])
async def test_an_html_page_is_refused(server: Server, ask: Ask, kind: str) -> None:
    """A login page or a proxy's own, sent with status 200."""
    server.say(b"<html></html>", Content_Type=kind)
    assert await fault_of(ask) == "content_type"


@pytest.mark.parametrize("kind", ["text/plain", "application/json", "application/octet-stream", ""])
async def test_other_types_are_left_to_the_reader(server: Server, ask: Ask, kind: str) -> None:
    """Proxies and exporters get the type of a page wrong."""
    server.say(Content_Type=kind)
    assert await ask() == PAGE


async def test_a_page_over_the_cap_is_refused(server: Server, ask: Ask) -> None:
    """It is not read to its end."""
    server.say(b"#" * (MAX_PAGE_BYTES + 1))
    assert await fault_of(ask) == "too_long"


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf", b"SSH-2.0-OpenSSH\r\n\r\n"]
)
async def test_a_connection_that_breaks_brings_no_page(server: Server, ask: Ask, answer: bytes) -> None:
    """Closed at once, in the middle of the page, or speaking something else."""
    server.answer = answer
    assert await fault_of(ask) == "broken"


async def test_a_page_that_does_not_come_is_silence(server: Server) -> None:
    """The connection stands, and nothing is said."""
    server.stays = True
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(sock_read=0.05)) as session:
        assert await fault_of(lambda: fetch(session, server.address, "/metrics")) == "silent"


async def test_nobody_listens() -> None:
    """A refused connection."""
    async with new_session("keeper") as session:
        assert await fault_of(lambda: fetch(session, f"127.0.0.1:{free_port()}", "/metrics")) == "unreachable"

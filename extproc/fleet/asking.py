"""Asking one engine for a page over HTTP."""

import zlib
from typing import Final

import aiohttp

from extproc.engines.adapter import MAX_PAGE_BYTES, Fault
from extproc.errors import EngineError

CONNECT_S: Final = 1.0
ANSWER_S: Final = 2.0
"""vLLM answers in 15 to 60 ms while it serves; a page that takes longer than this is not worth waiting for."""

_STATUS_FAULTS: Final[dict[int, Fault]] = {401: "forbidden", 403: "forbidden", 404: "not_found"}
_PLAIN: Final = frozenset({"", "identity"})
_ZLIB: Final = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def new_session(keeper: str) -> aiohttp.ClientSession:
    """A client that keeps one connection to each endpoint open between rounds.

    Idle connections are dropped after 4 s, before vLLM drops them after 5 s, so that no scrape meets a connection
    that is being closed.

    Args:
        keeper: id of the keeper, which engines may log.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=CONNECT_S + ANSWER_S, sock_connect=CONNECT_S, sock_read=ANSWER_S),
        auto_decompress=False,
        headers={
            "Accept": "text/plain; version=0.0.4, application/json",
            "Accept-Encoding": "identity",
            "User-Agent": f"warmpath-keeper/{keeper}",
        },
    )


async def fetch(session: aiohttp.ClientSession, destination: str, path: str) -> bytes:
    """The body of a page, at most a little more than `MAX_PAGE_BYTES` of it.

    Args:
        session: see `new_session`.
        destination: `ip:port`.
        path: with its leading slash.

    Raises:
        EngineError: the page did not come, or not with status 200, or is no page of an engine.
    """
    try:
        async with session.get(f"http://{destination}{path}", allow_redirects=False) as response:
            _check(response)
            body = await _body(response)
            return _inflated(body, response.headers.get("Content-Encoding", "").strip().lower())
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        raise EngineError("no connection", "unreachable") from None
    except TimeoutError:
        raise EngineError("no answer in time", "silent") from None
    except (aiohttp.ClientError, ValueError) as error:
        # ValueError: headers that no URL or charset can be made of.
        raise EngineError(f"the connection broke: {type(error).__name__}", "broken") from None


def _check(response: aiohttp.ClientResponse) -> None:
    """Refuse an answer by its head."""
    if 300 <= response.status < 400:
        raise EngineError("a redirect, which is not followed", "redirect")
    if response.status != 200:
        raise EngineError(f"HTTP status {response.status}", _STATUS_FAULTS.get(response.status, "status"))
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind in {"text/html", "application/xhtml+xml"}:
        raise EngineError("an HTML page", "content_type")


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """The whole body, or as much as shows that it is too long."""
    chunks = bytearray()
    async for chunk in response.content.iter_any():
        chunks += chunk
        if len(chunks) > MAX_PAGE_BYTES:
            response.close()
            raise EngineError(f"the page is longer than {MAX_PAGE_BYTES} bytes", "too_long")
    return bytes(chunks)


def _inflated(body: bytes, encoding: str) -> bytes:
    """A body without its compression, which was not asked for: some proxies compress all the same."""
    if encoding in _PLAIN:
        return body
    if encoding not in _ZLIB:
        raise EngineError("the page is compressed, which was not asked for", "encoding")
    inflater = zlib.decompressobj(_ZLIB[encoding])
    try:
        page = inflater.decompress(body, MAX_PAGE_BYTES + 1)
    except zlib.error:
        raise EngineError("the page's compression is broken", "encoding") from None
    if len(page) > MAX_PAGE_BYTES:
        raise EngineError(f"the page is longer than {MAX_PAGE_BYTES} bytes", "too_long")
    if not inflater.eof:
        raise EngineError("the page's compression is broken", "encoding")
    return page

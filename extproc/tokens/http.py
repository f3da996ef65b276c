"""Asking an engine or a render server over HTTP."""

import asyncio
import functools
import zlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, ParamSpec, TypeVar

import aiohttp
import msgspec

from extproc.tokens.values import NoTokensError, Why

P = ParamSpec("P")
T = TypeVar("T")

CONNECT_S: Final = 0.5
TOTAL_S: Final = 2.0
"""Far beyond any budget: what comes later is of no use to the next turn either."""
_MAX_ANSWER_BYTES: Final = 32 << 20
"""Three million ids of ten digits and a comma."""
_LEAST_ANSWER_BYTES: Final = 1 << 20
_ANSWER_BYTES_A_BYTE: Final = 16
"""A prompt has no more tokens than bytes, but for what its template adds. Millions of ids for a short one would only
keep this process from its other work: 10 million take 0.2 s to read."""
_PLAIN: Final = frozenset({"", "identity"})
_ZLIB: Final = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class Answer(msgspec.Struct, frozen=True):
    """What a server said: its HTTP status and, of a 200, the body."""

    status: int
    body: bytes


def new_session(replica: str) -> aiohttp.ClientSession:
    """A client that keeps connections for 4 s, less than the 5 s after which vLLM drops them.

    Args:
        replica: id of this process, which servers may log.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=64, keepalive_timeout=4.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=TOTAL_S, sock_connect=CONNECT_S),
        auto_decompress=False,  # it would inflate in the event loop, up to a thousandfold
        headers={
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "User-Agent": f"warmpath/{replica}",
        },
    )


class Client:
    """Posts to servers of one kind, and prepares and reads what is sent in threads.

    Args:
        session: HTTP client.
        threads: where bodies are written and read.
    """

    def __init__(self, session: aiohttp.ClientSession, threads: Executor) -> None:
        self._session = session
        self._threads = threads

    async def apart(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run something in a thread: reading 32,000 ids takes a millisecond that no other request should wait."""
        call = functools.partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def post(self, url: str, body: bytes, too_long: Why = Why.FAILED) -> Answer:
        """Send a JSON body.

        Args:
            url: where to.
            body: what.
            too_long: what it means when the server sends more than any ids take.

        Raises:
            NoTokensError: the server cannot be reached, takes too long, breaks off, or sends too much.
        """
        most = min(_MAX_ANSWER_BYTES, _LEAST_ANSWER_BYTES + _ANSWER_BYTES_A_BYTE * len(body))
        try:
            async with self._session.post(url, data=body, allow_redirects=False) as response:
                if response.status != 200:
                    return Answer(response.status, b"")
                found = bytearray()
                async for chunk in response.content.iter_any():
                    found += chunk
                    if len(found) > most:
                        raise NoTokensError(too_long)
                encoding = response.headers.get("Content-Encoding", "").strip().lower()
                plain = bytes(found) if encoding in _PLAIN else await self.apart(_inflated, found, encoding, most)
                return Answer(response.status, plain)
        except (aiohttp.ClientError, TimeoutError, OSError):
            raise NoTokensError(Why.FAILED) from None


def _inflated(body: bytearray, encoding: str, most: int) -> bytes:
    """A body without its compression, which was not asked for: some proxies compress all the same."""
    if encoding not in _ZLIB:
        raise NoTokensError(Why.FAILED)
    inflater = zlib.decompressobj(_ZLIB[encoding])
    try:
        plain = inflater.decompress(body, most + 1)
    except zlib.error:
        raise NoTokensError(Why.FAILED) from None
    if len(plain) > most or not inflater.eof:
        raise NoTokensError(Why.FAILED)
    return plain

"""Asking an engine or a render server over HTTP."""

import asyncio
import functools
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

    async def post(self, url: str, body: bytes) -> Answer:
        """Send a JSON body.

        Raises:
            NoTokensError: the server cannot be reached, takes too long, breaks off, or sends more than any ids take.
        """
        try:
            async with self._session.post(url, data=body, allow_redirects=False) as response:
                if response.status != 200:
                    return Answer(response.status, b"")
                found = bytearray()
                async for chunk in response.content.iter_any():
                    found += chunk
                    if len(found) > _MAX_ANSWER_BYTES:
                        raise NoTokensError(Why.FAILED)
                return Answer(response.status, bytes(found))
        except (aiohttp.ClientError, TimeoutError, OSError):
            raise NoTokensError(Why.FAILED) from None

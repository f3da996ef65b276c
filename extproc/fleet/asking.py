"""Asking one engine for its numbers over HTTP."""

from typing import Final

import aiohttp

from extproc.engines.adapter import MAX_PAGE_BYTES, Adapter
from extproc.errors import EngineError
from extproc.fleet.health import Failure, Outcome

CONNECT_S: Final = 1.0
ANSWER_S: Final = 2.0
"""vLLM answers in 15 to 60 ms while it serves; a page that takes longer than this is not worth waiting for."""


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
        headers={
            "Accept": "text/plain; version=0.0.4",
            "Accept-Encoding": "identity",
            "User-Agent": f"warmpath-keeper/{keeper}",
        },
    )


async def ask(session: aiohttp.ClientSession, destination: str, adapter: Adapter) -> Outcome:
    """Scrape one endpoint once; never raises but for cancellation."""
    try:
        async with session.get(f"http://{destination}{adapter.metrics_path}", allow_redirects=False) as response:
            if response.status != 200:
                return Failure.UNREADABLE
            return adapter.read(await _body(response))
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        return Failure.UNREACHABLE
    except TimeoutError:
        return Failure.SILENT
    except (aiohttp.ClientError, EngineError):
        return Failure.UNREADABLE


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """The whole body, or as much as shows that it is too long."""
    chunks = bytearray()
    async for chunk in response.content.iter_any():
        chunks += chunk
        if len(chunks) > MAX_PAGE_BYTES:
            response.close()
            break
    return bytes(chunks)

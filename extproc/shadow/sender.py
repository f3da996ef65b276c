"""Sends one request to an engine and keeps its answer. Never through the gateway, and no fault of it is anybody's."""

import contextlib
import io
from collections.abc import Callable, Mapping
from typing import Final

import aiohttp
import msgspec

from extproc.shadow.answer import LONGEST, Collector

CONNECT_S: Final = 1.0
_PASSED: Final = ("content-type", "accept", "anthropic-version", "anthropic-beta")
"""Headers of the client that an engine may need to read the body. Keys, sessions and ids are none of them."""
_AGENT: Final = "warmpath-shadow"


class Letter(msgspec.Struct, frozen=True):
    """One request to an engine.

    Attributes:
        destination: `ip:port`.
        path: with its leading slash and its query.
        headers: see `passed`.
        body: its body.
        timeout_s: longest time that it takes.
    """

    destination: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    timeout_s: float


def passed(headers: Mapping[str, str]) -> dict[str, str]:
    """Of a client's headers, names in lower case, those that the shadow's engine gets."""
    found = {name: headers[name] for name in _PASSED if name in headers}
    return {"content-type": "application/json", **found, "user-agent": _AGENT, "accept-encoding": "identity"}


class Sender:
    """Asks engines; connects when it is first used."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` gives seconds of a clock that never goes back."""
        self._now = now
        self._http: aiohttp.ClientSession | None = None

    async def send(self, letter: Letter, collector: Collector) -> None:
        """Send a request, and give all that comes of it to the collector. Never raises.

        An answer that is longer than is kept is read no further.
        """
        complete = False
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError, ValueError):
            async with self._session().post(
                f"http://{letter.destination}{letter.path}",
                data=io.BytesIO(letter.body),
                headers=letter.headers,
                timeout=aiohttp.ClientTimeout(total=letter.timeout_s, sock_connect=CONNECT_S),
                allow_redirects=False,
            ) as reply:
                told = {name.lower(): value for name, value in reply.headers.items()}
                collector.began(reply.status, told, self._now())
                async for piece in reply.content.iter_any():
                    collector.chunk(piece, self._now())
                    if collector.size > LONGEST:
                        reply.close()
                        break
                else:
                    complete = True
        collector.over(self._now(), complete=complete)

    def session(self) -> aiohttp.ClientSession:
        """Its client, for what else is asked of engines for a comparison."""
        return self._session()

    async def close(self) -> None:
        """Let go of connections."""
        if self._http is not None:
            await self._http.close()

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            # vLLM closes idle connections after 5 s.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
            self._http = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
            )
        return self._http

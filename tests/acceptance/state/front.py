"""An Envoy in front of all replicas, and what its admin page tells of them."""

from collections.abc import Collection, Mapping

import aiohttp

from extproc.config import WORKERS_CLUSTER
from tests.acceptance.local import CHAT, POOL, Answer, ask, chat_body
from tests.waiting import until_async
from tests.wire.envoy import RunningEnvoy


class Front:
    """One Envoy.

    Attributes:
        envoy: the process.
    """

    def __init__(self, envoy: RunningEnvoy, http: aiohttp.ClientSession) -> None:
        self.envoy = envoy
        self._http = http

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        return self.envoy.url

    async def ask(self, body: bytes, headers: Mapping[str, str] | None = None, path: str = CHAT) -> Answer:
        """Send one request. Raises aiohttp.ClientError when there is no whole answer."""
        return await ask(self._http, f"{self.url}{path}", body, headers)

    async def chat(self, prompt: str, session: str = "", **fields: object) -> Answer:
        """Ask one question; `fields` are laid over the body."""
        return await self.ask(chat_body(prompt, **fields), {"x-session-id": session} if session else {})

    async def healthy(self, cluster: str) -> set[str]:
        """Addresses of a cluster that are in use now."""
        start, flags = f"{cluster}::", "::health_flags::"
        lines = [line for line in (await self.envoy.get("/clusters")).splitlines() if flags in line]
        told = [line.removeprefix(start).split(flags) for line in lines if line.startswith(start)]
        return {address for address, flag in told if flag == "healthy"}

    async def knows(self, workers: Collection[str], endpoints: Collection[str]) -> None:
        """Wait until exactly these workers, and at least these endpoints of the first pool, are in use."""

        async def so() -> bool:
            return await self.healthy(WORKERS_CLUSTER) == set(workers) and set(endpoints) <= await self.healthy(POOL)

        await until_async(so)

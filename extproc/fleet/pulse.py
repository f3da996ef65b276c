"""Asks an engine that has just failed a request whether it lives, by its `/health`."""

from typing import Final

import aiohttp

from extproc.errors import EngineError
from extproc.fleet.asking import fetch, new_session

HEALTH_PAGE: Final = "/health"
"""vLLM answers 503 when its engine process is gone, SGLang when it does not generate, TensorRT-LLM with a fatal error;
the HTTP server in front of them goes on in all three."""
_DEAD: Final = frozenset({"unreachable", "status"})


class Pulse:
    """Asks engines for their health; connects when it is first used.

    Args:
        asker: id of the process, which engines may log.
    """

    def __init__(self, asker: str) -> None:
        self._asker = asker
        self._session: aiohttp.ClientSession | None = None

    async def dead(self, destination: str) -> bool:
        """Whether nothing listens there any more, or its health page says that it is ill; silence is no answer.

        Args:
            destination: `ip:port`.
        """
        if self._session is None:
            self._session = new_session(self._asker)
        try:
            await fetch(self._session, destination, HEALTH_PAGE)
        except EngineError as error:
            return error.fault in _DEAD
        return False

    async def close(self) -> None:
        """Let go of connections."""
        if self._session is not None:
            await self._session.close()

"""Follows the file of API keys: a good change is taken, a bad one is refused and said."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from extproc.envoy import api_keys
from extproc.errors import ConfigError

_EVERY_S = 0.5

log = logging.getLogger(__name__)


class KeyFile:
    """The keys that are known now. Content is compared, not time: some file systems and mounts keep times coarse."""

    def __init__(self, path: Path | None, told: Callable[[int], None] = lambda _keys: None) -> None:
        """Nothing is read yet.

        Args:
            path: the file; None when nobody needs a key.
            told: takes the number of keys each time that they were read.
        """
        self._path = path
        self._told = told
        self._seen: bytes | None = None
        self._complaint = ""
        self._clients: Mapping[bytes, str] = {}

    def clients(self) -> Mapping[bytes, str]:
        """Clients by the digest of their keys."""
        return self._clients

    async def run(self) -> None:
        """Look twice a second until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_EVERY_S)

    async def look(self) -> None:
        """Take the file's content if it changed and is good; otherwise what was known stays known."""
        if self._path is None:
            return
        try:
            content = await asyncio.to_thread(self._path.read_bytes)
            if content == self._seen:
                return
            # A large file takes a while: not in the event loop, where requests wait.
            clients = await asyncio.to_thread(api_keys.parse, content, self._path)
        except OSError as error:
            self._complain(f"{self._path}: cannot be read ({error.strerror})")
            return
        except ConfigError as error:
            self._complain(str(error))
            return
        self._seen, self._complaint, self._clients = content, "", clients
        self._told(len(clients))
        log.info("the file of keys is in use", extra={"keys": len(clients)})

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            log.error("the file of keys is refused, the keys known before stay", extra={"error": text})
        self._complaint = text

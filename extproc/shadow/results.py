"""Where results go, and where they are read: records of the store, or files in a folder."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Final, Protocol

from extproc.config_rollouts import Shadow
from extproc.errors import StoreError
from extproc.shadow.folder import Folder, Read
from extproc.shadow.result import Result, decode, encode

GROUP: Final = "shadow"
"""Group of the store's records; each model has its own."""
_PAGE: Final = 500
_CLOCKS_S: Final = 60.0
"""How far the store's clock, which dates records, may be behind that of a worker, which dates requests."""
_LONGEST_MS: Final = 1e13
"""Three hundred years: `keep_s` may be endless, a number of the store may not."""


class Entry(Protocol):
    """A record of the store."""

    @property
    def id(self) -> str:
        """Its place in their order: milliseconds since the epoch when it was written, a hyphen and a number."""
        ...

    @property
    def payload(self) -> bytes:
        """Its bytes."""
        ...


class Records(Protocol):
    """The verbs of the store that results need."""

    async def record(self, group: str, name: str, payload: bytes, cap: int, keep_ms: int) -> str:
        """Add a record. Raises StoreError."""
        ...

    async def records(self, group: str, name: str, limit: int, before: str = "") -> Sequence[Entry]:
        """The newest records, newest first. Raises StoreError."""
        ...


class Results:
    """Takes the results of one process."""

    def __init__(self, store: Records, writer: str, executor: Executor) -> None:
        """Begin.

        Args:
            store: where results go of models that name no folder.
            writer: this process's own name among those that write to a folder, the same after a restart.
            executor: a single thread, which files are written in.
        """
        self._store = store
        self._writer = writer
        self._executor = executor
        self._folders: dict[str, Folder] = {}

    async def add(self, result: Result, shadow: Shadow) -> None:
        """Keep a result as the settings of its model say.

        Raises:
            StoreError: it could not be kept; the text says why.
        """
        if not shadow.folder:
            keep_ms = max(1, int(min(shadow.keep_s * 1000, _LONGEST_MS)))
            await self._store.record(GROUP, result.model, encode(result), shadow.max_results, keep_ms)
            return
        folder = self._folders.get(shadow.folder)
        if folder is None:
            folder = self._folders[shadow.folder] = Folder(Path(shadow.folder), self._writer)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, folder.add, result, shadow.max_results, shadow.keep_s)


async def read(store: Records, model: str, since: float, most: int) -> Read:
    """The newest `most` results of a model in the store, not older than `since`.

    Raises:
        StoreError: the store does not answer.
    """
    found, before = Read([]), ""
    while len(found.results) < most:
        page = await store.records(GROUP, model, _PAGE, before)
        for entry in page:
            try:
                found.results.append(decode(entry.payload))
            except StoreError:
                found.unreadable += 1
        if len(page) < _PAGE:
            break
        before = page[-1].id
        # Records lie in the order in which comparisons ended: one that was written so early began earlier still.
        if int(before.partition("-")[0]) / 1000 < since - _CLOCKS_S:
            break
    found.results = sorted((one for one in found.results if one.at >= since), key=lambda one: one.at, reverse=True)
    del found.results[most:]
    return found

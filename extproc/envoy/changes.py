"""A version number that can be waited for: how health and endpoint discovery learn that something changed."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

_T = TypeVar("_T")


class Changes:
    """Counts changes and wakes whoever waits for the next. Use within one event loop.

    Attributes:
        version: number of changes so far.
    """

    def __init__(self) -> None:
        self.version = 0
        self._next = asyncio.Event()

    def announce(self) -> None:
        """Record one change and wake every waiter."""
        self.version += 1
        self._next.set()
        self._next = asyncio.Event()

    async def after(self, seen: int) -> int:
        """Return the version as soon as it is not `seen`; at once when it already differs."""
        while self.version == seen:
            await self._next.wait()
        return self.version


async def until(changes: Changes, work: Awaitable[_T]) -> _T | None:
    """Await `work`, or return None as soon as `changes` moves on; `work` is cancelled then."""
    seen = changes.version
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(changes.after(seen))
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()

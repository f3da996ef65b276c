"""Work that nobody waits for, held on to until it is done: the event loop itself refers to its tasks only weakly."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Background:
    """Tasks of one owner, in one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Tasks that are not done."""
        return len(self._tasks)

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin some work; returns at once. Must be called in a loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def idle(self) -> None:
        """Return once nothing is under way. Never raises what the work raised."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def cancel(self) -> None:
        """Cancel all that is under way; `idle` waits until it has ended."""
        for task in tuple(self._tasks):
            task.cancel()

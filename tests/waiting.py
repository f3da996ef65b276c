"""Waiting for a condition without asserting how long it takes."""

import asyncio
from collections.abc import Awaitable, Callable

# Far beyond any pause of a busy machine: only a condition that never comes runs into it.
PATIENCE_S = 60.0


async def until(check: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait until `check` holds. Raises TimeoutError when it does not within `patience_s`."""

    async def answer() -> bool:
        return check()

    await until_async(answer, patience_s)


async def until_async(check: Callable[[], Awaitable[bool]], patience_s: float = PATIENCE_S) -> None:
    """As `until`, for a condition that has to be awaited."""
    async with asyncio.timeout(patience_s):
        holds = await check()
        while not holds:
            await _pause()
            holds = await check()


async def _pause() -> None:
    await asyncio.sleep(0.01)

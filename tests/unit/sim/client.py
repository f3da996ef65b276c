"""What several test files ask a simulated engine."""

import asyncio
from typing import Any

import aiohttp


async def state(client: aiohttp.ClientSession) -> dict[str, Any]:
    """Return what the engine says about itself."""
    async with client.get("/sim/state") as response:
        answer: dict[str, Any] = await response.json()
        return answer


async def settled(client: aiohttp.ClientSession, **expected: int) -> dict[str, Any]:
    """Wait until the engine's state has all `expected` members (`live=0`); return it."""
    async with asyncio.timeout(30):
        while True:
            now = await state(client)
            if all(now[name] == value for name, value in expected.items()):
                return now
            await asyncio.sleep(0.005)

"""One simulated engine, fast enough for tests, and a client that knows its address."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from extproc.sim.fleet import SimFleet
from extproc.sim.settings import EngineSettings, SimSettings

SETTINGS = SimSettings(
    engine=EngineSettings(blocks=1025, max_model_len=8192),
    adapters=("tuned",),
    time_factor=20.0,
    control=True,
)


@pytest.fixture
async def fleet() -> AsyncIterator[SimFleet]:
    """One engine with a context of 8,192 tokens, an adapter and control routes, at twenty times the speed."""
    async with SimFleet(1, SETTINGS) as running:
        yield running


@pytest.fixture
async def client(fleet: SimFleet) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of that engine; paths only."""
    async with aiohttp.ClientSession(f"http://{fleet.addresses[0]}") as session:
        yield session

"""An engine's own word on whether it lives, over real connections."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from extproc.fleet.pulse import Pulse
from tests.bad_engine import BadEngine
from tests.ports import free_port


@pytest.fixture
async def pulse() -> AsyncIterator[Pulse]:
    """One that is closed at the end."""
    asks = Pulse("test")
    yield asks
    await asks.close()


async def test_a_healthy_engine_lives_and_an_ill_one_does_not(pulse: Pulse) -> None:
    """200 is life, 503 is what vLLM answers once its engine process is gone."""
    async with BadEngine() as engine:
        assert not await pulse.dead(engine.address)
        engine.healthy = False
        assert await pulse.dead(engine.address)


async def test_an_address_that_refuses_connections_is_dead(pulse: Pulse) -> None:
    """Nothing listens there."""
    assert await pulse.dead(f"127.0.0.1:{free_port()}")


async def test_silence_is_no_death(pulse: Pulse) -> None:
    """A busy engine may answer late: only its word, or its absence, counts."""

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", port := free_port())
    async with server:
        assert not await pulse.dead(f"127.0.0.1:{port}")
        await pulse.close()


async def test_a_page_that_is_not_there_says_nothing(pulse: Pulse) -> None:
    """An engine without a health page is not called dead for it."""

    async def not_found(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(not_found, "127.0.0.1", port := free_port())
    async with server:
        assert not await pulse.dead(f"127.0.0.1:{port}")

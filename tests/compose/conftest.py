"""The stack that the tests of this folder share: brought up once, taken down with its volumes."""

import os
import socket
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from tests.compose.stack import Stack
from tests.compose.traffic import ANSWER_LIMIT


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The running stack under a project name and a port of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stack = Stack(f"warmpath-test-{os.getpid()}", port)
    try:
        stack.up()
        yield stack
    finally:
        stack.down()


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP client of the stack's public address."""
    async with aiohttp.ClientSession(stack.url, timeout=ANSWER_LIMIT) as session:
        yield session

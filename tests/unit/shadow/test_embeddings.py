"""How alike answers are in meaning, asked of a server that speaks `/v1/embeddings`."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from extproc.shadow.embeddings import LONGEST, Embedder
from tests.ports import free_port


@asynccontextmanager
async def serving(body: Any, status: int = 200) -> AsyncIterator[tuple[str, list[Any]]]:
    """A server that gives one answer to everything; its URL, and what it was asked."""
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.Response(status=status, body=body if isinstance(body, bytes) else json.dumps(body).encode())

    app = web.Application(client_max_size=1 << 20)
    app.add_routes([web.post("/v1/embeddings", answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}", asked
    finally:
        await runner.cleanup()


def rows(*vectors: Any) -> dict[str, Any]:
    """An answer with these embeddings, in the other order, as an engine may give them."""
    data = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)]
    return {"object": "list", "data": data[::-1], "usage": {"prompt_tokens": 3}}


async def test_the_cosine_of_two_embeddings() -> None:
    """Golden: an angle of 45 degrees; the question is one of both texts, cut to what is embedded."""
    async with serving(rows([1.0, 0.0], [2.0, 2.0])) as (url, asked), aiohttp.ClientSession() as http:
        embedder = Embedder(http)
        found = await embedder.alike(f"{url}/", "e", "one", "x" * (LONGEST + 5))
        assert found == pytest.approx(math.sqrt(0.5))
        assert asked == [{"model": "e", "input": ["one", "x" * LONGEST], "encoding_format": "float"}]
        assert embedder.failed == 0


async def test_great_numbers_have_a_cosine_too() -> None:
    """What an engine sends is no reason to overflow."""
    async with serving(rows([1e308, 0.0], [1e308, 1e308])) as (url, _), aiohttp.ClientSession() as http:
        assert await Embedder(http).alike(url, "e", "one", "other") == pytest.approx(math.sqrt(0.5))


async def test_texts_without_a_question_are_not_asked_about() -> None:
    """Equal texts mean the same; engines refuse to embed nothing."""
    async with aiohttp.ClientSession() as http:
        embedder = Embedder(http)
        assert await embedder.alike("http://127.0.0.1:1", "e", "same", "same") == 1.0
        assert await embedder.alike("http://127.0.0.1:1", "e", "", "a") is None
        assert await embedder.alike("http://127.0.0.1:1", "e", "a", " \n") is None
        assert embedder.failed == 0


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (rows([1.0], [1.0]), 503),
        (b"oops", 200),
        (b"\xff", 200),
        (rows([1.0]), 200),
        (rows([1.0], [1.0, 2.0]), 200),
        (rows([0.0], [1.0]), 200),
        (rows([], []), 200),
        (b'{"data":[{"index":0,"embedding":[1e999]},{"index":1,"embedding":[1]}]}', 200),
        (rows(["a"], [1.0]), 200),
        ({"data": 5}, 200),
        (json.dumps(rows([1.0], [1.0])).encode() + b" " * (5 << 20), 200),
    ],
)
async def test_an_answer_that_is_of_no_use_is_counted(body: Any, status: int) -> None:
    """Whatever the engine says, nothing is raised and nothing is told."""
    async with serving(body, status) as (url, _), aiohttp.ClientSession() as http:
        embedder = Embedder(http)
        assert await embedder.alike(url, "e", "one", "other") is None
        assert embedder.failed == 1


async def test_an_engine_that_is_not_there_is_counted() -> None:
    """Nobody listens."""
    async with aiohttp.ClientSession() as http:
        embedder = Embedder(http, timeout_s=5.0)
        assert await embedder.alike(f"http://127.0.0.1:{free_port()}", "e", "one", "other") is None
        assert embedder.failed == 1


async def test_an_engine_that_does_not_answer_is_given_up() -> None:
    """A question has a time limit: what waits for it ends."""

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    writers: list[asyncio.StreamWriter] = []
    port = free_port()
    async with await asyncio.start_server(silent, "127.0.0.1", port), aiohttp.ClientSession() as http:
        embedder = Embedder(http, timeout_s=0.2)
        assert await embedder.alike(f"http://127.0.0.1:{port}", "e", "one", "other") is None
        assert embedder.failed == 1
        for writer in writers:
            writer.close()

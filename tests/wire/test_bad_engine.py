"""The misbehaving engine does what it is told: tests that break streams with it mean what they say."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from extproc.engines.vllm import VllmAdapter
from tests.bad_engine import BadEngine, Behave
from tests.greedy import text_of
from tests.waiting import until

BODY: dict[str, Any] = {
    "model": "sim",
    "messages": [{"role": "user", "content": "tell"}],
    "max_tokens": 12,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture
async def engine() -> AsyncIterator[BadEngine]:
    """A healthy engine until told otherwise."""
    async with BadEngine() as started:
        yield started


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client."""
    async with aiohttp.ClientSession() as session:
        yield session


async def read(
    http: aiohttp.ClientSession, engine: BadEngine, behave: Behave, body: dict[str, Any], path: str = "chat/completions"
) -> tuple[int, bytes, bool]:
    """Status, body as far as it came, and whether it broke off."""
    whole = bytearray()
    async with http.post(f"http://{engine.address}/v1/{path}", json=body, headers=behave.header()) as answer:
        try:
            async for piece in answer.content.iter_any():
                whole += piece
        except aiohttp.ClientError:
            return answer.status, bytes(whole), True
    return answer.status, bytes(whole), False


def said(stream: bytes) -> str:
    """The text of a stream, as far as its events are whole."""
    events = [line[6:] for line in stream.split(b"\n\n") if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


async def test_streams_and_whole_answers_have_the_same_text(engine: BadEngine, http: aiohttp.ClientSession) -> None:
    """The text follows from the prompt alone, streamed or not, and usage counts it."""
    _, stream, broken = await read(http, engine, Behave(), BODY)
    assert not broken
    assert stream.endswith(b"data: [DONE]\n\n")
    assert said(stream) == text_of(BODY) != ""
    _, whole, _ = await read(http, engine, Behave(), {**BODY, "stream": False})
    told = json.loads(whole)
    assert told["choices"][0]["message"]["content"] == text_of(BODY)
    assert told["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("done", [1, 5, 11])
async def test_an_answer_is_continued_from_any_token(engine: BadEngine, http: aiohttp.ClientSession, done: int) -> None:
    """The beginning as the assistant's unfinished message, or behind the prompt: the rest is the same text."""
    chat = {**BODY, "messages": [*BODY["messages"], {"role": "assistant", "content": text_of(BODY, done)}]}
    chat |= {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 12 - done}
    _, rest, _ = await read(http, engine, Behave(), chat)
    assert text_of(BODY, done) + said(rest) == text_of(BODY)
    plain = {"model": "sim", "prompt": "tell", "max_tokens": 12, "stream": True}
    further = {**plain, "prompt": "tell" + text_of(plain, done), "max_tokens": 12 - done}
    _, rest, _ = await read(http, engine, Behave(), further, "completions")
    assert text_of(plain, done) + said(rest) == text_of(plain)


@pytest.mark.parametrize("how", ["reset", "close"])
@pytest.mark.parametrize("at", [0, 1, 200, 333])
async def test_a_stream_is_cut_at_the_byte(engine: BadEngine, http: aiohttp.ClientSession, at: int, how: Any) -> None:
    """The client gets exactly so many bytes, and no end."""
    status, stream, broken = await read(http, engine, Behave(cut_at=at, how=how), BODY)
    assert (status, len(stream), broken) == (200, at, True)


async def test_silence_lasts_until_the_client_leaves(engine: BadEngine, http: aiohttp.ClientSession) -> None:
    """Neither headers nor an end; the engine notices the client's leaving."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await read(http, engine, Behave(silent=True), BODY)
    await until(lambda: engine.received[0].left)
    assert (engine.received[0].sent, engine.running) == (0, 0)


async def test_a_stream_stalls_after_its_tokens(engine: BadEngine, http: aiohttp.ClientSession) -> None:
    """Headers and three tokens come, then nothing."""
    address = f"http://{engine.address}/v1/chat/completions"
    async with http.post(address, json=BODY, headers=Behave(stall_after=3).header()) as answer:
        stream = bytearray()
        while said(bytes(stream)) != text_of(BODY, 3):
            stream += await answer.content.readany()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await answer.content.readany()
    assert engine.received[0].tokens == 3


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_errors_come_as_told(engine: BadEngine, http: aiohttp.ClientSession, status: int) -> None:
    """Status and an error body that names it."""
    told, body, _ = await read(http, engine, Behave(status=status), BODY)
    assert (told, json.loads(body)["error"]["code"]) == (status, status)


async def test_answers_that_are_no_answers(engine: BadEngine, http: aiohttp.ClientSession) -> None:
    """Garbage, a closed connection, a length that is not the body's, and no listener at all: each an error."""
    for behave in (Behave(garbage=True), Behave(hang_up=True), Behave(hang_up=True, how="close")):
        with pytest.raises(aiohttp.ClientError):
            await read(http, engine, behave, BODY)
    _, _, broken = await read(http, engine, Behave(length_off=7), {**BODY, "stream": False})
    assert broken
    async with engine.stopped():
        with pytest.raises(aiohttp.ClientConnectorError):
            await read(http, engine, Behave(), BODY)
    assert (await read(http, engine, Behave(), BODY))[0] == 200


async def test_only_the_named_engine_misbehaves(engine: BadEngine, http: aiohttp.ClientSession) -> None:
    """A request that names another engine is answered in good health; so is one after the knob was turned back."""
    status, _, _ = await read(http, engine, Behave(at=("127.0.0.1:1",), status=500), BODY)
    assert status == 200
    engine.behave = Behave(status=503)
    async with http.post(f"http://{engine.address}/v1/chat/completions", json=BODY) as answer:
        assert answer.status == 503


async def test_its_pages_are_vllms(engine: BadEngine, http: aiohttp.ClientSession) -> None:
    """The keeper can read it."""
    async with http.get(f"http://{engine.address}/metrics") as page:
        reading = VllmAdapter().read("/metrics", await page.read())
    assert (reading.running, reading.kv_blocks, reading.block_tokens) == (0, 10000, 16)
    engine.healthy = False
    async with http.get(f"http://{engine.address}/health") as page:
        assert page.status == 503

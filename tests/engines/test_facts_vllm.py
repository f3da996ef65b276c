"""What the engine adapter, the simulator and the cost model take for granted, asked of a real vLLM."""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.engines.vllm_engine import ADAPTERS, BLOCK_SIZE, CACHE_BLOCKS, MAX_MODEL_LEN, MAX_RUNNING, VllmEngine

pytestmark = pytest.mark.vllm

Json = dict[str, Any]

# Ordinary tokens of the tiny model: above its special tokens and single bytes, below the end of its vocabulary.
TOKEN_IDS = range(300, 1500)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client whose connections close with the test."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


def fresh_prompt(name: str, tokens: int) -> list[int]:
    """A prompt of exactly so many token ids, which no other name shares even its first block with."""
    return random.Random(name).choices(TOKEN_IDS, k=tokens)


async def post(http: aiohttp.ClientSession, engine: VllmEngine, path: str, body: Json) -> tuple[int, Json]:
    """Status and parsed body of one request."""
    async with http.post(f"http://{engine.address}{path}", json=body) as answer:
        return answer.status, await answer.json()


async def cached_tokens(http: aiohttp.ClientSession, engine: VllmEngine, model: str, prompt: list[int]) -> int:
    """Send a prompt of token ids and return how many of them vLLM says it found in its cache."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1}
    status, answer = await post(http, engine, "/v1/completions", body)
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


async def metrics(http: aiohttp.ClientSession, engine: VllmEngine) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The engine's `/metrics`: every name's series as (labels, value)."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    async with http.get(f"http://{engine.address}/metrics") as answer:
        for name, labels, value in re.findall(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", await answer.text(), re.MULTILINE):
            found.setdefault(name, []).append((dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)))
    return found


async def test_metrics_carry_load_and_cache_size(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """An idle engine shows zero load under the names the keeper scrapes, and its cache's block size and count.

    Blocks that only wait to be reused do not count as usage: after a request it is zero again.
    """
    await cached_tokens(http, engines[0], model_name, fresh_prompt("metrics", 64))
    found = await metrics(http, engines[0])
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        (series,) = found[name]
        assert series == ({"engine": "0", "model_name": model_name}, 0.0)
    ((cache, _),) = found["vllm:cache_config_info"]
    assert cache["block_size"] == str(BLOCK_SIZE)
    assert cache["num_gpu_blocks"] == str(CACHE_BLOCKS)


async def test_gauges_show_running_and_waiting_requests(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """Of more requests than the engine runs at once, the gauges show a full batch running and the rest waiting."""
    waiting = 8
    bodies = [
        {"model": model_name, "prompt": fresh_prompt(f"load {i}", 8), "max_tokens": 64, "ignore_eos": True}
        for i in range(MAX_RUNNING + waiting)
    ]
    sent = asyncio.gather(*(post(http, engines[0], "/v1/completions", body) for body in bodies))
    seen = set()
    while not sent.done():
        found = await metrics(http, engines[0])
        seen.add((found["vllm:num_requests_running"][0][1], found["vllm:num_requests_waiting"][0][1]))
    assert all(status == 200 for status, _ in await sent)
    assert (MAX_RUNNING, waiting) in seen


async def test_metrics_count_cache_hits_in_tokens(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """Prefix cache queries grow by a prompt's tokens and hits by its cached tokens, not by blocks or requests."""
    prompt = fresh_prompt("hits", 100)
    await cached_tokens(http, engines[0], model_name, prompt)
    before = await metrics(http, engines[0])
    cached = await cached_tokens(http, engines[0], model_name, prompt)
    after = await metrics(http, engines[0])
    grown = {
        name: after[f"vllm:prefix_cache_{name}_total"][0][1] - before[f"vllm:prefix_cache_{name}_total"][0][1]
        for name in ("queries", "hits")
    }
    assert grown == {"queries": len(prompt), "hits": cached}


@pytest.mark.parametrize("tokens", [31, 32, 33, 64, 65, 126, 128, 129])
async def test_repeated_prompt_is_cached_but_for_its_last_token(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str, tokens: int
) -> None:
    """Of a prompt sent again, the whole blocks before its last token are cached: floor((n - 1) / 32) * 32 tokens."""
    prompt = fresh_prompt(f"repeat {tokens}", tokens)
    assert await cached_tokens(http, engines[0], model_name, prompt) == 0
    assert await cached_tokens(http, engines[0], model_name, prompt) == (tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


async def test_shared_prefix_is_cached_in_whole_blocks(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """Two prompts that part within a block share only the whole blocks before it."""
    common = fresh_prompt("common", 3 * BLOCK_SIZE + 10)
    assert await cached_tokens(http, engines[0], model_name, common + fresh_prompt("one", 50)) == 0
    assert await cached_tokens(http, engines[0], model_name, common + fresh_prompt("two", 50)) == 3 * BLOCK_SIZE


async def test_generated_tokens_are_cached_for_the_next_turn(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """A prompt that goes on from an answer finds the answer's whole blocks too, all but its last token."""
    prompt = fresh_prompt("first turn", 2 * BLOCK_SIZE)
    body = {"model": model_name, "prompt": prompt, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    _, answer = await post(http, engines[0], "/v1/completions", body)
    generated = answer["choices"][0]["token_ids"]
    assert len(generated) == 40
    turn = prompt + generated + fresh_prompt("second turn", 10)
    assert await cached_tokens(http, engines[0], model_name, turn) == 3 * BLOCK_SIZE


async def test_least_recently_used_blocks_are_evicted(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """When new prompts need the room, the prompt unused for longest goes, and one used since stays."""
    unused, used = fresh_prompt("unused", 129), fresh_prompt("used", 129)
    await cached_tokens(http, engines[0], model_name, unused)
    await cached_tokens(http, engines[0], model_name, used)
    capacity = CACHE_BLOCKS * BLOCK_SIZE
    for part in range(4):
        await cached_tokens(http, engines[0], model_name, fresh_prompt(f"filler {part}", capacity // 4))
        assert await cached_tokens(http, engines[0], model_name, used) == 128
    assert await cached_tokens(http, engines[0], model_name, unused) == 0


async def test_cache_belongs_to_one_engine(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """A prompt cached in one engine is unknown to the other: what makes routing matter."""
    prompt = fresh_prompt("own cache", 129)
    first, second = engines
    assert await cached_tokens(http, first, model_name, prompt) == 0
    assert await cached_tokens(http, first, model_name, prompt) == 128
    assert await cached_tokens(http, second, model_name, prompt) == 0


async def test_cache_salt_separates_equal_prompts(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """The same prompt under two `cache_salt` values shares nothing."""
    body = {"model": model_name, "prompt": fresh_prompt("salted", 65), "max_tokens": 1}
    seen = []
    for salt in ("a", "a", "b"):
        _, answer = await post(http, engines[0], "/v1/completions", {**body, "cache_salt": salt})
        seen.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert seen == [0, 64, 0]


async def test_stream_ends_with_usage_and_cached_tokens(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """With include_usage a stream's last event before [DONE] has no choices and the whole request's usage."""
    body = {
        "model": model_name,
        "messages": [{"role": "user", "content": "Name every statement of the language. " * 20}],
        "max_tokens": 4,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    await post(http, engines[0], "/v1/chat/completions", {**body, "stream": False, "stream_options": None})
    async with http.post(f"http://{engines[0].address}/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in (await answer.text()).split("\n\n") if line]
    *chunks, last, done = events
    assert done == "[DONE]"
    assert json.loads(chunks[0])["choices"][0]["delta"]["role"] == "assistant"
    assert all(json.loads(chunk).get("usage") is None for chunk in chunks)
    final = json.loads(last)
    assert final["choices"] == []
    usage = final["usage"]
    assert usage["completion_tokens"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    expected = (usage["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert usage["prompt_tokens_details"]["cached_tokens"] == expected > 0


async def test_stream_headers_come_before_the_prefill(engines: list[VllmEngine], model_name: str) -> None:
    """Status 200 arrives while the prompt still waits for its prefill, so it proves nothing about the engine.

    The prompt takes seconds of prefill; a tenth of a second after the headers no byte of the body is there.
    """
    body = {"model": model_name, "prompt": fresh_prompt("headers", 6000), "max_tokens": 1, "stream": True}
    payload = json.dumps(body).encode()
    host, port = engines[0].address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: {engines[0].address}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode()
        )
        writer.write(payload)
        headers = await reader.readuntil(b"\r\n\r\n")
        assert headers.startswith(b"HTTP/1.1 200 ")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), timeout=0.1)
        assert b"data: [DONE]" in await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_unknown_model_is_404_naming_the_model(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """An unknown model gets 404 with the error object that clients of vLLM parse."""
    body = {"model": "nope", "messages": [{"role": "user", "content": "hello"}]}
    status, answer = await post(http, engines[0], "/v1/chat/completions", body)
    assert status == 404
    message = f"The model `nope` does not exist. Valid aliases: {model_name}."
    assert answer == {"error": {"message": message, "type": "NotFoundError", "param": "model", "code": 404}}


@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_prompt_is_400_in_json(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str, stream: bool
) -> None:
    """A prompt over the context length gets 400 with a plain JSON error, also where a stream was asked for."""
    body = {"model": model_name, "prompt": fresh_prompt("long", MAX_MODEL_LEN + 1), "max_tokens": 1, "stream": stream}
    status, answer = await post(http, engines[0], "/v1/completions", body)
    assert status == 400
    error = answer["error"]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", "input_tokens", 400)
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]


async def test_broken_json_is_400(http: aiohttp.ClientSession, engines: list[VllmEngine]) -> None:
    """A body that is not JSON gets 400 with the same error object, not a plain text page."""
    url = f"http://{engines[0].address}/v1/chat/completions"
    async with http.post(url, data=b"{broken", headers={"content-type": "application/json"}) as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert (error["type"], error["code"]) == ("Bad Request", 400)


async def test_models_lists_name_and_context_length(
    http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """`/v1/models` names what the engine serves and its context length; an adapter's parent is the base."""
    async with http.get(f"http://{engines[0].address}/v1/models") as answer:
        model, *adapters = (await answer.json())["data"]
    assert (model["id"], model["max_model_len"], model["parent"]) == (model_name, MAX_MODEL_LEN, None)
    assert [(adapter["id"], adapter["parent"]) for adapter in adapters] == [(name, model_name) for name in ADAPTERS]


async def test_health_is_200_with_an_empty_body(http: aiohttp.ClientSession, engines: list[VllmEngine]) -> None:
    """Every engine answers its health check with 200 and nothing else."""
    for engine in engines:
        async with http.get(f"http://{engine.address}/health") as answer:
            assert (answer.status, await answer.read()) == (200, b"")

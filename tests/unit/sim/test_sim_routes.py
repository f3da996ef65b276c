"""The HTTP surface, route by route, through a real client."""

import base64
import json
import struct
from typing import Any

import aiohttp
import pytest

from extproc.sim.fleet import SimFleet
from extproc.sim.settings import EngineSettings, SimSettings

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat(text: str = "hello there", **more: Any) -> dict[str, Any]:
    """A chat body of one message."""
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 8} | more


async def ask(client: aiohttp.ClientSession, path: str, body: dict[str, Any], status: int = 200) -> Any:
    """Post `body` and return the JSON that comes with `status`."""
    async with client.post(path, json=body) as response:
        assert response.status == status
        return await response.json()


async def events(client: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Post `body`, check the frame of the stream and return its events without the last, [DONE]."""
    async with client.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        text = (await response.read()).decode()
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]


async def sample(client: aiohttp.ClientSession, name: str) -> float:
    """Return the value of the first sample on /metrics that starts with `name`."""
    async with client.get("/metrics") as response:
        page = await response.text()
    return next(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))


async def test_a_whole_chat_answer_has_the_fields_of_vllm(client: aiohttp.ClientSession) -> None:
    """Choices, usage with cached tokens, and a finish reason."""
    answer = await ask(client, CHAT, chat("x" * 400))
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) == 8 * 4
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8 == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    again = await ask(client, CHAT, chat("x" * 400))
    cached = (usage["prompt_tokens"] - 1) // 16 * 16
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert again["choices"][0]["message"] == choice["message"]


async def test_a_streamed_chat_says_the_same(client: aiohttp.ClientSession) -> None:
    """Role event, one event a token, the reason on the last, then usage without choices if asked for."""
    whole = await ask(client, CHAT, chat())
    chunks = await events(client, CHAT, chat(stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(pieces) == 9
    text = "".join(piece["choices"][0]["delta"]["content"] for piece in pieces)
    assert text == whole["choices"][0]["message"]["content"]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * 8 + ["length"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    assert "cached_tokens" in last["usage"]["prompt_tokens_details"]


async def test_without_include_usage_there_is_none(client: aiohttp.ClientSession) -> None:
    """A stream's usage comes only on request."""
    chunks = await events(client, CHAT, chat())
    assert all("usage" not in chunk for chunk in chunks)


async def test_continuous_usage_counts_up(client: aiohttp.ClientSession) -> None:
    """Usage in every event, without details, as vLLM has it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await events(client, CHAT, chat(stream_options=options))
    assert all(chunk["usage"]["prompt_tokens_details"] is None for chunk in chunks[:-1])
    assert chunks[-1]["usage"]["completion_tokens"] == 8


async def test_the_next_turn_hits_question_and_answer(client: aiohttp.ClientSession) -> None:
    """An answer sent back is found in the cache: all full blocks of the first turn."""
    messages = [{"role": "user", "content": "tell me more " * 20}]
    first = await ask(client, CHAT, chat(messages=messages, max_tokens=100))
    messages += [first["choices"][0]["message"], {"role": "user", "content": "and then?"}]
    second = await ask(client, CHAT, chat(messages=messages))
    computed = first["usage"]["total_tokens"] - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // 16 * 16


async def test_answers_stop_by_themselves(client: aiohttp.ClientSession) -> None:
    """`stop` at answer_tokens, `length` if max_tokens comes first or ignore_eos asks for all."""
    free = await ask(client, CHAT, chat(max_tokens=None))
    assert (free["usage"]["completion_tokens"], free["choices"][0]["finish_reason"]) == (256, "stop")
    long = await ask(client, CHAT, chat(max_completion_tokens=300, ignore_eos=True))
    assert (long["usage"]["completion_tokens"], long["choices"][0]["finish_reason"]) == (300, "length")


async def test_n_choices_differ_and_share_the_prompt(client: aiohttp.ClientSession) -> None:
    """One prompt is counted, each answer is."""
    answer = await ask(client, CHAT, chat(n=3))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
    assert answer["usage"]["completion_tokens"] == 24
    chunks = await events(client, CHAT, chat(n=3))
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        text = "".join(choice["delta"]["content"] for choice in own)
        assert text == answer["choices"][index]["message"]["content"]


@pytest.mark.parametrize(
    ("prompt", "tokens", "choices"),
    [("12345", 2, 1), (["1234", "5678"], 2, 2), ([1, 2, 3], 3, 1), ([[1], [2, 3]], 3, 2)],
)
async def test_completions_take_all_four_kinds_of_prompt(
    client: aiohttp.ClientSession, prompt: Any, tokens: int, choices: int
) -> None:
    """Text, texts, token ids, lists of token ids; 16 tokens of answer by default."""
    answer = await ask(client, COMPLETIONS, {"model": "sim", "prompt": prompt})
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert len(answer["choices"]) == choices
    assert answer["usage"]["prompt_tokens"] == tokens
    assert answer["usage"]["completion_tokens"] == 16 * choices
    chunks = await events(client, COMPLETIONS, {"model": "sim", "prompt": prompt})
    first = [chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"][0]["index"] == 0]
    assert "".join(first) == answer["choices"][0]["text"]


async def test_text_and_its_token_ids_are_one_prompt(client: aiohttp.ClientSession) -> None:
    """What /tokenize says of a text hits the text's blocks."""
    text = "abcdefgh" * 40
    tokenized = await ask(client, "/tokenize", {"prompt": text, "return_token_strs": True})
    assert tokenized["count"] == 80 == len(tokenized["tokens"])
    assert tokenized["token_strs"][:2] == ["abcd", "efgh"]
    await ask(client, COMPLETIONS, {"model": "sim", "prompt": text})
    answer = await ask(client, COMPLETIONS, {"model": "sim", "prompt": tokenized["tokens"]})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


async def test_tokenize_renders_a_chat(client: aiohttp.ClientSession) -> None:
    """The chat form counts what a chat request would."""
    body = chat()
    tokenized = await ask(client, "/tokenize", {"model": "sim", "messages": body["messages"]})
    answer = await ask(client, CHAT, body)
    assert tokenized["count"] == answer["usage"]["prompt_tokens"]


async def test_embeddings_in_both_encodings(client: aiohttp.ClientSession) -> None:
    """One vector an input; base64 holds the same numbers as 32-bit floats."""
    body = {"model": "sim", "input": ["one", "another"]}
    answer = await ask(client, "/v1/embeddings", body)
    assert [row["index"] for row in answer["data"]] == [0, 1]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 3,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }
    packed = await ask(client, "/v1/embeddings", body | {"encoding_format": "base64"})
    vector = struct.unpack("<128f", base64.b64decode(packed["data"][1]["embedding"]))
    assert vector == pytest.approx(answer["data"][1]["embedding"], abs=1e-6)


async def test_salt_and_adapter_keep_caches_apart(client: aiohttp.ClientSession) -> None:
    """A hit needs the same salt and the same adapter."""
    text = "y" * 640
    for more in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"model": "tuned"}):
        cold = await ask(client, CHAT, chat(text, **more))
        warm = await ask(client, CHAT, chat(text, **more))
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert warm["model"] == more.get("model", "sim")


async def test_the_request_id_becomes_part_of_the_answer(client: aiohttp.ClientSession) -> None:
    """X-Request-Id, for logs that must be joined."""
    async with client.post(CHAT, json=chat(), headers={"x-request-id": "mine-1"}) as response:
        assert (await response.json())["id"] == "chatcmpl-mine-1"


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "param"),
    [
        (CHAT, chat(model="nope"), 404, "NotFoundError", "model"),
        (COMPLETIONS, {"model": "nope", "prompt": "x"}, 404, "NotFoundError", "model"),
        (CHAT, {"model": "sim"}, 400, "Bad Request", None),
        (CHAT, chat(messages="hi"), 400, "Bad Request", None),
        (CHAT, chat(messages=[]), 400, "BadRequestError", "messages"),
        (CHAT, chat(max_tokens=0), 400, "BadRequestError", "max_tokens"),
        (CHAT, chat(n=0), 400, "BadRequestError", "n"),
        (CHAT, chat(n=16_385), 400, "BadRequestError", "n"),
        (CHAT, chat(max_tokens=8190), 400, "BadRequestError", "max_tokens"),
        (CHAT, chat("x" * 40_000), 400, "BadRequestError", "input_tokens"),
        (CHAT, chat("x" * 40_000, stream=True), 400, "BadRequestError", "input_tokens"),
        (CHAT, chat(cache_salt="a/b"), 400, "Bad Request", None),
        (CHAT, chat(stream_options={"include_usage": True}), 400, "Bad Request", None),
        (COMPLETIONS, {"model": "sim", "prompt": ""}, 400, "BadRequestError", None),
        (COMPLETIONS, {"model": "sim", "prompt": []}, 400, "BadRequestError", None),
        (COMPLETIONS, {"model": "sim", "prompt": [-1]}, 400, "Bad Request", None),
        (COMPLETIONS, {"model": "sim", "prompt": ["a", 1]}, 400, "Bad Request", None),
        ("/v1/embeddings", {"model": "sim", "input": "x" * 40_000}, 400, "BadRequestError", "input_tokens"),
        ("/tokenize", {}, 400, "Bad Request", None),
    ],
)
async def test_refusals_are_those_of_vllm(
    client: aiohttp.ClientSession, path: str, body: dict[str, Any], status: int, kind: str, param: str | None
) -> None:
    """Status, type and param as vLLM answers; code repeats the status."""
    error = (await ask(client, path, body, status))["error"]
    assert (error["type"], error["param"], error["code"]) == (kind, param, status)
    assert error["message"]


async def test_a_body_that_is_no_json_is_a_bad_request(client: aiohttp.ClientSession) -> None:
    """Cut off, not even UTF-8, and nested deeper than any reader follows."""
    for data in (b'{"model":', b"\xff\xfe", b"", b'{"x":' * 100_000 + b"1" + b"}" * 100_000):
        async with client.post(CHAT, data=data) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "Bad Request"


async def test_unknown_routes_and_methods(client: aiohttp.ClientSession) -> None:
    """As FastAPI answers: 404 and 405 with a detail."""
    async with client.get("/v1/nothing") as response:
        assert (response.status, await response.json()) == (404, {"detail": "Not Found"})
    async with client.get(CHAT) as response:
        assert (response.status, response.headers["allow"]) == (405, "POST")
    async with client.head("/health") as response:
        assert response.status == 405


async def test_the_small_routes(client: aiohttp.ClientSession) -> None:
    """/health, /ping, /version, /load, /v1/models."""
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        async with client.request(method, path) as response:
            assert (response.status, await response.read()) == (200, b"")
    async with client.get("/version") as response:
        assert await response.json() == {"version": "0.33.0"}
    async with client.get("/load?x=1") as response:
        assert await response.json() == {"server_load": 0}
    async with client.get("/v1/models") as response:
        base, tuned = (await response.json())["data"]
    assert (base["id"], base["parent"], base["max_model_len"]) == ("sim", None, 8192)
    assert (tuned["id"], tuned["parent"], tuned["max_model_len"]) == ("tuned", "sim", None)


async def test_a_full_queue_is_refused() -> None:
    """--max-num-queued-reqs: 503 beyond the limit, counted; what is live is not disturbed."""
    settings = SimSettings(max_num_queued_reqs=2, control=True, time_factor=20.0)
    async with SimFleet(1, settings) as fleet, aiohttp.ClientSession(f"http://{fleet.addresses[0]}") as client:
        await ask(client, "/sim/freeze", {"frozen": True})
        held = [await client.post(CHAT, json=chat(stream=True)) for _ in range(2)]
        error = (await ask(client, CHAT, chat(), 503))["error"]
        assert (error["type"], error["param"], error["code"]) == ("Service Unavailable", None, 503)
        await ask(client, "/sim/freeze", {"frozen": False})
        for response in held:
            assert (await response.read()).endswith(b"[DONE]\n\n")
        assert await sample(client, "vllm:admission_rejections_total") == 1


async def test_cached_tokens_can_be_switched_off() -> None:
    """Without --enable-prompt-tokens-details vLLM says null."""
    async with (
        SimFleet(1, SimSettings(prompt_tokens_details=False, time_factor=20.0)) as fleet,
        aiohttp.ClientSession(f"http://{fleet.addresses[0]}") as client,
    ):
        answer = await ask(client, CHAT, chat())
        assert answer["usage"]["prompt_tokens_details"] is None


async def test_metrics_have_vllms_names(client: aiohttp.ClientSession) -> None:
    """Counters, gauges, histograms and the cache's shape, as a scraper finds them."""
    await ask(client, CHAT, chat("z" * 400))
    await ask(client, CHAT, chat("z" * 400))
    async with client.get("/metrics") as response:
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        page = await response.text()
    lines = page.splitlines()
    own = '{model_name="sim",engine="0"'
    assert f"vllm:num_requests_running{own}}} 0.0" in lines
    assert f"vllm:num_requests_waiting{own}}} 0.0" in lines
    assert f"vllm:kv_cache_usage_perc{own}}} 0.0" in lines
    assert f"vllm:generation_tokens_total{own}}} 16.0" in lines
    assert f'vllm:request_success_total{own},finished_reason="length"}} 2.0' in lines
    assert f'vllm:time_to_first_token_seconds_bucket{own},le="+Inf"}} 2.0' in lines
    assert f'vllm:engine_sleep_state{own},sleep_state="awake"}} 1.0' in lines
    info = next(line for line in lines if line.startswith("vllm:cache_config_info"))
    for label in ('block_size="16"', 'num_gpu_blocks="1025"', 'enable_prefix_caching="True"', 'engine="0"'):
        assert label in info
    assert await sample(client, "vllm:prefix_cache_hits_total") > 0
    assert await sample(client, "process_start_time_seconds") > 0


async def test_many_engines_share_nothing() -> None:
    """A prompt that one engine has cached is new to the other."""
    settings = SimSettings(engine=EngineSettings(blocks=200), time_factor=20.0)
    async with SimFleet(2, settings) as fleet:
        assert len(set(fleet.addresses)) == 2
        cached = []
        for address in fleet.addresses:
            async with aiohttp.ClientSession(f"http://{address}") as client:
                await ask(client, CHAT, chat("q" * 400))
                answer = await ask(client, CHAT, chat("q" * 400))
                cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
                assert await sample(client, "vllm:prompt_tokens_total") == 2 * answer["usage"]["prompt_tokens"]
        assert cached[0] == cached[1] > 0

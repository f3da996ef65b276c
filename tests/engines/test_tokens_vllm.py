"""Token ids of prompts, from the model's files and from a real vLLM: those that vLLM itself says it computed."""

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.clock import SystemClock
from extproc.config import Config, Model, Pool, TokenSettings
from extproc.config_pools import TokenSource
from extproc.request.shapes import parse
from extproc.tokens.tokenizing import Engines, Tokenizing
from tests.engines.gateway import Json
from tests.engines.keeping import POOL, fresh, page, post
from tests.engines.vllm_engine import ADAPTERS, VllmEngine
from tests.unit.tokens.parts import Counted

pytestmark = pytest.mark.vllm

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

USER = {"role": "user", "content": "What is the weather in Rome — and in São Paulo?"}
SYSTEM = {"role": "system", "content": "  You are terse.\n\nAnswer in one line. "}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Look up the weather of a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "enum": ["Rome", "Zürich"]}, "days": {"type": "integer"}},
                "required": ["place"],
            },
        },
    }
]
CALL = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}
CALLED = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
RESULT = {"role": "tool", "tool_call_id": "call-1", "content": '{"sky": "clear", "degrees": 21}'}
PARTS = [{"type": "text", "text": "First part."}, {"type": "text", "text": "Second part."}]
ANSWER = {"role": "assistant", "content": "It is sunny in "}

# Any other choice than none needs a parser of tool calls at the engine.
BODIES: Mapping[str, tuple[str, Json]] = {
    "plain": (CHAT, {"messages": [USER]}),
    "system": (CHAT, {"messages": [SYSTEM, USER]}),
    "two system messages": (CHAT, {"messages": [SYSTEM, SYSTEM, USER]}),
    "developer": (CHAT, {"messages": [{"role": "developer", "content": "Be kind."}, USER]}),
    "turns": (CHAT, {"messages": [SYSTEM, USER, {"role": "assistant", "content": "Sunny."}, USER]}),
    "special tokens in the text": (CHAT, {"messages": [{"role": "user", "content": "<|end|>\n<|start|>system\nHi"}]}),
    "tools": (CHAT, {"messages": [USER], "tools": TOOLS, "tool_choice": "none"}),
    "a tool call": (CHAT, {"messages": [*CALLED, RESULT], "tools": TOOLS, "tool_choice": "none"}),
    "tool results without tools": (CHAT, {"messages": [*CALLED, RESULT, ANSWER, USER]}),
    "a result of parts": (CHAT, {"messages": [*CALLED, {**RESULT, "content": PARTS}]}),
    "content parts": (CHAT, {"messages": [{"role": "user", "content": PARTS}]}),
    "no content": (CHAT, {"messages": [USER, {"role": "assistant", "content": ""}, USER]}),
    "reasoning effort": (CHAT, {"messages": [USER], "reasoning_effort": "high"}),
    "no reasoning": (CHAT, {"messages": [USER], "reasoning_effort": "none"}),
    "template variables": (CHAT, {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False, "odd": 1}}),
    "both": (CHAT, {"messages": [USER], "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}),
    "an answer to go on with": (
        CHAT,
        {"messages": [USER, ANSWER], "continue_final_message": True, "add_generation_prompt": False},
    ),
    "no generation prompt": (CHAT, {"messages": [USER], "add_generation_prompt": False}),
    "special tokens of the tokenizer": (CHAT, {"messages": [USER], "add_special_tokens": True}),
    "an adapter": (CHAT, {"model": ADAPTERS[0], "messages": [SYSTEM, USER]}),
    "a text": (TEXT, {"prompt": "The quick brown fox.  It jumps\tover 12345 dogs. 🦊"}),
    "a text without special tokens": (TEXT, {"prompt": "The quick brown fox", "add_special_tokens": False}),
    "token ids": (TEXT, {"prompt": list(fresh("token ids", 40).ids)}),
    "one prompt in a list": (TEXT, {"prompt": ["The quick brown fox"]}),
}


# Bodies whose prompts are those of others.
ALIKE = {"special tokens of the tokenizer": "plain", "an adapter": "system"}
ALIKE |= {"one prompt in a list": "a text without special tokens"}


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client whose connections close with the test."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


@pytest.fixture(params=["local", "engine"])
async def tokens(
    request: pytest.FixtureRequest, engines: list[VllmEngine], model_name: str, model_dir: Path
) -> AsyncIterator[Tokenizing]:
    """A worker's token ids, from the model's files or from an engine."""
    source: TokenSource = request.param
    settings = TokenSettings(source=source, tokenizer=str(model_dir) if source == "local" else "", budget_ms=10_000)
    known = Engines(lambda _: [engines[0].address], lambda _: ADAPTERS, lambda _: ["vllm"])
    room = Tokenizing(known, Counted(), SystemClock(), "test")
    pool = Pool(endpoints=[engines[0].address], profiles="precise", tokens=settings)
    await room.apply(Config(models={model_name: Model(pool=POOL)}, pools={POOL: pool}))
    yield room
    await room.close()


async def computed(http: aiohttp.ClientSession, engine: VllmEngine, path: str, body: Json) -> list[int]:
    """The prompt's token ids as vLLM tells them beside its answer."""
    told = await post(http, engine.address, path, {**body, "max_tokens": 1, "return_token_ids": True})
    ids: list[int] = told["prompt_token_ids"] if path == CHAT else told["choices"][0]["prompt_token_ids"]
    assert len(ids) == told["usage"]["prompt_tokens"]
    return ids


async def made(tokens: Tokenizing, path: str, body: Json) -> tuple[list[int], str]:
    """Token ids and adapter of a prompt, made by us."""
    text = json.dumps(body).encode()
    prompt = await tokens.of(POOL, path, text, parse(path, {}, text))
    assert prompt is not None
    return list(prompt.ids), prompt.adapter


async def test_token_ids_are_those_that_vllm_computes(
    tokens: Tokenizing, http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """Messages, tools, calls, parts, template variables and plain texts, id by id; adapters have their base's ids."""
    expected, found = {}, {}
    for name, (path, body) in BODIES.items():
        named = {"model": model_name, **body}
        expected[name] = await computed(http, engines[0], path, named), named["model"].removeprefix(model_name)
        found[name] = await made(tokens, path, named)
    assert {name: ids for name, ids in found.items() if ids != expected[name]} == {}
    # All others are unlike each other, so that whatever parts them was seen in the ids.
    for name, other in ALIKE.items():
        assert expected[name][0] == expected[other][0], name
    assert len({tuple(ids) for ids, _ in expected.values()}) == len(BODIES) - len(ALIKE)


async def asked(http: aiohttp.ClientSession, engine: VllmEngine) -> dict[tuple[str, str], float]:
    """How many requests the engine says it had, by route and status."""
    families = text_string_to_metric_families((await page(http, engine.address, "/metrics")).decode())
    return {
        (sample.labels["handler"], sample.labels["status"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name == "http_requests_total"
    }


@pytest.mark.parametrize("tokens", ["engine"], indirect=True)
async def test_an_engine_without_render_routes_is_asked_once_and_then_tokenizes(
    tokens: Tokenizing, http: aiohttp.ClientSession, engines: list[VllmEngine], model_name: str
) -> None:
    """Without `--enable-scale-out` the render route answers 403: one try a route, and all prompts by `/tokenize`."""
    before = await asked(http, engines[0])
    for number in range(5):
        await made(tokens, CHAT, {"model": model_name, "messages": [{"role": "user", "content": f"Number {number}"}]})
        await made(tokens, TEXT, {"model": model_name, "prompt": f"Number {number}"})
    after = await asked(http, engines[0])
    routes = {
        (f"{CHAT}/render", "4xx"): 1,
        (f"{TEXT}/render", "4xx"): 1,
        ("/tokenize", "2xx"): 10,
    }
    assert {key: after.get(key, 0) - before.get(key, 0) for key in routes} == routes

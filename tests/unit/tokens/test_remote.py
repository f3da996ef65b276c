"""Token ids from servers: what is sent, what is made of the answers, and which server is asked."""

import gzip
import json
import zlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from aiohttp import web

from extproc.clock import ManualClock
from extproc.tokens.http import Client, new_session
from extproc.tokens.tokenizing import Engines
from extproc.tokens.values import NoTokensError
from tests.ports import free_port
from tests.unit.tokens.parts import (
    DISABLED,
    Server,
    ask,
    config_of,
    ids_of,
    pool_of,
    rendered,
    serving,
    tokenized,
    tokenizing,
)

USER = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PATIENT = {"budget_ms": 10_000.0}
OF_ENGINES = config_of({"p": pool_of({"source": "engine", **PATIENT})})
FAILED = {"error": {"message": "broken", "code": 500}}


def engines(*servers: Server, adapters: tuple[str, ...] = (), kinds: tuple[str, ...] = ()) -> Engines:
    """Engines of every pool."""
    return Engines(lambda _: [server.at for server in servers], lambda _: adapters, lambda _: kinds)


async def test_an_engine_that_renders_is_asked_for_the_whole_request() -> None:
    """The render route takes the client's body, without the tensors of images, and answers exactly."""
    async with (
        serving({CHAT + "/render": rendered(1, 2, 3)}) as engine,
        tokenizing(OF_ENGINES, engines(engine)) as (room, counted),
    ):
        prompt = await ask(room, messages=USER, temperature=0.5, cache_salt="s")
    assert prompt is not None
    assert (list(prompt.ids), prompt.adapter, prompt.salt) == ([1, 2, 3], "", "s")
    sent = {"model": "m", "messages": USER, "temperature": 0.5, "cache_salt": "s"}
    assert engine.asked == [(CHAT + "/render", sent | {"mm_payload": "none", "return_mm_kwargs": False})]
    assert counted.outcomes == {"ok": 1}


async def test_an_engine_that_does_not_render_tokenizes_and_is_not_asked_again() -> None:
    """Without `--enable-scale-out` vLLM answers 403; that is remembered, and looked at again in some minutes."""
    clock = ManualClock()
    async with (
        serving({CHAT + "/render": DISABLED, "/tokenize": tokenized(5, 6)}) as engine,
        tokenizing(OF_ENGINES, engines(engine), clock) as (room, _),
    ):
        first = await ask(room, messages=USER)
        await ask(room, messages=[*USER, *USER])
        clock.advance(301)
        await ask(room, messages=USER * 3)
    assert ids_of(first) == [5, 6]
    assert engine.paths == [CHAT + "/render", "/tokenize", "/tokenize", CHAT + "/render", "/tokenize"]


async def test_a_missing_route_says_nothing_of_another() -> None:
    """Older engines render chats and no messages; with `--api-key` they answer 401 and tokenize."""
    answers = {
        CHAT + "/render": rendered(1),
        TEXT + "/render": (401, {"error": "Unauthorized"}),
        "/tokenize": tokenized(5),
    }
    async with serving(answers) as engine, tokenizing(OF_ENGINES, engines(engine)) as (room, counted):
        assert await ask(room, "/v1/messages", messages=USER, max_tokens=5) is None
        assert ids_of(await ask(room, messages=USER)) == [1]
        assert ids_of(await ask(room, TEXT, prompt="x")) == [5]
    assert counted.outcomes == {"unsupported": 1, "ok": 2}


async def test_tokenize_is_sent_all_that_shapes_the_prompt() -> None:
    """It has no documents and no effort: the template gets them as variables."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with (
        serving({"/tokenize": tokenized(5)}) as engine,
        tokenizing(OF_ENGINES, engines(engine, kinds=("sglang",))) as (room, _),
    ):
        await ask(
            room,
            messages=USER,
            tools=tools,
            tool_choice="auto",
            documents=[{"text": "d"}],
            reasoning_effort="low",
            chat_template_kwargs={"own": 1},
            temperature=0.5,
            stream=True,
        )
        await ask(room, TEXT, prompt="hello", add_special_tokens=False)
    assert engine.asked == [
        (
            "/tokenize",
            {
                "model": "m",
                "messages": USER,
                "tools": tools,
                "tool_choice": "auto",
                "add_generation_prompt": True,
                "continue_final_message": False,
                "add_special_tokens": False,
                "reasoning_effort": "low",
                "chat_template_kwargs": {
                    "own": 1,
                    "documents": [{"text": "d"}],
                    "reasoning_effort": "low",
                    "enable_thinking": True,
                },
            },
        ),
        ("/tokenize", {"model": "m", "prompt": "hello", "add_special_tokens": False}),
    ]


async def test_tokenize_is_told_thoughts_by_both_names() -> None:
    """The chat API of vLLM 0.32 renames `reasoning_content`, its `/tokenize` passes over it."""
    thought = {"role": "assistant", "content": "x", "reasoning_content": "t"}
    async with (
        serving({"/tokenize": tokenized(5)}) as engine,
        tokenizing(OF_ENGINES, engines(engine, kinds=("sglang",))) as (room, _),
    ):
        await ask(room, messages=[thought, {**thought, "reasoning": "own"}])
    sent = engine.asked[0][1]["messages"]
    assert sent == [{**thought, "reasoning": "t"}, {**thought, "reasoning": "own"}]


async def test_tensorrt_llm_tokenizes_texts_only() -> None:
    """Its route deliberately takes no messages."""
    config = config_of({"p": pool_of({"source": "engine", **PATIENT}, engine="tensorrt_llm")})
    async with (
        serving({"/_internal/tokenize": (200, {"count": 1, "tokens": [9]})}) as engine,
        tokenizing(config, engines(engine)) as (room, counted),
    ):
        text, chat = await ask(room, TEXT, prompt="x"), await ask(room, messages=USER)
    assert ids_of(text) == [9]
    assert chat is None
    assert engine.asked == [("/_internal/tokenize", {"prompt": "x"})]
    assert counted.outcomes == {"ok": 1, "unsupported": 1}


async def test_the_same_prompt_is_asked_for_once() -> None:
    """Whatever else of the request differs."""
    async with (
        serving({CHAT + "/render": rendered(1, 2, 3)}) as engine,
        tokenizing(OF_ENGINES, engines(engine)) as (room, counted),
    ):
        await ask(room, messages=USER, temperature=0.5)
        await ask(room, messages=USER, seed=7)
    assert len(engine.asked) == 1
    assert (counted.found, counted.made) == (3, 3)


async def test_another_engine_is_asked_each_time_and_when_one_fails() -> None:
    """One broken engine costs its pool no token ids."""
    async with (
        serving({"/tokenize": tokenized(5)}) as one,
        serving({"/tokenize": (500, FAILED)}) as other,
        tokenizing(OF_ENGINES, engines(one, other, kinds=("sglang",))) as (room, counted),
    ):
        for number in range(4):
            await ask(room, messages=USER * (number + 1))
    assert (len(one.asked), len(other.asked)) == (4, 2)
    assert counted.outcomes == {"ok": 4}


async def test_a_render_server_is_asked_at_its_own_address() -> None:
    """Completions are answered with a list."""
    async with serving({TEXT + "/render": (200, [rendered(4)[1]]), "/v1/messages/render": rendered(8)}) as server:
        config = config_of({"p": pool_of({"source": "render", "url": f"http://{server.at}/", **PATIENT})})
        async with tokenizing(config) as (room, _):
            text = await ask(room, TEXT, prompt="x")
            messages = await ask(room, "/v1/messages", messages=USER, max_tokens=5)
    assert ids_of(text) == [4]
    assert ids_of(messages) == [8]
    assert server.paths == [TEXT + "/render", "/v1/messages/render"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((400, {"error": {"message": "too long"}}), "refused"),
        ((422, {}), "refused"),
        ((500, FAILED), "failed"),
        ((200, {"count": 1}), "failed"),
        ((200, {"tokens": "x"}), "failed"),
        ((200, {"tokens": [-1]}), "failed"),
        ((200, {"tokens": [1 << 32]}), "failed"),
        ((200, {"tokens": [1.5]}), "failed"),
        ((200, []), "failed"),
    ],
)
async def test_what_is_no_answer_is_none(answer: tuple[int, Any], why: str) -> None:
    """A refusal is the client's; anything else is the server's."""
    async with (
        serving({"/tokenize": answer}) as engine,
        tokenizing(OF_ENGINES, engines(engine, kinds=("sglang",))) as (room, counted),
    ):
        assert await ask(room, messages=USER) is None
    assert counted.outcomes == {why: 1}


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """A client with a thread of its own."""
    with ThreadPoolExecutor(1) as threads:
        async with new_session("test") as session:
            yield Client(session, threads)


_JSON = json.dumps({"tokens": [1, 2, 3]}).encode()
_LONG = b"[" + b"7," * (1 << 20) + b"7]"


@pytest.mark.parametrize(
    ("body", "encoding", "asked", "found"),
    [
        (gzip.compress(_JSON), "gzip", 1, _JSON),
        (zlib.compress(_JSON), "deflate", 1, _JSON),
        (_LONG, "identity", 1 << 17, _LONG),
        (_LONG, "identity", 1, None),
        (gzip.compress(_LONG), "gzip", 1 << 17, _LONG),
        (gzip.compress(_LONG), "gzip", 1, None),
        (gzip.compress(_JSON)[:-9], "gzip", 1, None),
        (_JSON, "gzip", 1, None),
        (_JSON, "br", 1, None),
    ],
    ids=["gzip", "deflate", "long", "too long", "inflates", "inflates too far", "cut", "not gzip", "unknown"],
)
async def test_an_answer_is_no_longer_than_its_prompt_allows(
    client: Client, body: bytes, encoding: str, asked: int, found: bytes | None
) -> None:
    """Ids without end, plain or compressed, would keep the process from its other requests."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, headers={"Content-Encoding": encoding})

    app, port = web.Application(), free_port()
    app.router.add_post("/tokenize", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        if found is None:
            with pytest.raises(NoTokensError):
                await client.post(f"http://127.0.0.1:{port}/tokenize", b"x" * asked)
        else:
            assert (await client.post(f"http://127.0.0.1:{port}/tokenize", b"x" * asked)).body == found
    finally:
        await runner.cleanup()


async def test_truncated_prompts_are_left_to_a_render_route() -> None:
    """`/tokenize` does not cut, and which side is cut is the tokenizer's."""
    async with (
        serving({CHAT + "/render": rendered(1), "/tokenize": tokenized(5)}) as engine,
        tokenizing(OF_ENGINES, engines(engine)) as (room, _),
    ):
        assert await ask(room, messages=USER, truncate_prompt_tokens=1) is not None
        engine.answers[CHAT + "/render"] = DISABLED
        assert await ask(room, messages=[*USER, *USER], truncate_prompt_tokens=1) is None
    assert "/tokenize" not in engine.paths


async def test_engines_get_the_name_they_know() -> None:
    """An alias becomes the served name; an adapter's name is left out, since its engine may not have it loaded."""
    models = {
        "m": {"pool": "p", "served_as": "org/real"},
        "tuned": {"pool": "p", "adapter": {"name": "lora-7"}},
        "listed": {"pool": "p"},
    }
    config = config_of({"p": pool_of({"source": "engine", **PATIENT})}, models)
    async with (
        serving({"/tokenize": tokenized(5)}) as engine,
        tokenizing(config, engines(engine, adapters=("listed",), kinds=("sglang",))) as (room, _),
    ):
        prompts = [await ask(room, TEXT, prompt=name, model=name) for name in models]
    assert [body.get("model") for _, body in engine.asked] == ["org/real", None, None]
    assert [prompt.adapter if prompt else "none" for prompt in prompts] == ["", "lora-7", "listed"]


async def test_a_render_route_gets_the_name_as_well() -> None:
    """In place of the client's, which the engine may not know."""
    models = {"m": {"pool": "p", "served_as": "org/real"}, "tuned": {"pool": "p", "adapter": {"name": "lora-7"}}}
    config = config_of({"p": pool_of({"source": "engine", **PATIENT})}, models)
    async with (
        serving({CHAT + "/render": rendered(1), "/v1/messages/render": rendered(2)}) as engine,
        tokenizing(config, engines(engine)) as (room, _),
    ):
        await ask(room, messages=USER)
        await ask(room, messages=USER, model="tuned")
        await ask(room, "/v1/messages", messages=USER, model="tuned", max_tokens=5)
    # The messages API cannot do without a model.
    assert [body.get("model") for _, body in engine.asked] == ["org/real", None, "lora-7"]


async def test_sglang_names_an_adapter_behind_its_base_model() -> None:
    """`base:adapter`; elsewhere a colon is part of the name, unless the engines list the adapter."""
    models = {"base:a": {"pool": "p"}}
    config = config_of({"p": pool_of({"source": "engine", **PATIENT})}, models)
    async with serving({"/tokenize": tokenized(5)}) as engine:
        async with tokenizing(config, engines(engine, kinds=("sglang",))) as (room, _):
            prompt = await ask(room, TEXT, prompt="x", model="base:a")
        async with tokenizing(config, engines(engine, kinds=("vllm",))) as (room, _):
            other = await ask(room, TEXT, prompt="x", model="base:a")
    assert prompt is not None
    assert prompt.adapter == "a"
    assert other is not None
    assert other.adapter == ""

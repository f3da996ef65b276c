"""Bodies fitted to a real vLLM: aliases, adapters chosen by name, usage asked for in the client's place."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.engines.gateway import CACHED, OUTPUT, PROMPT, Gateway, gateway, prose
from tests.engines.vllm_engine import ADAPTERS, BLOCK_SIZE, VllmEngine

pytestmark = pytest.mark.vllm

ALIAS, TUNED = "chat-large", "tuned"


@pytest.fixture
async def aliased(engines: list[VllmEngine], model_name: str, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway in front of one engine, whose model has an alias and an adapter that clients know by another name."""
    models = {
        ALIAS: {"pool": "main", "served_as": model_name},
        TUNED: {"pool": "main", "adapter": {"name": ADAPTERS[0]}},
    }
    async with gateway(tmp_path, model_name, [engines[0].address], pool={"ask_usage": True}, models=models) as running:
        yield running


async def test_a_model_is_asked_for_by_its_names(aliased: Gateway, model_name: str) -> None:
    """The alias is the base model, with its cache; the adapter is another one, with a cache of its own."""
    messages = [{"role": "user", "content": prose("by its names", 1200)}]
    seen: dict[str, list[tuple[str, bool]]] = {}
    for model in (model_name, ALIAS, TUNED, TUNED):
        body = {"model": model, "messages": messages, "max_tokens": 1}
        answer = (await aliased.send("POST", "/v1/chat/completions", body)).json()
        usage = answer["usage"]
        whole = (usage["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE
        seen.setdefault(model, []).append((answer["model"], usage["prompt_tokens_details"]["cached_tokens"] == whole))
    # The name in the answer is the engine's: answers are not rewritten.
    assert seen == {
        model_name: [(model_name, False)],
        ALIAS: [(model_name, True)],
        TUNED: [(ADAPTERS[0], False), (ADAPTERS[0], True)],
    }


async def test_usage_is_asked_for_on_a_stream_that_did_not_say(aliased: Gateway) -> None:
    """The stream ends with usage, and Warmpath counts the tokens that it tells; a client that declined gets none."""
    before = await aliased.settled()
    messages = [{"role": "user", "content": prose("usage of streams", 1200)}]
    first = await aliased.ask(messages, model=ALIAS, stream=True)
    second = await aliased.ask(messages, model=ALIAS, stream=True)
    grown = await aliased.settled() - before
    assert first.usage is not None
    assert second.cached_tokens == (second.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE > 0
    assert grown[PROMPT] == first.prompt_tokens + second.prompt_tokens
    assert grown[CACHED] == second.cached_tokens
    assert grown[OUTPUT] == 8
    declined = await aliased.ask(messages, model=ALIAS, stream=True, stream_options={"include_usage": False})
    assert declined.usage is None
    assert declined.text

"""Precise profiles in front of two real vLLM engines: the prediction of cached tokens is vLLM's own number.

The word of vLLM decides: `usage` of each answer. Predictions are those of the decision, as `warmpath explain` tells
them.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engines.gateway import Gateway, Messages, gateway, prose, turn
from tests.engines.vllm_engine import ADAPTERS, BLOCK_SIZE, CACHE_BLOCKS, VllmEngine
from tests.waiting import until_async

pytestmark = pytest.mark.vllm

REQUESTS = 200
LEAST_EXACT = 0.99
ASSISTANTS = 6
# What a reader takes; vLLM's events of an answer's last tokens are in the profile by then.
PAUSE_S = 0.25
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look up the {name} of a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
    for name in ("weather", "time")
]


class Seen(msgspec.Struct, frozen=True):
    """One request.

    Attributes:
        what: model, and `tools` when it had some.
        engine: number of the engine that was picked.
        prompt_tokens: as vLLM reported.
        predicted_prompt: as the decision counted.
        predicted: cached tokens that the decision expected.
        reported: cached tokens that vLLM reported.
    """

    what: str
    engine: int
    prompt_tokens: int
    predicted_prompt: float
    predicted: float
    reported: int


class Talk(msgspec.Struct):
    """A conversation that goes on.

    Attributes:
        name: what makes its text unlike any other's.
        model: model or adapter.
        tools: tools of every turn; none when empty.
        messages: what the next turn sends.
    """

    name: str
    model: str
    tools: list[dict[str, Any]]
    messages: Messages
    turns: int = 0

    async def take_turn(self, through: Gateway) -> Seen:
        """Send the next turn, and compare what was expected of it with what came."""
        more: dict[str, Any] = {"tools": self.tools, "tool_choice": "none"} if self.tools else {}
        answer = await through.ask(self.messages, model=self.model, max_tokens=12, **more)
        expected = await through.predicted(answer.request_id)
        self.turns += 1
        self.messages = turn(self.messages, answer.text, prose(f"{self.name}, turn {self.turns}", 400))
        return Seen(
            what=f"{self.model}{' tools' if self.tools else ''}",
            engine=expected.engine,
            prompt_tokens=answer.prompt_tokens,
            predicted_prompt=expected.prompt_tokens,
            predicted=expected.cached_tokens,
            reported=answer.cached_tokens,
        )


def opening(name: str, model: str, rng: random.Random) -> Talk:
    """A new conversation with one of the assistants; half of them have tools."""
    assistant = rng.randrange(ASSISTANTS)
    system = {"role": "system", "content": prose(f"assistant {assistant}", 1500)}
    user = {"role": "user", "content": prose(name, rng.randrange(300, 1500))}
    return Talk(name, model, TOOLS if assistant % 2 else [], [system, user])


@pytest.fixture(params=["local", "engine"])
async def precise(
    request: pytest.FixtureRequest, engines: list[VllmEngine], model_name: str, model_dir: Path, tmp_path: Path
) -> AsyncIterator[Gateway]:
    """A gateway with precise profiles, which gets token ids from the model's files, or from the engines."""
    tokens = {"source": request.param, "budget_ms": 5000}
    if request.param == "local":
        tokens["tokenizer"] = str(model_dir)
    adapters = {name: {"pool": "main", "adapter": {"name": name}} for name in ADAPTERS}
    pool = {"profiles": "precise", "tokens": tokens}
    addresses = [engine.address for engine in engines]
    async with gateway(tmp_path, model_name, addresses, pool=pool, models=adapters) as running:
        yield running


async def test_predicted_cached_tokens_are_what_vllm_reports(
    precise: Gateway, model_name: str, request: pytest.FixtureRequest
) -> None:
    """Of 200 requests with shared beginnings, tools and adapters, 99 % are predicted to the token, evictions included.

    What is computed has more tokens than both caches together, 16,384 each. The length of the prompt is exact too.
    """
    source = request.node.callspec.params["precise"]
    rng = random.Random(5)
    models = [model_name, model_name, *ADAPTERS]
    talks: list[Talk] = []
    seen: list[Seen] = []
    for number in range(REQUESTS):
        if len(talks) < 4 or rng.random() < 0.3:
            talks.append(opening(f"{source} talk {number}", rng.choice(models), rng))
        talk = rng.choice(talks[-12:])
        seen.append(await talk.take_turn(precise))
        await asyncio.sleep(PAUSE_S)
    print("\n".join(table(seen)))
    exact = sum(each.predicted == each.reported for each in seen)
    print(f"{exact} of {len(seen)} predicted to the token; {sum(each.reported > 0 for each in seen)} had a hit")
    stored = sum(each.prompt_tokens - each.reported for each in seen)
    assert stored > 2 * CACHE_BLOCKS * BLOCK_SIZE, "nothing was evicted"
    assert sum(each.reported > 0 for each in seen) > REQUESTS / 2
    assert {each.what for each in seen} >= {model_name, f"{model_name} tools", *ADAPTERS}
    assert [each.prompt_tokens for each in seen] == [each.predicted_prompt for each in seen]
    assert exact >= LEAST_EXACT * REQUESTS


async def test_a_restarted_engine_is_predicted_empty(
    precise: Gateway, engines: list[VllmEngine], model_name: str, request: pytest.FixtureRequest
) -> None:
    """Case A5: an engine that comes back on its address is known to hold nothing, and is known exactly again."""
    talk = opening(f"{request.node.name} talk", model_name, random.Random(6))
    first = await talk.take_turn(precise)
    await asyncio.sleep(PAUSE_S)
    assert (await talk.take_turn(precise)).reported > 0
    engines[first.engine].stop()
    engines[first.engine].start()
    await asyncio.to_thread(engines[first.engine].wait_ready)
    await asyncio.sleep(1.0)

    async def warm_again() -> bool:
        told = await talk.take_turn(precise)
        assert told.predicted == told.reported
        await asyncio.sleep(PAUSE_S)
        return told.reported > 0

    await until_async(warm_again)


def table(seen: Sequence[Seen]) -> list[str]:
    """One row for each request that was not predicted to the token."""
    rows = ["number model                engine prompt predicted reported"]
    for number, each in enumerate(seen):
        if each.predicted != each.reported:
            rows.append(
                f"{number:6} {each.what:20} {each.engine:6} {each.prompt_tokens:6} {each.predicted:9.0f} "
                f"{each.reported:8}"
            )
    return rows

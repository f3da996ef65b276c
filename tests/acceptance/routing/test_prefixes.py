"""What two requests share, as predicted before an engine sees them and as the engine then reports it."""

import base64
import itertools
import json
import random
import statistics
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from extproc.sim.workload import text
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, MODEL, POOL, Local, configuration, running, simulated
from tests.acceptance.routing.asking import at_workers, decide, decide_chat, seen
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADAPTERS = ("lora-a", "lora-b")
BLOCK = 64
"""Tokens in a hashed block: what is shared is known to within one."""
RNG = random.Random(3)
LINE = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(journal: Journal, folder: Path) -> AsyncIterator[Local]:
    """Three engines that serve two adapters too, behind one worker, so that what is learnt is known at once."""
    arguments = [part for name in ADAPTERS for part in ("--adapter", name)]
    async with simulated(journal, each=3, arguments=arguments) as engines:
        document = configuration({POOL: [one.address for one in engines]}, telemetry={"access_log_flush_ms": 10})
        document["models"] |= {name: {"pool": POOL} for name in ADAPTERS}
        document["redis"] = {"timeout_ms": 2000}  # predictions are what is tested, not a store that looks slow
        async with running(journal, folder / "warmpath.yaml", document, engines) as started:
            yield started


def picture(source: str, name: str) -> dict[str, Any]:
    """An image part: by URL, or with its data."""
    data = base64.b64encode(random.Random(name).randbytes(3000)).decode()
    url = f"https://pictures.example/{name}.png" if source == "URL" else f"data:image/png;base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}}


def tool(name: str) -> dict[str, Any]:
    """A function that a model may call."""
    schema = {"type": "object", "properties": {"q": {"type": "string", "description": text(RNG, 60)}}}
    return {"type": "function", "function": {"name": name, "description": text(RNG, 60), "parameters": schema}}


@pytest.mark.parametrize("source", ["URL", "base64"])
async def test_another_image_shares_only_what_stands_in_front_of_it(local: Local, source: str) -> None:
    """The text before an image is shared, what follows it is not; with the same image all of it is."""
    before, behind = text(RNG, 1000), text(RNG, 800)

    def messages(name: str) -> list[dict[str, Any]]:
        parts = [{"type": "text", "text": before}, picture(source, name), {"type": "text", "text": behind}]
        return [{"role": "user", "content": parts}]

    first = await seen(local, messages=messages("cat"))
    other = await seen(local, messages=messages("dog"))
    again = await seen(local, messages=messages("cat"))
    assert (first.predicted, first.reported) == (0, 0)
    assert first.engine is other.engine is again.engine
    # The picture takes more bytes of ours than tokens of the engine's, so a token of this prompt counts more bytes.
    assert 0.75 * 1000 <= other.predicted <= 1000 + BLOCK
    assert 1000 - BLOCK <= other.reported <= 1000 + BLOCK
    for shared in (again.predicted, again.reported):
        assert shared >= 0.95 * again.prompt_tokens - BLOCK


async def test_other_tools_share_only_what_stands_in_front_of_them(local: Local) -> None:
    """Two requests that differ in their tools alone share nothing, or the system prompt; with equal tools all of it."""
    system, question = {"role": "system", "content": text(RNG, 500)}, {"role": "user", "content": text(RNG, 2000)}
    tools, foreign = [tool("search"), tool("read")], [tool("search"), tool("read")]
    first = await seen(local, messages=[question], tools=tools)
    others = await seen(local, messages=[question], tools=foreign)
    again = await seen(local, messages=[question], tools=tools)
    assert (first.predicted, others.predicted) == (0, 0)
    assert others.reported <= BLOCK
    assert again.engine is first.engine
    for shared in (again.predicted, again.reported):
        assert shared >= again.prompt_tokens - 2 * BLOCK
    async with at_workers(local) as (worker,):
        await decide_chat(worker, "", "tools", messages=[system, question], tools=tools)
        others_behind = await decide_chat(worker, "", "tools", messages=[system, question], tools=foreign)
    assert 500 - BLOCK <= others_behind.cached_tokens <= 500 + BLOCK


async def test_a_template_with_tools_in_front_costs_no_other_prompt(local: Local) -> None:
    """An engine that renders tools before the system prompt reports less than was predicted: other prompts stay known.

    The simulated engines render so, as the templates of GLM 4.5 and Kimi K2 do. What is missing was never there, so it
    says nothing of what the engine evicted.
    """
    system, question = {"role": "system", "content": text(RNG, 500)}, {"role": "user", "content": text(RNG, 500)}
    innocent, session = text(RNG, 1500), {"prompt_cache_key": "one engine for all of this test"}
    known = await seen(local, innocent, **session)
    for _ in range(2):
        await seen(local, messages=[system, question], tools=[tool("search"), tool("read")], **session)
    again = await seen(local, innocent + " and more", **session)
    assert again.engine is known.engine
    assert again.reported >= 1500 - BLOCK
    assert again.predicted >= 1500 - BLOCK


async def test_a_call_of_a_tool_without_content_is_part_of_the_prompt(local: Local) -> None:
    """`tool_calls` beside `content: null` is no flaw; what follows it finds it, and another call is another prompt."""
    unread = await local.metric("warmpath_fallbacks_total", rung="load_only")
    question = {"role": "user", "content": text(RNG, 300)}

    def history(city: str) -> list[dict[str, Any]]:
        arguments = json.dumps({"city": city, "why": text(random.Random(city), 300)})
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        result = {"role": "tool", "tool_call_id": "call_1", "content": text(random.Random(2), 300)}
        return [question, {"role": "assistant", "content": None, "tool_calls": [call]}, result]

    first = await seen(local, messages=history("Oslo"))
    more = await seen(local, messages=[*history("Oslo"), {"role": "user", "content": "and then?"}])
    other = await seen(local, messages=history("Rome"))
    assert first.answer.status == more.answer.status == other.answer.status == 200
    assert more.engine is first.engine
    for shared in (more.predicted, more.reported):
        assert shared >= first.prompt_tokens - 2 * BLOCK
    for shared in (other.predicted, other.reported):
        assert shared <= 300 + 2 * BLOCK
    assert await local.metric("warmpath_fallbacks_total", rung="load_only") == unread


async def test_a_growing_chat_shares_more_every_turn(local: Local) -> None:
    """Ten turns: each finds all of the turn before, its answer included, predicted as reported, at one engine."""
    messages: list[dict[str, Any]] = []
    turns = []
    for _ in range(10):
        messages.append({"role": "user", "content": text(RNG, 150)})
        turn = await seen(local, messages=messages, max_tokens=100)
        messages.append(turn.answer.json["choices"][0]["message"])
        turns.append(turn)
    assert len({turn.engine.address for turn in turns}) == 1
    for before, turn in itertools.pairwise(turns):
        whole = before.prompt_tokens + before.answer.json["usage"]["completion_tokens"]
        assert turn.reported >= whole - 2 * 16
        assert turn.predicted == pytest.approx(turn.reported, abs=BLOCK)
        assert turn.predicted > before.predicted


@pytest.mark.parametrize(
    ("own", "foreign"),
    [({"cache_salt": "tenant-1"}, {"cache_salt": "tenant-2"}), ({"cache_salt": "tenant-1"}, {}),
     ({"model": "lora-a"}, {"model": "lora-b"}), ({"model": "lora-a"}, {"model": MODEL})],
    ids=["another salt", "no salt", "another adapter", "no adapter"],
)  # fmt: skip
async def test_salts_and_adapters_share_nothing(local: Local, own: dict[str, Any], foreign: dict[str, Any]) -> None:
    """The same prompt under another salt or adapter is new, predicted as reported; under its own it is all cached."""
    prompt = text(RNG, 1500)
    first = await seen(local, prompt, **own)
    stranger = await seen(local, prompt, **foreign)
    again = await seen(local, prompt, **own)
    assert (first.predicted, first.reported) == (0, 0)
    assert (stranger.predicted, stranger.reported) == (0, 0)
    assert again.engine is first.engine
    for shared in (again.predicted, again.reported):
        assert shared >= 1500 - BLOCK


async def test_a_billing_line_that_changes_hides_nothing(local: Local) -> None:
    """Two turns that differ in `cch=` alone go to one engine, as fully shared; with another first line they do not."""
    rest = text(RNG, 1500)

    def messages(line: str) -> list[dict[str, Any]]:
        return [{"role": "system", "content": line + rest}, {"role": "user", "content": "go on"}]

    first = await seen(local, messages=messages(LINE.format("36ee5")))
    second = await seen(local, messages=messages(LINE.format("f00d1")))
    other = await seen(local, messages=messages("x-other-header: cch=36ee5;\n"))
    assert first.predicted == 0
    assert second.engine is first.engine
    assert second.predicted >= 1500 - BLOCK
    assert other.predicted == 0


async def test_a_billing_line_hides_nothing_in_the_messages_api(local: Local) -> None:
    """The same where the line is a block of its own in front of the system prompt, as Claude Code sends it."""
    rest = text(RNG, 1500)

    def body(line: str) -> bytes:
        system = [{"type": "text", "text": line}, {"type": "text", "text": rest}]
        question = {"role": "user", "content": "go on"}
        return json.dumps({"model": MODEL, "max_tokens": 4, "system": system, "messages": [question]}).encode()

    async with at_workers(local) as (worker,):
        first = await decide(worker, body(LINE.format("36ee5")), "/v1/messages")
        second = await decide(worker, body(LINE.format("f00d1")), "/v1/messages")
    assert first.cached_tokens == 0
    assert second.endpoint == first.endpoint
    assert second.cached_tokens >= 1500 - BLOCK


async def test_a_decision_asks_no_engine_for_tokens(local: Local) -> None:
    """While no engine answers anything, a cached prompt is still found where it is: hashing needs no tokenizer."""
    prompt = text(RNG, 1500)
    first = await seen(local, prompt)
    for engine in local.engines:
        await engine.control("freeze", frozen=True, scope="http")
    try:
        async with at_workers(local) as (worker,):
            told = await decide_chat(worker, prompt + " and more")
    finally:
        for engine in local.engines:
            await engine.control("freeze", frozen=False, scope="http")
    assert told.endpoint == first.engine.address
    assert told.cached_tokens >= 1500 - BLOCK


async def test_a_cache_that_an_engine_dropped_shows_in_its_reports(local: Local) -> None:
    """Nothing tells of it but cached tokens: after two reports of none, nothing is predicted there.

    What was used last is asked first: engines evict the oldest first, so what is missing takes what is older with it.
    """
    home = {"prompt_cache_key": "one engine for this test too"}
    prompts = [text(RNG, 800) for _ in range(5)]
    cleared = {(await seen(local, prompt, **home)).engine for prompt in prompts}.pop()
    assert (await seen(local, prompts[-1] + " and more", **home)).reported >= 800 - BLOCK
    assert (await cleared.control("reset_prefix_cache"))["success"]
    asked = [await seen(local, prompt + " and more", **home) for prompt in prompts[-2::-1]]
    assert [one.reported for one in asked] == [0, 0, 0, 0]
    assert [one.predicted >= 800 - BLOCK for one in asked] == [True, True, False, False]
    assert [one.predicted for one in asked[2:]] == [0, 0]


async def test_predictions_come_true(local: Local) -> None:
    """Chats behind shared prompts, once known: the median prediction is within 5 % of the prompt of the report."""
    systems = [text(RNG, 600) for _ in range(4)]
    wrong = []
    for number in range(12):
        messages = [{"role": "system", "content": systems[number % 4]}]
        for turn in range(3):
            messages.append({"role": "user", "content": text(RNG, RNG.randint(60, 400))})
            one = await seen(local, messages=messages, max_tokens=RNG.randint(10, 60))
            messages.append(one.answer.json["choices"][0]["message"])
            if number >= 4 or turn:
                wrong.append(abs(one.predicted - one.reported) / one.prompt_tokens)
    assert len(wrong) == 32
    assert statistics.median(wrong) <= 0.05, wrong


@pytest.mark.parametrize(
    "stream", [{}, {"stream": True, "stream_options": {"include_usage": True}}], ids=["whole", "sse"]
)
async def test_reported_tokens_are_counted_as_the_engine_reports_them(local: Local, stream: dict[str, Any]) -> None:
    """The metrics' prompt and cached tokens grow by what the engine said in `usage`, streamed or not."""
    prompt = text(random.Random(1), 900)
    counted = await tokens_so_far(local)
    for _ in range(2):
        answer = await local.ask(CHAT, json.dumps({**chat(prompt), **stream}).encode())
        reported = usage_of(answer.body, streamed=bool(stream))
        counted = (counted[0] + reported[0], counted[1] + reported[1])
        await until_async(partial(at_least, local, counted[0]))
        assert await tokens_so_far(local) == counted
    assert reported[1] > 800


async def tokens_so_far(local: Local) -> tuple[float, float]:
    """Prompt and cached tokens as the metrics have them."""
    names = ("warmpath_prompt_tokens_total", "warmpath_cached_tokens_total")
    prompt, cached = [await local.metric(name, pool=POOL) for name in names]
    return prompt, cached


async def at_least(local: Local, prompt_tokens: float) -> bool:
    """Whether so many prompt tokens are counted."""
    return (await tokens_so_far(local))[0] >= prompt_tokens


def chat(prompt: str) -> dict[str, Any]:
    """A chat of one question."""
    return {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": prompt}]}


def usage_of(body: bytes, *, streamed: bool) -> tuple[int, int]:
    """Prompt tokens and cached tokens that an answer reports."""
    last = body.split(b"data: ")[-2] if streamed else body
    usage = json.loads(last)["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

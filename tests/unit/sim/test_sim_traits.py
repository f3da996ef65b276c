"""What tells simulated engines from each other, as versions of a model."""

import argparse
from random import Random
from typing import Any

import aiohttp
import msgspec
import pytest

from extproc.sim import server
from extproc.sim.fleet import SimFleet
from extproc.sim.settings import EngineSettings, SimSettings
from extproc.sim.traits import Traits
from tests.unit.sim.client import settled, state

BODY: dict[str, Any] = {"model": "sim", "prompt": "hello " * 50}
PROMPT_TOKENS = 75


async def trait(client: aiohttp.ClientSession, **traits: Any) -> int:
    """Change the engine; the status."""
    async with client.post("/sim/traits", json=traits) as response:
        return response.status


async def ask(client: aiohttp.ClientSession, **fields: Any) -> dict[str, Any]:
    """The answer to a completion that is no stream."""
    async with client.post("/v1/completions", json=BODY | {"max_tokens": 64} | fields) as response:
        assert response.status == 200
        whole: dict[str, Any] = await response.json()
        return whole


async def stream(client: aiohttp.ClientSession, **fields: Any) -> str:
    """The text of a streamed completion. Raises aiohttp.ClientError when the connection breaks."""
    body = BODY | {"max_tokens": 64, "stream": True, "stream_options": {"include_usage": True}} | fields
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200
        return await response.text()


async def busy(client: aiohttp.ClientSession, **fields: Any) -> float:
    """Engine seconds that one completion takes, with an empty cache."""
    async with client.post("/sim/reset_prefix_cache"):
        before = await state(client)
    await ask(client, **fields)
    return float((await state(client))["busy_s"] - before["busy_s"])


def test_each_share_is_drawn_as_often_as_it_says() -> None:
    """Of 20,000 draws every kind of failure has its share, within six standard deviations; the rest is well."""
    traits = Traits(fail_share=0.02, reset_share=0.1, cut_share=0.2, end_share=0.05, empty_share=0.3)
    rng, count = Random(1), 20_000
    drawn = [traits.failing(rng.random) for _ in range(count)]
    for mode, share in {"status": 0.02, "reset": 0.1, "cut": 0.2, "end": 0.05, "empty": 0.3, None: 0.33}.items():
        assert drawn.count(mode) == pytest.approx(count * share, abs=6 * (count * share * (1 - share)) ** 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefill_factor": 0.0},
        {"decode_factor": -1.0},
        {"length_factor": float("nan")},
        {"fail_share": 1.1},
        {"cut_share": 0.6, "empty_share": 0.6},
        {"length_spread": 1.0},
        {"fail_status": 200},
        {"fail_status": 699},
        {"after_tokens": 0},
    ],
)
def test_what_no_engine_can_be_is_refused(wrong: dict[str, Any]) -> None:
    """Factors above 0, shares that fit into 1, a status that is an error: else the setting is named."""
    with pytest.raises(ValueError, match=r"must|exceed"):
        SimSettings(traits=Traits(**wrong))


async def test_traits_that_cannot_be_are_refused_while_running(client: aiohttp.ClientSession) -> None:
    """400, and the engine stays what it was."""
    assert await trait(client, text_seed=3) == 200
    said = (await ask(client))["choices"]
    assert await trait(client, fail_share=2.0) == 400
    assert await trait(client, no_trait=2.0) == 400
    assert (await ask(client))["choices"] == said


def test_every_trait_has_an_option() -> None:
    """`warmpath sim` starts an engine with any of them."""
    parser = argparse.ArgumentParser()
    server.add_arguments(parser)
    given = Traits(
        prefill_factor=1.5,
        decode_factor=1.25,
        fail_share=0.01,
        fail_status=503,
        reset_share=0.02,
        cut_share=0.03,
        end_share=0.04,
        empty_share=0.05,
        after_tokens=7,
        length_factor=2.5,
        length_spread=0.5,
        text_seed=9,
    )
    assert all(value != getattr(Traits(), name) for name, value in msgspec.structs.asdict(given).items())
    options = [f"--{name.replace('_', '-')}={value}" for name, value in msgspec.structs.asdict(given).items()]
    assert server.settings_of(parser.parse_args(options)).traits == given


async def test_a_slower_prefill_makes_the_first_token_late_and_no_other(client: aiohttp.ClientSession) -> None:
    """75 tokens of prompt at 20,000 a second are less than the 6.1 ms of a step: 4,000 tokens are not."""
    body = {"prompt": "abcd" * 4000, "max_tokens": 2}
    healthy = await busy(client, **body)
    await trait(client, prefill_factor=1.3)
    slow = await busy(client, **body)
    assert healthy == pytest.approx(4000 / 20_000 + 0.0061)
    assert slow - healthy == pytest.approx(0.3 * 4000 / 20_000)


async def test_a_slower_decode_makes_all_tokens_after_the_first_late(client: aiohttp.ClientSession) -> None:
    """Each step of one sequence lasts 6.1 ms; the prefill of 4,000 tokens is bound by arithmetic."""
    body = {"prompt": "abcd" * 4000, "max_tokens": 11}
    healthy = await busy(client, **body)
    await trait(client, decode_factor=1.5)
    assert await busy(client, **body) - healthy == pytest.approx(0.5 * 10 * 0.0061)


async def test_speed_outlives_a_restart() -> None:
    """A version of a model does not get better by being started again."""
    settings = SimSettings(control=True, traits=Traits(decode_factor=3.0), time_factor=20.0)
    async with SimFleet(1, settings) as fleet:
        for _ in range(2):
            async with aiohttp.ClientSession(f"http://{fleet.addresses[0]}") as client:
                assert await busy(client, max_tokens=10) == pytest.approx(10 * 3 * 0.0061)
            await fleet.endpoints[0].stop()
            await fleet.endpoints[0].start()


async def test_a_share_of_one_fails_every_request(client: aiohttp.ClientSession) -> None:
    """With the status that was asked for, until the traits are others."""
    await trait(client, fail_share=1.0, fail_status=503)
    for _ in range(3):
        async with client.post("/v1/completions", json=BODY) as response:
            assert response.status == 503
    await trait(client)
    await ask(client)


async def test_resets_and_cuts_break_the_connection(client: aiohttp.ClientSession) -> None:
    """At once, or in the middle of a stream."""
    await trait(client, reset_share=1.0)
    with pytest.raises(aiohttp.ClientConnectionError):
        await ask(client)
    await trait(client, cut_share=1.0)
    with pytest.raises(aiohttp.ClientPayloadError):
        await stream(client)
    assert (await settled(client, live=0))["blocks_free"] == 1024


async def test_a_stream_that_ends_early_looks_whole_to_http(client: aiohttp.ClientSession) -> None:
    """No reason, no usage and no [DONE], and the connection can be used again."""
    await trait(client, end_share=1.0, after_tokens=5)
    for _ in range(2):
        text = await stream(client)
        assert text.count('"text"') < 6
        assert '"finish_reason":"' not in text
        assert '"completion_tokens"' not in text
        assert "[DONE]" not in text
    assert (await settled(client, live=0))["blocks_free"] == 1024


async def test_an_early_end_of_the_first_token_is_an_answer_without_a_byte(client: aiohttp.ClientSession) -> None:
    """What ends before anything was said has no event at all."""
    await trait(client, end_share=1.0, after_tokens=1)
    assert await stream(client) == ""


async def test_an_empty_answer_ends_with_the_token_that_says_so(client: aiohttp.ClientSession) -> None:
    """As vLLM's when a model ends at once: reason `stop`, one token in usage, and no text; streamed or not."""
    await trait(client, empty_share=1.0)
    whole = await ask(client)
    assert whole["choices"][0]["text"] == ""
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == 1
    text = await stream(client)
    assert '"text":""' in text
    assert text.count('"text"') == 1
    assert '"finish_reason":"stop"' in text
    assert '"completion_tokens":1' in text
    assert text.endswith("data: [DONE]\n\n")


async def test_answers_that_end_by_themselves_are_longer(client: aiohttp.ClientSession) -> None:
    """By the factor; `max_tokens` still cuts them."""
    plain = (await ask(client, max_tokens=4000))["usage"]["completion_tokens"]
    await trait(client, length_factor=1.5)
    assert (await ask(client, max_tokens=4000))["usage"]["completion_tokens"] == 1.5 * plain
    assert (await ask(client, max_tokens=40))["usage"]["completion_tokens"] == 40


async def test_lengths_spread_by_their_prompts(client: aiohttp.ClientSession) -> None:
    """Different prompts, different lengths within the spread; the same prompt, the same length."""
    await trait(client, length_spread=0.5)
    prompts = [f"{number} " + "hello " * 20 for number in range(12)]

    async def length(prompt: str) -> int:
        return int((await ask(client, prompt=prompt, max_tokens=4000))["usage"]["completion_tokens"])

    first = [await length(prompt) for prompt in prompts]
    assert first == [await length(prompt) for prompt in prompts]
    assert len(set(first)) > 6
    assert all(128 <= one <= 384 for one in first)
    assert min(first) < 220
    assert max(first) > 290


async def test_a_continued_answer_ends_where_the_whole_one_would(client: aiohttp.ClientSession) -> None:
    """The length follows from the prompt in front of the answer, wherever the prompt ends in it."""
    await trait(client, length_spread=0.5, text_seed=4)
    prompt = "hell" * 50
    whole = await ask(client, prompt=prompt, max_tokens=4000)
    text, tokens = whole["choices"][0]["text"], whole["usage"]["completion_tokens"]
    rest = await ask(client, prompt=prompt + text[:40], max_tokens=4000)
    assert rest["choices"][0]["text"] == text[40:]
    assert rest["usage"]["completion_tokens"] == tokens - 10


async def test_seeds_say_different_things(client: aiohttp.ClientSession) -> None:
    """The same seed says the same, another says something else, and none says what it said before there were any."""
    plain = (await ask(client))["choices"][0]["text"]
    await trait(client, text_seed=1)
    first, again = [(await ask(client))["choices"][0]["text"] for _ in range(2)]
    await trait(client, text_seed=0)
    assert first == again
    assert first != plain
    assert (await ask(client))["choices"][0]["text"] == plain


async def test_failing_on_demand_comes_before_the_shares() -> None:
    """`/sim/fail` is for the very next requests; what it counts is not drawn."""
    settings = SimSettings(
        engine=EngineSettings(blocks=1025), control=True, traits=Traits(fail_share=1.0), time_factor=20
    )
    async with (
        SimFleet(1, settings) as fleet,
        aiohttp.ClientSession(f"http://{fleet.addresses[0]}") as client,
    ):
        async with client.post("/sim/fail", json={"mode": "empty", "count": 1}):
            pass
        assert (await ask(client))["choices"][0]["text"] == ""
        async with client.post("/v1/completions", json=BODY) as response:
            assert response.status == 500

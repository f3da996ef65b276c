"""Every kind of engine is recognised by itself, read, and served through the gateway."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.sim.profiles import PROFILES as ABOUT
from extproc.sim.workload import text
from tests.acceptance.engines.stand import PROFILES, Crew, Stand, body_of, stand, usages
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, Answer, ask
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

RNG = random.Random(31)
BLOCKS = 501
ADAPTER = "sql-lora"
KINDS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}
LOAD_PAGES = {
    "vllm": {"/metrics"},
    "sglang": {"/v1/loads?include=core"},
    "trtllm": {"/prometheus/metrics", "/metrics"},
}
SOURCES = {"vllm-0.11": 0, "vllm-0.23": 0, "vllm-0.33": 2, "trtllm": 1, "sglang": 1}
"""How many sources of events each tells of; vLLM before 0.31 does not tell."""
VLLM_FIELDS = {
    "request_id": "abc",
    "session_id": "s-1",
    "return_token_ids": True,
    "vllm_xargs": {"kv_cache_report_mode": "full"},
    "priority": 3,
    "cache_salt": "tenant-a",
    "metadata": {"team": "search"},
    "store": False,
}
"""Fields that vLLM takes, and that TensorRT-LLM refuses or reads otherwise."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(journal: Journal, folder: Path) -> AsyncIterator[Stand]:
    """Two engines of each kind, all in one stack; vLLM 0.33 has two data-parallel ranks."""
    arguments = ("--kv-events", "--blocks", str(BLOCKS), "--time-factor", "10")
    crews = [
        Crew(
            pool=profile,
            profile=profile,
            each=2,
            arguments=(
                *arguments,
                *(() if profile == "trtllm" else ("--adapter", ADAPTER)),
                *(("--dp-ranks", "2") if profile == "vllm-0.33" else ()),
            ),
        )
        for profile in PROFILES
    ]
    async with stand(journal, folder, crews) as started:
        yield started


@pytest.mark.parametrize("profile", PROFILES)
async def test_an_engine_is_recognised_and_read(here: Stand, profile: str) -> None:
    """`engine: auto` finds kind, version, cache, adapters and sources of events of each engine; all are shown as up.

    TensorRT-LLM tells the size of its cache once a request has completed.
    """
    for each in here.engines[profile]:
        assert (await ask(here.local.http, f"http://{each.address}{CHAT}", body_of(profile, "hello"))).status == 200

    async def described() -> bool:
        states = (await here.states(profile)).values()
        return len(states) == 2 and all(state.version and state.kv_blocks for state in states)

    await until_async(described)
    engine = ABOUT[profile].engine
    for state in (await here.states(profile)).values():
        assert state.kind == KINDS[engine]
        assert state.version == ABOUT[profile].version
        assert state.page in LOAD_PAGES[engine]
        assert state.block_tokens == 16
        ranks = 2 if profile == "vllm-0.33" else 1
        assert state.kv_blocks in {ranks * BLOCKS, ranks * (BLOCKS - 1)}
        assert (state.adapters, state.active_adapters) == (() if engine == "trtllm" else (ADAPTER,), ())
        assert len(state.sources) == SOURCES[profile]
        assert state.scraped_at > 0
        assert not state.unread
        assert not state.asleep
    page = await here.keeper_page()
    assert list(page.by_endpoint("warmpath_endpoint_up", pool=profile).values()) == [1.0, 1.0]
    assert page.total("warmpath_scrapes_total", pool=profile, outcome="read") > 0
    assert page.total("warmpath_scrape_faults_total", pool=profile) == 0


@pytest.mark.parametrize("profile", PROFILES)
async def test_the_load_of_an_engine_is_shown(here: Stand, profile: str) -> None:
    """While an engine works on long answers, its own count of them is on the metrics page; later it is 0 again.

    TensorRT-LLM's gauges move only when a request completes, so short ones go by meanwhile.
    """
    long = [
        asyncio.create_task(
            here.local.ask(CHAT, body_of(profile, f"{number}: " + text(RNG, 100), max_tokens=3000, ignore_eos=True))
        )
        for number in range(4)
    ]

    async def shown() -> bool:
        if profile == "trtllm":
            await here.local.ask(CHAT, body_of(profile, text(RNG, 30)))
        return (await here.keeper_page()).total("warmpath_engine_running", pool=profile) > 0

    await until_async(shown)
    assert {answer.status for answer in await asyncio.gather(*long)} == {200}
    await here.idle(profile)

    async def none_left() -> bool:
        return all(state.sequences == 0 for state in (await here.states(profile)).values())

    if profile != "trtllm":
        await until_async(none_left)


def whole(answer: Answer) -> bool:
    """Whether a stream came to its end."""
    return answer.status == 200 and answer.body.rstrip().endswith(b"data: [DONE]")


@pytest.mark.parametrize("profile", PROFILES)
async def test_every_form_of_request_is_served(here: Stand, profile: str) -> None:
    """Chats, completions and streams with vLLM's fields are answered by every kind; nothing stays in flight.

    No answer is a 400: what TensorRT-LLM would refuse never reaches it.
    """
    refused = (await here.page()).total("warmpath_requests_total", pool=profile, outcome="client_error")
    salted = {name: value for name, value in VLLM_FIELDS.items() if name != "cache_salt"}
    completion = {"model": profile, "prompt": text(RNG, 200), "max_tokens": 4, **salted}
    chat = text(RNG, 200)
    answers = [
        await here.local.ask(CHAT, body_of(profile, chat, **VLLM_FIELDS)),
        await here.local.ask("/v1/completions", json.dumps(completion).encode()),
    ]
    streams = [
        await here.local.ask(CHAT, body_of(profile, chat, stream=True, **VLLM_FIELDS)),
        await here.local.ask("/v1/completions", json.dumps({**completion, "stream": True}).encode()),
        await here.local.ask(
            CHAT, body_of(profile, chat, stream=True, stream_options={"include_usage": True}, **VLLM_FIELDS)
        ),
    ]
    assert [answer.status for answer in answers] == [200, 200], [answer.body for answer in answers]
    assert [whole(stream) for stream in streams] == [True] * 3, [stream.body[-200:] for stream in streams]
    assert usages(streams[2])[-1]["completion_tokens"] == 4
    await here.idle(profile)
    page = await here.page()
    assert page.total("warmpath_requests_total", pool=profile, outcome="client_error") == refused
    if profile == "trtllm":
        assert page.total("warmpath_fitted_requests_total", pool=profile, change="stripped") >= 5
        assert page.total("warmpath_fitted_requests_total", pool=profile, change="priority") >= 5


@pytest.mark.parametrize("profile", PROFILES)
async def test_cached_tokens_are_learnt(here: Stand, profile: str) -> None:
    """A prompt comes again: it goes where it was, that engine reports it as cached, and the metrics have the report."""
    prompt = text(RNG, 3000)
    before = (await here.page()).total("warmpath_cached_tokens_total", pool=profile)
    first = await here.ask(profile, prompt)
    again = [await here.ask(profile, prompt) for _ in range(4)]
    assert first.reported == 0
    assert {one.decision.pick for one in again} == {first.decision.pick}
    reported = sum(one.reported for one in again)
    assert reported > 0

    async def told() -> bool:
        return (await here.page()).total("warmpath_cached_tokens_total", pool=profile) == before + reported

    await until_async(told)


async def test_step_records_of_tensorrt_llm_are_left_alone_where_its_metrics_page_tells_the_load(here: Stand) -> None:
    """`/prometheus/metrics` has no gauges before a request completes, and `/metrics` is emptied by reading.

    Once the former tells the load, the latter is nobody's but its owner's monitoring.
    """
    assert (await here.local.ask(CHAT, body_of("trtllm", "hello"))).status == 200

    async def moved() -> bool:
        return {state.page for state in (await here.states("trtllm")).values()} == {"/prometheus/metrics"}

    await until_async(moved, 20.0)

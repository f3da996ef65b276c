"""The simulated SGLang: its page, its load, its adapters, its refusals."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from extproc.sim.engine import Engine
from extproc.sim.fleet import SimFleet
from extproc.sim.load_snapshot import LoadSnapshots
from extproc.sim.sequence import Sequence
from extproc.sim.settings import EngineSettings, SimSettings
from tests.unit.sim.client import settled

COMPLETIONS = "/v1/completions"
LABELS = '{model_name="sim",engine_type="unified",tp_rank="0",pp_rank="0",moe_ep_rank="0"}'
GAUGES = (
    "num_running_reqs",
    "num_queue_reqs",
    "num_grammar_queue_reqs",
    "token_usage",
    "full_token_usage",
    "num_used_tokens",
    "kv_available_tokens",
    "kv_evictable_tokens",
    "kv_used_tokens",
    "cache_hit_rate",
    "gen_throughput",
    "max_total_num_tokens",
    "page_size",
    "num_pages",
    "context_len",
    "num_paused_reqs",
)


@asynccontextmanager
async def started(**settings: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of one server with a context of 1,000 tokens."""
    given: dict[str, Any] = {
        "engine": EngineSettings(blocks=129, max_model_len=1000),
        "time_factor": 20.0,
        "control": True,
    } | settings
    async with (
        SimFleet(1, SimSettings(profile="sglang", **given)) as fleet,
        aiohttp.ClientSession(f"http://{fleet.addresses[0]}") as client,
    ):
        yield client


async def call(client: aiohttp.ClientSession, path: str, body: Any = None, status: int = 200) -> Any:
    """Post, or get without a body, and return the JSON."""
    async with client.request("GET" if body is None else "POST", path, json=body) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def samples(client: aiohttp.ClientSession) -> dict[str, str]:
    """The samples of the page by name and labels."""
    async with client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


async def test_the_names_of_the_page() -> None:
    """Gauges with the labels of the scheduler, counters with those of the tokenizer."""
    async with started() as client:
        for _ in range(2):
            await call(client, COMPLETIONS, {"prompt": "x" * 400, "max_tokens": 2})
        page = await samples(client)
    assert {f"sglang:{name}{LABELS}" for name in GAUGES} <= set(page)
    assert page[f"sglang:max_total_num_tokens{LABELS}"] == "2048.0"
    assert page[f"sglang:page_size{LABELS}"] == "16.0"
    own = 'model_name="sim",engine_type="unified"'
    wanted = {"prompt_tokens_total": "200.0", "generation_tokens_total": "4.0", "num_requests_total": "2.0"}
    assert {name: page[f"sglang:{name}{{{own}}}"] for name in wanted} == wanted
    assert page[f'sglang:cached_tokens_total{{{own},cache_source="device"}}'] == "96.0"
    assert page[f'sglang:time_to_first_token_seconds_count{{{own},is_streaming="True"}}'] == "2.0"
    assert page[f"sglang:e2e_request_latency_seconds_count{{{own}}}"] == "2.0"
    assert not [name for name in page if name.startswith(("sglang:cache_config_info", "vllm:"))]


async def test_the_load_has_the_fields_of_the_snapshot() -> None:
    """`GET /v1/loads`; there is no `/get_load` in this version."""
    async with started(adapters=("a",)) as client:
        loads = await call(client, "/v1/loads")
        assert set(loads) == {"timestamp", "version", "accelerator", "num_accelerators", "loads"}
        (load,) = loads["loads"]
        assert load["dp_rank"] == load["num_running_reqs"] == load["num_waiting_reqs"] == 0
        assert (load["max_total_num_tokens"], load["max_running_requests"]) == (2048, 256)
        (load,) = (await call(client, "/v1/loads?include=all"))["loads"]
        assert load["lora"] == {"slots_used": 0, "slots_total": 8, "utilization": 0.0}
        assert load["queues"]["waiting"] == 0
        await call(client, "/get_load", status=404)


def test_snapshots_are_taken_now_and_then() -> None:
    """At a prefill, then every 15 decode steps for the load and every 40 for the page, and when idle."""
    engine = Engine(EngineSettings(blocks=129))
    engine.steps = snapshots = LoadSnapshots(engine, lambda: float(engine.stats.steps))
    engine.submit([Sequence(10, 100, range(6))], 0.0)
    loads, gauges = [], []
    while engine.next_event is not None:
        engine.advance(engine.next_event)
        loads.append(snapshots.loads.at)
        gauges.append(snapshots.gauges.at)
    assert sorted(set(loads)) == [1, 16, 31, 46, 61, 76, 91, 100]
    assert sorted(set(gauges)) == [1, 41, 81, 100]
    assert (snapshots.loads.running, snapshots.loads.used_tokens) == (0, 0)


async def test_adapters_are_chosen_by_the_models_name() -> None:
    """`base:adapter`, or `lora_path`; the base's name is not looked at; one that is not loaded is refused."""
    async with started(adapters=("a",)) as client:
        bodies: list[dict[str, Any]] = [{}, {"model": "sim:a"}, {"lora_path": "a"}, {"model": "other"}]
        hits = []
        for body in bodies:
            answer = await call(client, COMPLETIONS, {"prompt": "x" * 400, "max_tokens": 1} | body)
            hits.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert hits == [0, 0, 96, 96]
        error = await call(client, COMPLETIONS, {"model": "sim:b", "prompt": "x"}, 400)
        assert (error["object"], error["code"]) == ("error", 400)
        assert "never been loaded: b" in error["message"]


async def test_adapters_are_loaded_without_v1() -> None:
    """`success`, `error_message` and what is loaded, 200 or 400."""
    async with started(runtime_adapters=True) as client:
        a = {"lora_name": "a", "lora_path": "/adapters/a", "pinned": False}
        loaded = {"a": "/adapters/a"}
        wanted = {"success": True, "error_message": "", "loaded_adapters": loaded}
        assert await call(client, "/load_lora_adapter", a) == wanted
        again = await call(client, "/load_lora_adapter", a, 400)
        assert (again["success"], again["loaded_adapters"]) == (False, loaded)
        assert again["error_message"]
        cards = (await call(client, "/v1/models"))["data"]
        assert [(card["id"], card["parent"], card["owned_by"]) for card in cards] == [
            ("sim", None, "sglang"),
            ("a", "sim", "sglang"),
        ]
        gone = await call(client, "/unload_lora_adapter", {"lora_name": "a"})
        assert gone == {"success": True, "error_message": "", "loaded_adapters": {}}
        assert not (await call(client, "/unload_lora_adapter", {"lora_name": "a"}, 400))["success"]
        await call(client, "/v1/load_lora_adapter", a, 404)
    async with started() as client:
        refused = await call(client, "/load_lora_adapter", a, 400)
        assert "--enable-lora" in refused["error_message"]


@pytest.mark.parametrize(("reported", "details"), [(True, {"cached_tokens": 0}), (False, None)])
async def test_cached_tokens_are_reported_on_demand(reported: bool, details: Any) -> None:
    """`--enable-cache-report`."""
    async with started(prompt_tokens_details=reported) as client:
        answer = await call(client, COMPLETIONS, {"prompt": "x", "max_tokens": 1})
        assert answer["usage"]["prompt_tokens_details"] == details
        assert (await call(client, "/server_info"))["enable_cache_report"] == reported


async def test_a_full_queue_is_a_503() -> None:
    """Only what waits counts: what runs is no reason."""
    engine = EngineSettings(blocks=129, max_model_len=1000, max_num_seqs=1)
    async with started(engine=engine, max_num_queued_reqs=1) as client:
        long = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
        async with client.post(COMPLETIONS, json=long) as running:
            await running.content.readuntil(b"\n\n")
            await call(client, "/sim/freeze", {})
            waiting = asyncio.create_task(call(client, COMPLETIONS, {"prompt": "y", "max_tokens": 1}))
            await settled(client, live=2)
            error = await call(client, COMPLETIONS, {"prompt": "z", "max_tokens": 1}, 503)
            assert error["message"] == "The request queue is full."
            assert (error["object"], error["code"]) == ("error", 503)
            await call(client, "/sim/freeze", {"frozen": False})
        await waiting


async def test_a_prompt_that_is_too_long_is_refused_in_its_words() -> None:
    """400, flat."""
    async with started() as client:
        error = await call(client, COMPLETIONS, {"prompt": "x" * 8000}, 400)
    assert error["message"] == (
        "Input length (2000 tokens) exceeds the maximum allowed length (1000 tokens). Use a shorter input or enable "
        "--allow-auto-truncate."
    )


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
async def test_prompts_and_chats_are_tokenized(path: str) -> None:
    """Both forms, under both names; a chat counts what it costs."""
    async with started() as client:
        assert await call(client, path, {"prompt": "abcd"}) == {
            "tokens": [int.from_bytes(b"abcd", "little")],
            "count": 1,
            "max_model_len": 1000,
        }
        messages = [{"role": "user", "content": "hello"}]
        answer = await call(client, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert (await call(client, path, {"messages": messages}))["count"] == answer["usage"]["prompt_tokens"]


async def test_extra_keys_and_salts_part_caches() -> None:
    """`extra_key` and `cache_salt`."""
    async with started() as client:
        hits = []
        for more in ({}, {"extra_key": "a"}, {"cache_salt": "a", "extra_key": "a"}, {"extra_key": "a"}):
            answer = await call(client, COMPLETIONS, {"prompt": "x" * 400, "max_tokens": 1} | more)
            hits.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert hits == [0, 0, 0, 96]


async def test_the_cache_can_be_flushed() -> None:
    """By either method."""
    async with started() as client:
        for method in ("GET", "POST"):
            await call(client, COMPLETIONS, {"prompt": "x" * 400, "max_tokens": 1})
            async with client.request(method, "/flush_cache") as response:
                assert response.status == 200
                assert (await response.text()).startswith("Cache flushed.")
            assert (await settled(client, live=0))["blocks_cached"] == 0


async def test_the_small_routes() -> None:
    """Health and the server's and the model's information."""
    async with started() as client:
        for path in ("/health", "/health_generate", "/ping", "/ready"):
            async with client.get(path) as response:
                assert response.status == 200
        info = await call(client, "/server_info")
        assert (info["page_size"], info["dp_size"], info["kv_events"]) == (16, 1, None)
        assert (info["version"], info["max_total_num_tokens"]) == ("0.5.23", 2048)
        assert (await call(client, "/model_info"))["is_generation"] is True
        for path in ("/kv_event_sources", "/version", "/kv_cache_events"):
            await call(client, path, status=404)

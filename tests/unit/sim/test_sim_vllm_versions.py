"""vLLM by version: names on the page, routes that exist, adapters, sleep, token ids."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from extproc.sim.fleet import SimFleet
from extproc.sim.settings import EngineSettings, SimSettings
from extproc.sim.tokens import answer, padded
from tests.unit.sim.client import settled

VERSIONS = ("vllm-0.11", "vllm-0.23", "vllm-0.33")
ENGINE = EngineSettings(blocks=513, max_model_len=4096)


@asynccontextmanager
async def started(profile: str = "vllm-0.33", **settings: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of one engine."""
    given: dict[str, Any] = {"engine": ENGINE, "time_factor": 20.0, "control": True} | settings
    async with (
        SimFleet(1, SimSettings(profile=profile, **given)) as fleet,
        aiohttp.ClientSession(f"http://{fleet.addresses[0]}") as client,
    ):
        yield client


async def call(client: aiohttp.ClientSession, path: str, body: Any = None, status: int = 200) -> Any:
    """Post, or get without a body, and return the JSON, or the text where there is none."""
    method = "GET" if body is None else "POST"
    async with client.request(method, path, json=body) as response:
        text = await response.text()
        assert response.status == status, text
        return json.loads(text) if response.content_type == "application/json" else text


def families(page: str) -> set[str]:
    """The names that a page has families of."""
    return {line.split(" ")[2] for line in page.splitlines() if line.startswith("# TYPE ")}


OLD = {
    "vllm:gpu_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:time_per_output_token_seconds",
}
ALWAYS = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:engine_sleep_state",
    "vllm:cache_config_info",
    "vllm:inter_token_latency_seconds",
    "vllm:request_success_total",
}


@pytest.mark.parametrize("profile", VERSIONS)
async def test_names_on_the_page_are_those_of_the_version(profile: str) -> None:
    """0.11 has the old names beside the new ones; reasons of waiting came later, refused admissions with 0.29."""
    async with started(profile) as client:
        names = families(await call(client, "/metrics"))
    assert names >= ALWAYS
    assert names & OLD == (OLD if profile == "vllm-0.11" else set())
    assert ("vllm:num_requests_waiting_by_reason" in names) == (profile != "vllm-0.11")
    assert ("vllm:admission_rejections_total" in names) == (profile == "vllm-0.33")
    assert not names & {"vllm:num_requests_swapped", "vllm:cpu_cache_usage_perc", "vllm:gpu_prefix_cache_hit_rate"}


async def test_old_and_new_names_tell_the_same() -> None:
    """Two names of one number."""
    async with started("vllm-0.11") as client:
        for _ in range(2):
            await call(client, "/v1/completions", {"prompt": "x" * 200, "max_tokens": 4})
        page = await call(client, "/metrics")
    values = {line.rsplit(" ", 1)[0]: line.rsplit(" ", 1)[1] for line in page.splitlines() if line[0] != "#"}
    labels = '{model_name="sim",engine="0"}'
    for old, new in (
        ("gpu_prefix_cache_hits_total", "prefix_cache_hits_total"),
        ("gpu_prefix_cache_queries_total", "prefix_cache_queries_total"),
        ("gpu_cache_usage_perc", "kv_cache_usage_perc"),
    ):
        assert values[f"vllm:{old}{labels}"] == values[f"vllm:{new}{labels}"]
    assert values[f"vllm:gpu_prefix_cache_hits_total{labels}"] == "48.0"


@pytest.mark.parametrize(("profile", "version"), [*zip(VERSIONS, ("0.11.2", "0.23.0", "0.33.0"), strict=True)])
async def test_the_version_is_told(profile: str, version: str) -> None:
    """`GET /version`."""
    async with started(profile) as client:
        assert await call(client, "/version") == {"version": version}


@pytest.mark.parametrize(("profile", "status"), [("vllm-0.11", 404), ("vllm-0.23", 404), ("vllm-0.33", 200)])
async def test_sources_of_events_are_told_since_0_31(profile: str, status: int) -> None:
    """`GET /kv_event_sources`."""
    async with started(profile) as client:
        await call(client, "/kv_event_sources", status=status)


@pytest.mark.parametrize(
    ("profile", "scale_out", "status"),
    [
        ("vllm-0.11", False, 404),
        ("vllm-0.23", False, 200),
        ("vllm-0.33", False, 403),
        ("vllm-0.33", True, 200),
    ],
)
async def test_prompts_are_rendered_where_the_version_does(profile: str, scale_out: bool, status: int) -> None:
    """Without a switch from 0.17 to 0.29; since 0.30 it takes one, and without it the route says so."""
    body = {"model": "sim", "messages": [{"role": "user", "content": "hello there"}], "cache_salt": "s"}
    async with started(profile, scale_out=scale_out) as client:
        answer = await call(client, "/v1/chat/completions/render", body, status)
        if status == 200:
            tokens = await call(client, "/tokenize", body)
            assert answer["token_ids"] == tokens["tokens"]
            assert (answer["model"], answer["cache_salt"]) == ("sim", "s")
            prompts = {"model": "sim", "prompt": ["abcd", "abcdefgh"]}
            rendered = await call(client, "/v1/completions/render", prompts)
            assert [len(one["token_ids"]) for one in rendered] == [1, 2]
        elif status == 403:
            assert answer["error"] == {
                "message": "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable "
                "them.",
                "type": "PermissionDeniedError",
                "param": None,
                "code": 403,
            }


async def test_usage_details_grew() -> None:
    """0.32 and later tell of created cache tokens too."""
    for profile, details in (
        ("vllm-0.23", {"cached_tokens": 0}),
        ("vllm-0.33", {"cached_tokens": 0, "created_cache_tokens": None, "multimodal_tokens": None}),
    ):
        async with started(profile) as client:
            answer = await call(client, "/v1/completions", {"prompt": "x", "max_tokens": 1})
            assert answer["usage"]["prompt_tokens_details"] == details


async def test_the_answer_for_an_unknown_model() -> None:
    """Newer versions name what there is."""
    body = {"model": "x", "prompt": "y"}
    for profile, text in (
        ("vllm-0.23", "The model `x` does not exist."),
        ("vllm-0.33", "The model `x` does not exist. Valid aliases: sim, tuned."),
    ):
        async with started(profile, adapters=("tuned",)) as client:
            error = (await call(client, "/v1/completions", body, 404))["error"]
            assert error == {"message": text, "type": "NotFoundError", "param": "model", "code": 404}


async def test_token_ids_on_request() -> None:
    """The prompt's beside the choices of a chat and in each choice of a completion, the answer's in each choice."""
    async with started() as client:
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "return_token_ids": True}
        prompt = (await call(client, "/tokenize", {"messages": chat["messages"]}))["tokens"]
        whole = await call(client, "/v1/chat/completions", chat)
        assert whole["prompt_token_ids"] == prompt
        answer = whole["choices"][0]["token_ids"]
        text = whole["choices"][0]["message"]["content"]
        assert answer == (await call(client, "/tokenize", {"prompt": text}))["tokens"]
        chunks = await streamed(client, "/v1/chat/completions", chat)
        assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt, *[None] * 3]
        ids = [chunk["choices"][0].get("token_ids") for chunk in chunks]
        assert [one for some in ids if some for one in some] == answer
        completion = {"prompt": [[1, 2], [3]], "max_tokens": 2, "n": 2, "return_token_ids": True}
        choices = (await call(client, "/v1/completions", completion))["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [[1, 2], [1, 2], [3], [3]]
        chunks = await streamed(client, "/v1/completions", completion | {"prompt": [1, 2], "n": 1})
        assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks] == [[1, 2], None]


async def streamed(client: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream without the last, [DONE]."""
    async with client.post(path, json=body | {"stream": True}) as response:
        text = await response.text()
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]


async def test_adapters_are_loaded_and_unloaded_in_the_words_of_vllm() -> None:
    """Success is plain text; each refusal has its status and type."""
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    async with started(runtime_adapters=True) as client:
        lb = {"lora_name": "lb", "lora_path": "/adapters/lb"}
        assert await call(client, load, lb) == "Success: LoRA adapter 'lb' added successfully."
        cases: list[tuple[str, dict[str, Any], int, str, str]] = [
            (
                load,
                lb,
                400,
                "InvalidUserInput",
                "The lora adapter 'lb' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
            ),
            (
                load,
                {"lora_name": "", "lora_path": ""},
                400,
                "InvalidUserInput",
                "Both 'lora_name' and 'lora_path' must be provided.",
            ),
            (
                load,
                {"lora_name": "lx", "lora_path": "/nonexistent"},
                404,
                "NotFoundError",
                "Loading lora lx failed: No adapter found for /nonexistent",
            ),
            (unload, {"lora_name": "nope"}, 404, "NotFoundError", "The lora adapter 'nope' cannot be found."),
        ]
        for path, body, status, kind, text in cases:
            error = (await call(client, path, body, status))["error"]
            assert (error["type"], error["message"], error["code"]) == (kind, text, status)
        assert (await call(client, load, {"lora_name": "sim", "lora_path": "/x"}, 400))["error"]["code"] == 400
        refused = await call(client, load, {"lora_name": "big", "lora_path": "/refused/big"}, 500)
        assert refused["error"]["type"] == "InternalServerError"
        assert refused["error"]["message"].startswith("Call to add_lora method failed: ")
        assert (await call(client, load, {"lora_name": "lb"}, 400))["error"]["type"] == "Bad Request"
        assert "added" in await call(client, load, lb | {"load_inplace": True})
        cards = (await call(client, "/v1/models"))["data"]
        assert [(card["id"], card["root"], card["parent"], card["max_model_len"]) for card in cards] == [
            ("sim", "sim", None, 4096),
            ("lb", "/adapters/lb", "sim", None),
        ]
        assert (await call(client, "/v1/completions", {"model": "lb", "prompt": "x"}))["model"] == "lb"
        assert await call(client, unload, {"lora_name": "lb"}) == "Success: LoRA adapter 'lb' removed successfully."
        await call(client, "/v1/completions", {"model": "lb", "prompt": "x"}, 404)


async def test_without_the_switch_adapters_cannot_be_loaded() -> None:
    """`VLLM_ALLOW_RUNTIME_LORA_UPDATING`: a plain 404 of a route that is none."""
    async with started(adapters=("tuned",)) as client:
        body = {"lora_name": "a", "lora_path": "/a"}
        assert await call(client, "/v1/load_lora_adapter", body, 404) == {"detail": "Not Found"}


async def test_a_restart_forgets_adapters_that_were_loaded() -> None:
    """Only what the engine was started with is there."""
    async with started(runtime_adapters=True, adapters=("tuned",)) as client:
        await call(client, "/v1/load_lora_adapter", {"lora_name": "lb", "lora_path": "/lb"})
        await call(client, "/sim/restart", {})
        await asyncio.sleep(0.1)
        assert [card["id"] for card in (await call(client, "/v1/models"))["data"]] == ["sim", "tuned"]


async def test_live_adapters_leave_a_series_for_each_set() -> None:
    """Both labels name the live adapters; the newest time is that of the set that is live now; idle is empty."""
    engine = EngineSettings(blocks=513, max_model_len=4096, max_loras=2)
    async with started(engine=engine, adapters=("a", "b")) as client:
        for name in ("a", "b"):
            await call(client, "/v1/completions", {"model": name, "prompt": "x", "max_tokens": 2})
        page = await call(client, "/metrics")
    series = dict(
        line.removeprefix("vllm:lora_requests_info").rsplit(" ", 1)
        for line in page.splitlines()
        if line.startswith("vllm:lora_requests_info")
    )
    labels = {
        name: f'{{max_lora="2",running_lora_adapters="{name}",waiting_lora_adapters="{name}"}}'
        for name in ("a", "b", "")
    }
    assert set(series) == set(labels.values())
    times = {name: float(series[label]) for name, label in labels.items()}
    assert times["a"] < times["b"] < times[""]


async def test_more_adapters_than_slots_wait_as_deferred() -> None:
    """The third of two slots waits, and later requests for an adapter that runs overtake it."""
    engine = EngineSettings(blocks=513, max_model_len=4096, max_loras=2)
    async with started(engine=engine, adapters=("a", "b", "c")) as client:
        await call(client, "/sim/slow", {"factor": 20.0})
        long = {"prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True}
        streams = [client.post("/v1/completions", json=long | {"model": name}) for name in ("a", "b", "c")]
        opened = await asyncio.gather(*streams)
        await call(client, "/v1/completions", {"model": "a", "prompt": "x", "max_tokens": 2})
        page = await call(client, "/metrics")
        for response in opened:
            response.close()
    labels = 'model_name="sim",engine="0"'
    assert f'vllm:num_requests_waiting_by_reason{{{labels},reason="deferred"}} 1.0' in page
    assert f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 0.0' in page
    assert f"vllm:num_requests_waiting{{{labels}}} 1.0" in page


def sleep_state(page: str) -> dict[str, str]:
    """The states of the sleep gauge that are 1."""
    lines = [line for line in page.splitlines() if line.startswith("vllm:engine_sleep_state{")]
    return {line.split('sleep_state="')[1].split('"')[0]: line.rsplit(" ", 1)[1] for line in lines}


@pytest.mark.parametrize(("level", "state"), [("0", "awake"), ("1", "weights_offloaded"), ("2", "discard_all")])
async def test_a_sleeping_engine_takes_requests_and_lets_them_hang(level: str, state: str) -> None:
    """No error: they are answered after it was woken. Its page tells."""
    body = {"prompt": "x" * 200, "max_tokens": 2}
    async with started(dev_mode=True) as client:
        await call(client, "/v1/completions", body)
        assert await call(client, f"/sleep?level={level}", {}) == {"status": "sleeping", "level": int(level)}
        assert await call(client, "/is_sleeping") == {"is_sleeping": True}
        states = sleep_state(await call(client, "/metrics"))
        assert states == dict.fromkeys(("awake", "weights_offloaded", "discard_all"), "0.0") | {state: "1.0"}
        hanging = asyncio.create_task(call(client, "/v1/completions", body))
        await settled(client, live=1)
        assert (await call(client, "/health")) == ""
        assert not hanging.done()
        assert await call(client, "/wake_up", {}) == {"status": "awake", "tags": None}
        answer = await hanging
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (48 if level == "0" else 0)
        assert await call(client, "/is_sleeping") == {"is_sleeping": False}
        assert sleep_state(await call(client, "/metrics"))["awake"] == "1.0"


@pytest.mark.parametrize("stream", [True, False])
async def test_falling_asleep_aborts_what_runs(stream: bool) -> None:
    """Status 200 and the reason "abort", with the tokens made so far; what it held is free."""
    async with started(dev_mode=True) as client:
        body = {"prompt": "x" * 200, "max_tokens": 3000, "ignore_eos": True, "stream": stream}

        async def ask() -> tuple[int, str]:
            async with client.post("/v1/completions", json=body) as response:
                return response.status, await response.text()

        await call(client, "/sim/slow", {"factor": 20.0})
        running = asyncio.create_task(ask())
        await settled(client, live=1, prompt_tokens=50)
        await call(client, "/sleep", {})
        status, text = await running
        assert status == 200
        assert text.count('"finish_reason":"abort"') == 1
        assert text.endswith("data: [DONE]\n\n") == stream
        whole = answer(padded(b"x" * 200), 3000).decode()
        if stream:
            events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
            said = "".join(event["choices"][0]["text"] for event in events)
        else:
            body = json.loads(text)
            said = body["choices"][0]["text"]
            assert len(said) == 4 * body["usage"]["completion_tokens"]
        assert len(said) < len(whole)
        assert whole.startswith(said)
        state = await settled(client, live=0)
        assert (state["blocks_free"], state["blocks_cached"]) == (512, 0)
        assert 'finished_reason="abort"} 1.0' in await call(client, "/metrics")


async def test_with_keep_what_runs_goes_on_after_waking() -> None:
    """`mode=keep`."""
    async with started(dev_mode=True) as client:
        body = {"prompt": "x" * 200, "max_tokens": 1000, "ignore_eos": True}
        await call(client, "/sim/freeze", {})
        running = asyncio.create_task(call(client, "/v1/completions", body))
        await settled(client, live=1)
        await call(client, "/sleep?level=0&mode=keep", {})
        await asyncio.sleep(0.05)
        assert not running.done()
        await call(client, "/wake_up", {})
        assert (await running)["choices"][0]["finish_reason"] == "length"


async def test_older_versions_answer_orders_without_a_body() -> None:
    """Up to 0.31 an empty 200."""
    async with started("vllm-0.23", dev_mode=True) as client:
        assert await call(client, "/sleep?level=1", {}) == ""
        assert await call(client, "/wake_up", {}) == ""
        assert await call(client, "/is_sleeping") == {"is_sleeping": False}


async def test_the_cache_can_be_reset_in_developer_mode_only() -> None:
    """`VLLM_SERVER_DEV_MODE`: without it there is neither this nor sleep."""
    async with started(dev_mode=True) as client:
        assert await call(client, "/reset_prefix_cache", {}) == {"success": True}
        assert (await call(client, "/sleep?level=7", {}, 400))["error"]["type"] == "Bad Request"
    async with started() as client:
        for path in ("/sleep", "/wake_up", "/reset_prefix_cache"):
            await call(client, path, {}, 404)
        await call(client, "/is_sleeping", status=404)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"profile": "vllm-9"}, "profile must be one of vllm-0.11, vllm-0.23, vllm-0.33, trtllm, sglang"),
        ({"dp_ranks": 0}, "dp_ranks must be at least 1"),
        ({"profile": "trtllm", "max_num_queued_reqs": 5}, "max_num_queued_reqs is unknown to trtllm"),
        ({"profile": "vllm-0.23", "max_num_queued_reqs": 5}, "max_num_queued_reqs is unknown to vllm-0.23"),
    ],
)
def test_settings_that_the_profile_does_not_have_are_refused(wrong: dict[str, Any], text: str) -> None:
    """Named, with what there is."""
    with pytest.raises(ValueError, match=text):
        SimSettings(**wrong)

"""Fitted bodies at simulated engines, which read and refuse as the real ones do: same request, every engine answers."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc.config_pools import EngineKind
from extproc.config_rollouts import ModelAdapter
from extproc.engines.fit import Wanted, fit
from extproc.sim.fleet import SimFleet
from extproc.sim.settings import EngineSettings, SimSettings

PROFILES: dict[EngineKind, str] = {"vllm": "vllm-0.33", "sglang": "sglang", "tensorrt_llm": "trtllm"}
SQL = ModelAdapter(name="sql", id=7, path="/adapters/sql")
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
PROMPTS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hello " * 40}]},
    "completion": {"prompt": "hello " * 40},
}
CLIENT: dict[str, Any] = {
    "model": "client's name",
    "max_tokens": 4,
    "stream": True,
    "priority": 3,
    "request_id": "r1",
    "session_id": "s1",
    "metadata": {"user_id": "u"},
    "return_token_ids": False,
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=sorted(PROFILES))
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[tuple[EngineKind, aiohttp.ClientSession]]:
    """One engine of each kind that serves `sim` and its adapter `sql`, with a client of it."""
    kind: EngineKind = request.param
    settings = SimSettings(
        engine=EngineSettings(blocks=256),
        profile=PROFILES[kind],
        adapters=("sql",),
        runtime_adapters=True,
        time_factor=50,
    )
    async with (
        SimFleet(1, settings) as fleet,
        aiohttp.ClientSession(f"http://{fleet.addresses[0]}") as client,
    ):
        yield kind, client


async def send(client: aiohttp.ClientSession, api: str, body: bytes) -> tuple[int, str]:
    """Status and text of the answer."""
    headers = {"content-type": "application/json"}
    async with client.post(PATHS[api], data=body, headers=headers) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize("adapter", [None, SQL])
@pytest.mark.parametrize("api", sorted(PATHS))
async def test_one_request_is_answered_by_every_engine(
    engine: tuple[EngineKind, aiohttp.ClientSession], api: str, adapter: ModelAdapter | None
) -> None:
    """The client's own body is refused by those that do not know its model or its fields; the fitted one by nobody."""
    kind, client = engine
    body = json.dumps(CLIENT | PROMPTS[api]).encode()
    fitted = fit(body, api, Wanted(kind, model="sim", adapter=adapter, usage=True))
    assert fitted is not None
    status, text = await send(client, api, fitted.body)
    assert status == 200, text
    assert '"usage":{' in text.replace(" ", "")
    if kind != "sglang":  # the model's name is not looked at there
        assert (await send(client, api, body))[0] >= 400
    assert fit(body, api, Wanted(kind)) is None or kind != "vllm"


async def test_an_adapter_has_a_cache_of_its_own(engine: tuple[EngineKind, aiohttp.ClientSession]) -> None:
    """So the engine did select it: what the base model has cached is not cached for the adapter, but then is."""
    kind, client = engine
    prompt = {"messages": [{"role": "user", "content": "a prompt of an adapter's own " * 40}]}
    body = json.dumps(CLIENT | prompt | {"stream": False}).encode()

    async def cached(adapter: ModelAdapter | None) -> int:
        fitted = fit(body, "chat", Wanted(kind, model="sim", adapter=adapter))
        assert fitted is not None
        status, text = await send(client, "chat", fitted.body)
        assert status == 200, text
        details = json.loads(text)["usage"]["prompt_tokens_details"]
        return int((details or {}).get("cached_tokens", 0))

    assert [await cached(None), await cached(SQL)] == [0, 0]
    assert await cached(None) > 0
    assert await cached(SQL) > 0

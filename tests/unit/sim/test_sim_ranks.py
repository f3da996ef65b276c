"""Data-parallel ranks behind one port: who serves what, and what the page says of each."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from extproc.sim.fleet import SimFleet
from extproc.sim.settings import EngineSettings, SimSettings

RANKS = 3


@pytest.fixture
async def client(request: pytest.FixtureRequest) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of an engine of three ranks; of vLLM unless the test names another profile."""
    profile = getattr(request, "param", "vllm-0.33")
    settings = SimSettings(
        profile=profile, engine=EngineSettings(blocks=129), dp_ranks=RANKS, time_factor=20.0, control=True
    )
    async with (
        SimFleet(1, settings) as fleet,
        aiohttp.ClientSession(f"http://{fleet.addresses[0]}") as session,
    ):
        yield session


async def ask(client: aiohttp.ClientSession, rank: str | None, status: int = 200) -> Any:
    """Ask for a completion, of a rank if one is named."""
    headers = {} if rank is None else {"X-data-parallel-rank": rank}
    body = {"model": "sim", "prompt": "x" * 320, "max_tokens": 2}
    async with client.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status == status
        return await response.json()


async def cached(client: aiohttp.ClientSession, rank: str | None) -> int:
    """Ask, and return how many tokens hit."""
    tokens: int = (await ask(client, rank))["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


@pytest.mark.parametrize("client", ["vllm-0.33", "sglang"], indirect=True)
async def test_each_rank_has_a_cache_of_its_own(client: aiohttp.ClientSession) -> None:
    """What one has computed is new to another."""
    assert [await cached(client, rank) for rank in ("0", "0", "2", "2", "1")] == [0, 64, 0, 64, 0]


async def test_a_rank_that_does_not_exist_is_refused(client: aiohttp.ClientSession) -> None:
    """400, as vLLM answers; a header that is no number is ignored."""
    for rank in ("3", "-1", "99"):
        error = (await ask(client, rank, 400))["error"]
        assert (error["type"], error["code"]) == ("BadRequestError", 400)
        assert error["message"] == f"data_parallel_rank {rank} is out of range [0, 3)."
    for rank in ("one", "", "1.5"):
        await ask(client, rank)


async def test_without_a_header_ranks_take_turns(client: aiohttp.ClientSession) -> None:
    """Three requests, one after the other, find three empty caches; the next three hit."""
    assert [await cached(client, None) for _ in range(2 * RANKS)] == [0, 0, 0, 64, 64, 64]


async def test_the_page_has_a_series_for_each_rank(client: aiohttp.ClientSession) -> None:
    """Label `engine`; what one rank did is not counted for the others."""
    await ask(client, "1")
    async with client.get("/metrics") as response:
        page = await response.text()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        for rank in range(RANKS):
            assert f'vllm:{name}{{model_name="sim",engine="{rank}"}} 0.0' in page
    counted = [f'vllm:prompt_tokens_total{{model_name="sim",engine="{rank}"}} ' for rank in range(RANKS)]
    values = [page.split(one, 1)[1].split("\n", 1)[0] for one in counted]
    assert values == ["0.0", "80.0", "0.0"]
    assert page.count("\nvllm:cache_config_info{") == RANKS


@pytest.mark.parametrize("client", ["sglang"], indirect=True)
async def test_sglang_labels_its_schedulers_with_their_rank(client: aiohttp.ClientSession) -> None:
    """Label `dp_rank` on the gauges, an entry each under `/v1/loads`, which can be asked for one."""
    async with client.get("/metrics") as response:
        page = await response.text()
    for rank in range(RANKS):
        labels = f'model_name="sim",engine_type="unified",tp_rank="0",pp_rank="0",moe_ep_rank="0",dp_rank="{rank}"'
        assert f"sglang:num_running_reqs{{{labels}}} 0.0" in page
    async with client.get("/v1/loads") as response:
        assert [load["dp_rank"] for load in (await response.json())["loads"]] == [0, 1, 2]
    async with client.get("/v1/loads", params={"dp_rank": "1"}) as response:
        assert [load["dp_rank"] for load in (await response.json())["loads"]] == [1]


@pytest.mark.parametrize("client", ["trtllm"], indirect=True)
async def test_tensorrt_llm_spreads_requests_by_itself(client: aiohttp.ClientSession) -> None:
    """It knows no header for ranks; its records tell of them."""
    assert [await cached(client, "0") for _ in range(2 * RANKS)] == [0, 0, 0, 64, 64, 64]
    async with client.get("/metrics") as response:
        assert {record["attentionDpRank"] for record in await response.json()} == {0, 1, 2}

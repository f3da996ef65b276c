"""LoRA adapters: who has them loaded, how each engine is told which one, and what keeps caches apart."""

import contextlib
import json
import random
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from extproc.sim.workload import text
from tests.acceptance.engines.stand import (
    PRECISE,
    RENDERER,
    Asked,
    Crew,
    Stand,
    body_of,
    crewed,
    rendered_by,
    renderer,
    standing,
)
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

RNG = random.Random(43)
KINDS = ("vllm-0.33", "sglang", "trtllm")
LISTING = ("vllm-0.33", "sglang")
DRAINED = "drained"
SALTED = (*LISTING, DRAINED)
ADAPTER = "sql-lora"
PATH = "/adapters/sql"
LOAD = {"vllm-0.33": "/v1/load_lora_adapter", "sglang": "/load_lora_adapter"}
ON_THE_WIRE = {"vllm-0.33": ADAPTER, "sglang": f"sglang:{ADAPTER}", "trtllm": "trtllm"}
"""The model that each engine is asked for; TensorRT-LLM gets a field of its own beside it."""


def sql(pool: str) -> str:
    """The model that is the adapter in a pool."""
    return f"sql-{pool}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(journal: Journal, folder: Path) -> AsyncIterator[Stand]:
    """One engine of each kind, and a second model of each pool: the adapter. Profiles are precise.

    TensorRT-LLM's events do not name adapters: the pool that has one gets no precise profile, and another one has none.
    """
    told = ("--kv-events", "--blocks", "4001", "--time-factor", "10")
    loaded = ("--adapter", ADAPTER, "--runtime-adapters")
    crews = [
        *(Crew(pool=kind, profile=kind, settings=PRECISE, arguments=(*told, *loaded)) for kind in LISTING),
        Crew(pool="trtllm", profile="trtllm", settings={"profiles": "precise"}, arguments=told),
        Crew(pool=DRAINED, profile="trtllm", arguments=told),
    ]
    adapter = {"name": ADAPTER, "id": 7, "path": PATH}
    models: dict[str, Mapping[str, Any]] = {sql(kind): {"pool": kind, "adapter": adapter} for kind in KINDS}
    async with contextlib.AsyncExitStack() as cleanup:
        engines = await cleanup.enter_async_context(crewed(journal, [*crews, renderer(DRAINED)]))
        crews[-1] = msgspec.structs.replace(crews[-1], settings=rendered_by(engines[RENDERER][0]))
        started = await cleanup.enter_async_context(standing(journal, folder, crews, engines, models=models))
        for kind in LISTING:

            async def described(kind: str = kind) -> bool:
                return all(state.adapters and state.sources for state in (await started.states(kind)).values())

            await until_async(described)
        for kind in SALTED:
            # TensorRT-LLM's profile begins with the first events.
            assert (await started.local.ask(CHAT, body_of(kind, "hello " * 40))).status == 200
            await started.in_step(kind)
        yield started


async def settled(here: Stand, pool: str, model: str, prompt: str, **fields: str) -> Asked:
    """Ask once, and wait until what the engine tells of it is known."""
    asked = await here.ask(model, prompt, None, **fields)
    if pool in SALTED:
        await here.in_step(pool)
    return asked


@pytest.mark.parametrize("kind", LISTING)
async def test_an_idle_adapter_is_known_to_be_loaded(here: Stand, kind: str) -> None:
    """Case E8: an adapter without requests is not active, and is resident all the same."""
    await here.idle(kind)

    async def inactive() -> bool:
        return all(not state.active_adapters for state in (await here.states(kind)).values())

    await until_async(inactive)
    assert all(ADAPTER in state.adapters for state in (await here.states(kind)).values())


@pytest.mark.parametrize("kind", LISTING)
async def test_an_adapter_that_is_loaded_while_the_engine_runs_is_seen(here: Stand, kind: str) -> None:
    """The list of models is read again and again: a new adapter is resident without a request for it."""
    told = {"lora_name": f"late-{kind}", "lora_path": "/adapters/late"}
    (engine,) = here.engines[kind]
    async with here.local.http.post(f"http://{engine.address}{LOAD[kind]}", json=told) as answer:
        assert answer.status == 200

    async def listed() -> bool:
        return all(f"late-{kind}" in state.adapters for state in (await here.states(kind)).values())

    await until_async(listed)


@pytest.mark.parametrize("kind", KINDS)
async def test_each_engine_is_told_of_the_adapter_in_its_own_way(here: Stand, kind: str) -> None:
    """One model with `adapter`: vLLM by its name, SGLang by `base:adapter`, TensorRT-LLM by `lora_request`.

    An engine that served the base model instead would find the base model's blocks.
    """
    prompt = text(RNG, 3000)
    await settled(here, kind, kind, prompt)
    assert (await settled(here, kind, kind, prompt)).reported > 0
    first = await settled(here, kind, sql(kind), prompt)
    assert first.answer.json["model"] == ON_THE_WIRE[kind]
    assert first.reported == 0
    assert (await settled(here, kind, sql(kind), prompt)).reported > 0
    completion = {"model": sql(kind), "prompt": prompt, "max_tokens": 2}
    answer = await here.local.ask("/v1/completions", json.dumps(completion).encode())
    assert (answer.status, answer.json["model"]) == (200, ON_THE_WIRE[kind])
    stream = await here.local.ask(CHAT, body_of(sql(kind), prompt, stream=True))
    assert stream.status == 200
    assert f'"model":"{ON_THE_WIRE[kind]}"'.encode() in stream.body.replace(b'": "', b'":"')
    assert (await here.page()).total("warmpath_fitted_requests_total", pool=kind, change="adapter") > 0


@pytest.mark.parametrize("kind", SALTED)
async def test_a_salt_keeps_prompts_apart(here: Stand, kind: str) -> None:
    """Case E6: the same prompt under another `cache_salt` is expected to find nothing, and finds nothing."""
    prompt = text(RNG, 3000)
    salts: list[dict[str, str]] = [{}, {"cache_salt": "tenant-a"}, {"cache_salt": "tenant-b"}]
    for salt in salts:
        first = await settled(here, kind, kind, prompt, **salt)
        assert (first.pick.matched_by, first.predicted, first.reported) == ("precise", 0.0, 0)
    for salt in salts:
        again = await settled(here, kind, kind, prompt, **salt)
        assert again.predicted == again.reported > 0


@pytest.mark.parametrize("kind", LISTING)
async def test_an_adapter_keeps_prompts_apart(here: Stand, kind: str) -> None:
    """Case E6: the same prompt under an adapter is expected to find nothing of the base model's, and the reverse."""
    prompts = {model: text(RNG, 3000) for model in (kind, sql(kind))}
    for model, prompt in prompts.items():
        await settled(here, kind, model, prompt)
    for model, other in ((kind, sql(kind)), (sql(kind), kind)):
        first = await settled(here, kind, model, prompts[other])
        assert (first.pick.matched_by, first.predicted, first.reported) == ("precise", 0.0, 0)
    for model in (kind, sql(kind)):
        for prompt in prompts.values():
            again = await settled(here, kind, model, prompt)
            assert again.predicted == again.reported > 0


async def test_blocks_of_an_adapter_are_not_taken_for_the_base_models_where_events_do_not_name_it(here: Stand) -> None:
    """TensorRT-LLM's events tell an adapter by the block's hash alone: where adapters are served they are not used."""
    prompt = text(RNG, 3000)
    assert (await here.ask(sql("trtllm"), prompt)).reported == 0
    await here.idle("trtllm")
    first = await here.ask("trtllm", prompt)
    assert (first.pick.matched_by, first.predicted, first.reported) == ("estimated", 0.0, 0)
    page = await here.keeper_page()
    assert not page.by_endpoint("warmpath_kv_profile_used", pool="trtllm")
    assert page.by_endpoint("warmpath_kv_profile_used", pool=DRAINED)

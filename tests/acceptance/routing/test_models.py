"""Models that nobody serves are refused, and bodies that cannot be read go where there is least to do."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.sim.workload import text
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, MODEL, POOL, Local, ask, chat_body, configuration, running, simulated
from tests.acceptance.routing.asking import at_workers, decide
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

OTHER = "other"
RNG = random.Random(23)
PATHS = (CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/rerank", "/v1/score")
UNREADABLE = {
    "no JSON": b"what is this?",
    "cut off": chat_body("a question that ends in the mid")[:-20],
    "no object": b'["a", "list"]',
    "no prompt": json.dumps({"model": MODEL, "max_tokens": 4}).encode(),
    "malformed messages": json.dumps({"model": MODEL, "messages": [{"role": 7}]}).encode(),
    "empty": b"",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(journal: Journal, folder: Path) -> AsyncIterator[Local]:
    """Two engines for one model and one for another."""
    async with simulated(journal, each=3, arguments=("--adapter", OTHER)) as engines:
        addresses = [one.address for one in engines]
        document = configuration({POOL: addresses[:2], OTHER: addresses[2:]})
        document["redis"] = {"timeout_ms": 2000}  # the choice is what is tested, not a store that looks slow
        async with running(journal, folder / "warmpath.yaml", document, engines) as started:
            yield started


@pytest.mark.parametrize("path", PATHS)
async def test_an_unknown_model_is_answered_404(local: Local, path: str) -> None:
    """In the shape of OpenAI's errors, with a reason that a machine can read, and no engine is bothered."""
    refused = await local.metric("warmpath_refusals_total", reason="unknown_model")
    taken = [await engine.prompt_tokens() for engine in local.engines]
    body = {"model": "nobody", "messages": [{"role": "user", "content": "hello"}], "prompt": "hello", "input": "hello"}
    answer = await local.ask(path, json.dumps(body).encode())
    assert answer.status == 404
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-warmpath-reason"] == "unknown_model"
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] == "The model `nobody` does not exist."
    assert error["code"] == 404
    assert await local.metric("warmpath_refusals_total", reason="unknown_model") == refused + 1
    assert [await engine.prompt_tokens() for engine in local.engines] == taken


async def test_names_of_unknown_models_reach_no_metric(local: Local) -> None:
    """Three hundred made-up models give none of them a series, by its name or otherwise."""
    await local.chat("hello", model="made-up")
    before = (await ask(local.http, local.stack.metrics_url, method="GET")).body
    answers = await asyncio.gather(*(local.chat("hello", model=f"made-up-{number}") for number in range(300)))
    after = (await ask(local.http, local.stack.metrics_url, method="GET")).body
    assert {answer.status for answer in answers} == {404}
    assert b"made-up" not in after
    # What else happens for the first time meanwhile, a scrape perhaps, adds a few.
    assert len(after.splitlines()) < len(before.splitlines()) + 300


async def test_each_model_goes_to_its_pool(local: Local) -> None:
    """And a request that names none to that of the first model."""
    for model, engines in ((MODEL, local.engines[:2]), (OTHER, local.engines[2:]), (None, local.engines[:2])):
        for _ in range(3):
            answer, engine = await local.chat_served(text(RNG, 100), model=model)
            assert answer.status == 200
            assert engine in engines


@pytest.mark.parametrize("kind", UNREADABLE)
async def test_a_body_that_cannot_be_read_goes_where_least_is_in_flight(local: Local, kind: str) -> None:
    """It fails no decision: the busy engine is spared, its answer is the engine's own, and it is counted."""
    content = UNREADABLE[kind]
    unread = await local.metric("warmpath_fallbacks_total", pool=POOL, rung="load_only")
    answer = await local.ask(CHAT, content)
    assert answer.status in {400, 422}
    assert "x-warmpath-reason" not in answer.headers
    async with busy(local) as taken, at_workers(local) as (worker,):
        told = [await decide(worker, content) for _ in range(5)]
    assert {one.endpoint for one in told} == {one.address for one in local.engines[:2]} - {taken}
    assert {one.cached_tokens for one in told} == {0}
    assert await local.metric("warmpath_fallbacks_total", pool=POOL, rung="load_only") == unread + 6
    for anomaly in ("failed_open", "unexpected", "unreadable"):
        assert await local.metric("warmpath_exchange_anomalies_total", kind=anomaly) == 0


@contextlib.asynccontextmanager
async def busy(local: Local) -> AsyncIterator[str]:
    """One engine of two has answers to generate for a while; yields its address."""
    engines = local.engines[:2]
    async with contextlib.AsyncExitStack() as frozen:
        for engine in engines:
            await frozen.enter_async_context(engine.frozen("engine"))
        session = f"busy-{RNG.random()}"
        asking = [asyncio.create_task(local.chat(f"{number}", session, max_tokens=40)) for number in range(4)]

        async def charged() -> bool:
            return await local.in_flight() == len(asking)

        await until_async(charged)
        (taken,) = [name for name, load in (await local.loads()).items() if load.running]
        yield taken
    await asyncio.gather(*asking)

"""An engine that restarted is not believed to hold what it held."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.sim.workload import text
from tests.acceptance.journal import Journal
from tests.acceptance.local import POOL, Engine, Local, configuration, running, simulated
from tests.acceptance.routing.asking import at_workers, decide_chat, seen
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKERS = 2
SCRAPE_S = 1.0
TOKENS, BLOCK = 800, 64
RNG = random.Random(17)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(journal: Journal, folder: Path) -> AsyncIterator[Local]:
    """Two engines behind two workers; engines are read once a second."""
    async with simulated(journal, each=2) as engines:
        telemetry = {"access_log_flush_ms": 10, "scrape_ms": int(1000 * SCRAPE_S)}
        document = configuration({POOL: [one.address for one in engines]}, telemetry=telemetry)
        document["gateway"]["sidecar"]["workers"] = WORKERS
        document["redis"] = {"timeout_ms": 2000}  # profiles are what is tested, not a store that looks slow
        async with running(journal, folder / "warmpath.yaml", document, engines) as started:
            yield started


async def held(local: Local, number: int) -> dict[Engine, list[str]]:
    """Prompts that engines were asked, by the engine; each of both has at least so many."""
    prompts: dict[Engine, list[str]] = {engine: [] for engine in local.engines}
    while min(map(len, prompts.values())) < number:
        prompt = text(RNG, TOKENS)
        prompts[(await seen(local, prompt)).engine].append(prompt)
    await asyncio.sleep(0.3)  # longer than a batch of deltas waits: every worker knows
    return prompts


async def test_a_restart_is_known_with_the_next_scrape(local: Local) -> None:
    """Its address is the same and its cache is gone: nothing is predicted there by any worker; the rest stays known."""
    prompts = await held(local, 6)
    restarted, other = local.engines
    struck = time.time()
    await restarted.control("restart", down_s=0.0)

    async def read() -> bool:
        return await local.metric("warmpath_engine_scraped_at_seconds", endpoint=restarted.address) > struck + 0.1

    await until_async(read)
    await asyncio.sleep(SCRAPE_S * 1.2)  # workers look at what was published as often as engines are read
    async with at_workers(local) as workers:
        for number, worker in enumerate(workers):
            gone = await decide_chat(worker, prompts[restarted][number] + " and more")
            kept = await decide_chat(worker, prompts[other][number] + " and more")
            assert gone.cached_tokens == 0
            assert (kept.endpoint, kept.cached_tokens >= TOKENS - BLOCK) == (other.address, True)
    again = await seen(local, prompts[restarted][2] + " and more")
    assert (again.predicted, again.reported) == (0, 0)
    stays = await seen(local, prompts[other][2] + " and more")
    assert stays.engine is other
    assert min(stays.predicted, stays.reported) >= TOKENS - BLOCK


async def test_what_is_computed_after_a_restart_is_known(local: Local) -> None:
    """The new profile fills like the first one, for every worker."""
    restarted = local.engines[0]
    await restarted.control("restart", down_s=0.0)
    await asyncio.sleep(2.4 * SCRAPE_S)
    prompts = await held(local, WORKERS)
    async with at_workers(local) as workers:
        for worker, prompt in zip(workers, prompts[restarted], strict=False):
            told = await decide_chat(worker, prompt + " and more")
            assert (told.endpoint, told.cached_tokens >= TOKENS - BLOCK) == (restarted.address, True)

"""Two hosts and one store: each source of events is read by one keeper, and workers know what any of them read."""

import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from extproc import inner
from extproc.choose.explain import CandidateCost
from extproc.sim.workload import text
from tests.acceptance import processes
from tests.acceptance.engines.curtain import Curtain, curtains
from tests.acceptance.engines.stand import (
    PRECISE,
    RENDERER,
    Crew,
    Page,
    body_of,
    crewed,
    matched,
    rendered_by,
    renderer,
    usages,
)
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, POOL, Answer, Engine
from tests.acceptance.state.replicas import Plan, Pools, Replica, Site, site
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

RNG = random.Random(59)
DRAINED = "drained"
BLOCK_TOKENS = 16
PUBLISHED = 4
EVENTS = "/kv_cache_events"


class Estate(msgspec.Struct, frozen=True):
    """Two hosts; a pool that publishes its events, and one whose events are taken out by reading."""

    here: Site
    engines: Mapping[str, list[Engine]]
    drains: list[Curtain]

    async def pages(self) -> dict[int, Page]:
        """The metrics page of each host that answers, by its number."""
        found = {}
        for host, replica in enumerate(self.here.replicas):
            with contextlib.suppress(aiohttp.ClientError):
                found[host] = Page((await replica.page("/metrics")).body)
        return found

    async def readers(self, pool: str) -> dict[str, list[int]]:
        """Which hosts read the events of each endpoint of a pool."""
        found: dict[str, list[int]] = {}
        for host, page in (await self.pages()).items():
            for endpoint in page.by_endpoint("warmpath_kv_events_in_step", pool=pool):
                found.setdefault(endpoint, []).append(host)
        return found

    async def shared_out(self) -> None:
        """Wait until each source is read by one host, and each host reads half of those that are published."""

        async def even() -> bool:
            published, drained = await self.readers(POOL), await self.readers(DRAINED)
            one_each = all(len(hosts) == 1 for hosts in [*published.values(), *drained.values()])
            hosts = sorted(host for (host, *_) in published.values())
            return one_each and hosts == [0, 0, 1, 1] and len(drained) == len(self.drains)

        await until_async(even)

    async def fill(self, pool: str, prompts: int = 12) -> dict[str, int]:
        """Ask for new prompts, one after the other; returns how much of each an engine then has in whole blocks."""
        made = {}
        for _ in range(prompts):
            prompt = text(RNG, 1500)
            answer = await self.ask(pool, prompt)
            assert answer.status == 200
            made[prompt] = (int(usages(answer)[-1]["prompt_tokens"]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return made

    async def known(self, replica: Replica, pool: str, prompts: Mapping[str, int]) -> None:
        """Wait until a host's worker expects these prompts in precise profiles, to the block."""

        async def so() -> bool:
            for prompt, held in prompts.items():
                found = (await expected(replica, pool, prompt)).values()
                if {each.matched_by for each in found} != {"precise"}:
                    return False
                if max(each.matched_tokens for each in found) != held:
                    return False
            return True

        await until_async(so)

    async def exact(self, replica: Replica, pool: str, prompts: Mapping[str, int]) -> None:
        """A host's worker expects these prompts where they are; asked again, each is found there."""
        await self.known(replica, pool, prompts)
        for prompt, held in prompts.items():
            answer = await self.ask(pool, prompt)
            assert usages(answer)[-1]["prompt_tokens_details"]["cached_tokens"] == held

    async def ask(self, pool: str, prompt: str) -> Answer:
        """Ask one question through the gateway."""
        return await self.here.front.ask(body_of(pool if pool == DRAINED else "sim", prompt))


async def expected(replica: Replica, pool: str, prompt: str) -> dict[str, CandidateCost]:
    """What each endpoint holds of a prompt, by the worker of a host. Asking changes nothing."""
    question = inner.Question(CHAT, {}, body_of(pool if pool == DRAINED else "sim", prompt))
    async with inner.channel(replica.worker_addresses()[0]) as channel:
        return matched(await inner.explain(channel, question))


def keeper(replica: Replica) -> int:
    """Process id of a host's keeper."""
    (found,) = [one.pid for one in processes.children(replica.child.pid) if " keeper " in one.command]
    return found


def worker(replica: Replica) -> int:
    """Process id of a host's worker."""
    (found,) = [one.pid for one in processes.children(replica.child.pid) if " worker " in one.command]
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def estate(journal: Journal, folder: Path) -> AsyncIterator[Estate]:
    """The site. Sessions and load do not matter here: whoever holds the prompt is cheapest by far."""
    arguments = ("--kv-events", "--blocks", "6001", "--time-factor", "10")
    crews = [
        Crew(pool=POOL, profile="vllm-0.33", each=PUBLISHED, arguments=(*arguments, "--model", "sim")),
        Crew(pool=DRAINED, profile="trtllm", each=2, arguments=arguments),
    ]
    sections: dict[str, Any] = {
        "redis": {"timeout_ms": 2000, "hold_ms": 1000},
        "gateway": {"message_timeout_ms": 20_000},
        "routing": {"ramp_s": 0.0},
    }
    async with contextlib.AsyncExitStack() as cleanup:
        engines = await cleanup.enter_async_context(crewed(journal, [*crews, renderer(DRAINED)]))
        sections["pools"] = {POOL: PRECISE, DRAINED: rendered_by(engines[RENDERER][0])}
        drains = await cleanup.enter_async_context(curtains(engines[DRAINED], (EVENTS,)))
        pools: Pools = {POOL: engines[POOL], DRAINED: drains}
        here = await cleanup.enter_async_context(site(journal, folder, pools, Plan(envoys=[()], sections=sections)))
        yield Estate(here, engines, drains)


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def whole(estate: Estate) -> AsyncIterator[None]:
    """Every test begins with all hosts at work, sources shared out, and something in every cache."""
    for replica in estate.here.replicas:
        if not await replica.takes_requests():
            await replica.stop()
            await replica.start()
    await estate.here.well()
    await estate.fill(POOL)
    await estate.fill(DRAINED, 4)
    await estate.shared_out()
    yield


async def test_each_source_is_read_by_one_keeper(estate: Estate) -> None:
    """Each host reads half of the sources, and the workers of both know all engines to the block."""
    prompts = {pool: await estate.fill(pool, 4) for pool in (POOL, DRAINED)}
    for replica in estate.here.replicas:
        for pool, asked in prompts.items():
            await estate.exact(replica, pool, asked)
    readers = await estate.readers(POOL)
    assert sorted(len(hosts) for hosts in readers.values()) == [1] * PUBLISHED


@pytest.mark.parametrize("part", ["keeper", "host"])
async def test_another_keeper_takes_over(estate: Estate, part: str) -> None:
    """SIGKILL of a keeper, or of its whole host: its sources are read by the other, and all is known exactly again.

    TensorRT-LLM's events are never taken out by two keepers by turns.
    """
    doomed, survivor = estate.here.replicas
    prompts = {pool: await estate.fill(pool, 4) for pool in (POOL, DRAINED)}
    since = [len(one.readers) for one in estate.drains]
    if part == "host":
        await doomed.kill()

        async def alone() -> bool:
            return list((await estate.readers(POOL)).values()) == [[1]] * PUBLISHED

        await until_async(alone)
    else:
        os.kill(keeper(doomed), signal.SIGKILL)
        await estate.here.well()
        await estate.shared_out()
    await estate.exact(survivor, POOL, prompts[POOL])
    # Of events that were taken out and not told, nothing can be had again; what comes from now on is known.
    await estate.exact(survivor, DRAINED, await estate.fill(DRAINED, 4))
    for one, first in zip(estate.drains, since, strict=True):
        turns = [reader for reader, _ in groupby(one.readers[first:])]
        assert len(turns) == len(set(turns)), "two keepers took events out by turns"


async def test_a_worker_that_comes_back_knows_all_without_asking_engines(estate: Estate) -> None:
    """SIGKILL of a worker: the next one has precise profiles by snapshot and feed, and no engine replays anything."""
    replica = estate.here.replicas[0]
    prompts = {pool: await estate.fill(pool, 4) for pool in (POOL, DRAINED)}

    async def replays() -> float:
        names = ("replays", "gaps", "gap", "restart")
        pages = await estate.pages()
        return sum(page.total("warmpath_kv_event_faults_total", kind=name) for page in pages.values() for name in names)

    for pool, asked in prompts.items():
        await estate.known(replica, pool, asked)
    before, killed = await replays(), worker(replica)
    os.kill(killed, signal.SIGKILL)

    async def back() -> bool:
        found = [one.pid for one in processes.children(replica.child.pid) if " worker " in one.command]
        return found not in ([], [killed]) and await replica.well()

    await until_async(back)
    for pool, asked in prompts.items():
        await estate.exact(replica, pool, asked)
    assert await replays() == before


async def test_a_host_that_starts_late_knows_all(estate: Estate) -> None:
    """A host stops, prompts come meanwhile, it starts: once ready, its worker has the precise profiles."""
    late = estate.here.replicas[0]
    assert await late.stop() == 0
    prompts = await estate.fill(POOL, 4)
    await estate.known(estate.here.replicas[1], POOL, prompts)
    await late.start()
    await estate.here.well()
    await estate.exact(late, POOL, prompts)

"""Precise profiles: what a decision expects in an engine's cache is what the engine then reports, to the token."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from tests.acceptance.engines.stand import (
    PRECISE,
    RENDERER,
    Crew,
    Stand,
    body_of,
    crewed,
    rendered_by,
    renderer,
    standing,
)
from tests.acceptance.engines.talks import Talks, Tried, line, worst
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT
from tests.ports import free_ports
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

REQUESTS = 300
DRAINED = 100
LEAST_EXACT = 0.99
BLOCKS = 201
"""Blocks of 16 tokens of an engine: fewer than the conversations need that are open."""
OLD = "vllm-0.23"
KINDS = (OLD, "vllm-0.33", "sglang")
TRTLLM = "trtllm"
ARGUMENTS = ("--kv-events", "--blocks", str(BLOCKS), "--time-factor", "20")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(journal: Journal, folder: Path) -> AsyncIterator[Stand]:
    """Engines of each kind with small caches. vLLM before 0.31 does not tell where its events are: the pool says it."""
    port, replay = free_ports(2)
    events = {"endpoint": f"tcp://*:{port}", "replay": f"tcp://*:{replay}"}
    crews = [
        Crew(
            pool=OLD,
            profile=OLD,
            settings={**PRECISE, "events": events},
            arguments=(*ARGUMENTS, "--kv-port", str(port), "--kv-replay-port", str(replay)),
        ),
        *(Crew(pool=kind, profile=kind, each=2, settings=PRECISE, arguments=ARGUMENTS) for kind in KINDS[1:]),
        Crew(pool=TRTLLM, profile=TRTLLM, each=2, arguments=ARGUMENTS),
    ]
    async with contextlib.AsyncExitStack() as cleanup:
        engines = await cleanup.enter_async_context(crewed(journal, [*crews, renderer(TRTLLM)]))
        crews[-1] = msgspec.structs.replace(crews[-1], settings=rendered_by(engines[RENDERER][0]))
        started = await cleanup.enter_async_context(standing(journal, folder, crews, engines))
        for kind in (*KINDS, TRTLLM):

            async def used(kind: str = kind) -> bool:
                assert (await started.local.ask(CHAT, body_of(kind, "hello " * 40))).status == 200
                return (await started.keeper_page()).total("warmpath_kv_profile_used", pool=kind) == len(engines[kind])

            await until_async(used)
        yield started


async def test_predictions_are_exact(here: Stand, measured: list[str]) -> None:
    """Of 300 requests of each kind, 99 % are predicted to the token: shared prefixes, further turns, evictions.

    vLLM 0.23 writes its events as arrays, 0.33 as maps, and SGLang's hashes have a sign.
    """
    tried = await asyncio.gather(*(Talks(here, kind, 1).compare(REQUESTS) for kind in KINDS))
    measured.append("\n".join(line(kind, each) for kind, each in zip(KINDS, tried, strict=True)))
    for kind, each in zip(KINDS, tried, strict=True):
        assert each.stored > 4 * 2 * BLOCKS * 16, "hardly anything was evicted"
        assert each.hits > REQUESTS / 4
        assert each.exact >= LEAST_EXACT * REQUESTS, f"{line(kind, each)}; {worst(each.off)}"
    page = await here.keeper_page()
    for kind in KINDS:
        assert page.total("warmpath_kv_events_total", pool=kind, kind="stored") > 0
        assert page.total("warmpath_kv_events_total", pool=kind, kind="removed") > 0
        assert page.total("warmpath_kv_event_faults_total", pool=kind) == page.total(
            "warmpath_kv_event_faults_total", pool=kind, kind="replays"
        )
        assert page.total("warmpath_kv_blocks_left_out_total", pool=kind) == 0


async def test_predictions_by_drained_events_are_exact_once_they_are_known(here: Stand, measured: list[str]) -> None:
    """TensorRT-LLM's events are had by asking for them, up to half a second late; then predictions are exact too."""
    tried: Tried = await Talks(here, TRTLLM, 1).compare(DRAINED)
    measured.append(line(TRTLLM, tried))
    assert tried.hits > DRAINED / 4
    assert tried.exact >= LEAST_EXACT * DRAINED, f"{line(TRTLLM, tried)}; {worst(tried.off)}"

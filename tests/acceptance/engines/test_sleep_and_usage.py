"""A sleeping engine is never picked; streams report usage when the pool is told to ask for it."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.sim.workload import text
from tests.acceptance.engines.stand import Crew, Stand, body_of, stand, usages
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, Answer, Engine
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

RNG = random.Random(53)
SLEEPY = ("vllm-0.11", "vllm-0.33")
ASKING, SILENT, TRT_ASKING = "asking", "silent", "trt-asking"
SEEN = 8
"""Reported answers of one form that are seen before others are counted by them."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(journal: Journal, folder: Path) -> AsyncIterator[Stand]:
    """Two engines that can sleep of an old and a new vLLM; pools that ask for usage, and one that does not."""
    usage = {"ask_usage": True}
    crews = [
        *(Crew(pool=kind, profile=kind, each=2, arguments=("--dev-mode",)) for kind in SLEEPY),
        Crew(pool=ASKING, profile="vllm-0.33", settings=usage),
        Crew(pool=TRT_ASKING, profile="trtllm", settings=usage),
        Crew(pool=SILENT, profile="vllm-0.33"),
    ]
    async with stand(journal, folder, crews, routing={"ramp_s": 0.0}) as started:
        yield started


async def order(here: Stand, engine: Engine, path: str) -> None:
    """Tell an engine to sleep, or to wake up."""
    async with here.local.http.post(f"http://{engine.address}{path}") as answer:
        assert answer.status == 200


async def picks(here: Stand, pool: str, number: int = 16) -> Counter[str]:
    """Who serves so many prompts that nobody has seen, all at once."""
    bodies = [body_of(pool, text(RNG, 300)) for _ in range(number)]
    answers = await asyncio.gather(*(here.local.ask(CHAT, body) for body in bodies))
    assert {answer.status for answer in answers} == {200}
    return Counter([(await here.decision(answer)).pick for answer in answers])


@pytest.mark.parametrize("pool", SLEEPY)
@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleeping_engine_is_never_picked(here: Stand, pool: str, level: int) -> None:
    """It would take requests and let them hang: once its page says that it sleeps, all go to the other, pins included.

    It is picked again after it woke up.
    """
    asleep, awake = here.engines[pool]
    pinned = [f"session {number}" for number in range(8)]
    for session in pinned:
        answer = await here.local.ask(CHAT, body_of(pool, f"{session}, " * 60), {"x-session-id": f"{level} {session}"})
        assert answer.status == 200
    await order(here, asleep, f"/sleep?level={level}")

    async def known(asleep_now: bool) -> bool:
        expected = await here.expected(pool, "who is awake?")
        return (expected[asleep.address].dropped == "asleep") is asleep_now

    await until_async(lambda: known(True))
    assert await picks(here, pool) == {awake.address: 16}
    for session in pinned:
        answer = await here.local.ask(CHAT, body_of(pool, f"{session}, " * 60), {"x-session-id": f"{level} {session}"})
        assert (answer.status, (await here.decision(answer)).pick) == (200, awake.address)
    assert (await here.keeper_page()).by_endpoint("warmpath_engine_asleep", pool=pool)[asleep.address] == 1
    assert await asleep.live() == 0
    await order(here, asleep, "/wake_up")
    await until_async(lambda: known(False))

    async def serves() -> bool:
        return (await picks(here, pool))[asleep.address] > 0

    await until_async(serves)


def stream(pool: str, **fields: object) -> bytes:
    """Body of a streamed chat that nobody has seen."""
    return body_of(pool, text(RNG, 200), stream=True, **fields)


async def sources(here: Stand, pool: str) -> dict[str, float]:
    """Answers of a pool by where their tokens are known from."""
    page = await here.page()
    kinds = ("engine", "asked", "counted", "none")
    return {kind: page.total("warmpath_usage_total", pool=pool, source=kind) for kind in kinds}


async def counted(here: Stand, pool: str, body: bytes, path: str = CHAT) -> tuple[Answer, str]:
    """Ask, and tell where the answer's tokens are known from."""
    before = await sources(here, pool)
    answer = await here.local.ask(path, body)
    assert answer.status == 200, answer.body

    async def told() -> bool:
        return await sources(here, pool) != before

    await until_async(told)
    after = await sources(here, pool)
    (grown,) = [kind for kind in after if after[kind] > before[kind]]
    return answer, grown


@pytest.mark.parametrize("pool", [ASKING, TRT_ASKING])
async def test_usage_is_asked_for_on_streams_of_clients_that_did_not(here: Stand, pool: str) -> None:
    """Case E13: a stream without the option reports usage, by Warmpath's doing; what the client said is left alone.

    Without a stream nothing is added: engines refuse the option there.
    """
    answer, source = await counted(here, pool, stream(pool))
    assert (source, len(usages(answer))) == ("asked", 1)
    answer, source = await counted(here, pool, stream(pool, stream_options={"include_usage": True}))
    assert (source, len(usages(answer))) == ("engine", 1)
    answer, source = await counted(here, pool, stream(pool, stream_options={"include_usage": False}))
    assert (source in {"counted", "none"}, usages(answer)) == (True, [])
    answer, source = await counted(here, pool, body_of(pool, text(RNG, 200)))
    assert (source, len(usages(answer))) == ("engine", 1)
    completion = {"model": pool, "prompt": text(RNG, 200), "max_tokens": 4, "stream": True}
    answer, source = await counted(here, pool, json.dumps(completion).encode(), "/v1/completions")
    assert (source, len(usages(answer))) == ("asked", 1)
    assert (await here.page()).total("warmpath_fitted_requests_total", pool=pool, change="usage") == 2


async def test_usage_is_counted_where_nobody_asks(here: Stand) -> None:
    """A pool that is not told to ask leaves streams as they are; tokens are counted by bytes once a form is known."""
    answer, source = await counted(here, SILENT, stream(SILENT))
    assert (source, usages(answer)) == ("none", [])
    for length in range(10, 10 + SEEN):
        body = stream(SILENT, stream_options={"include_usage": True}, max_tokens=length)
        assert (await counted(here, SILENT, body))[1] == "engine"
    answer, source = await counted(here, SILENT, stream(SILENT, max_tokens=12))
    assert (source, usages(answer)) == ("counted", [])
    page = await here.page()
    assert page.total("warmpath_fitted_requests_total", pool=SILENT, change="usage") == 0
    assert page.total("warmpath_counted_output_tokens_total", pool=SILENT) == pytest.approx(12, abs=1)

"""Engines killed in the middle of a stream: the client receives what an undisturbed engine would have sent."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest
import pytest_asyncio

from tests.acceptance.governance.relayed import (
    CHAT,
    COMPLETIONS,
    PATIENT,
    counts,
    request,
    server_of,
    streaming,
    undisturbed,
)
from tests.acceptance.journal import Journal
from tests.acceptance.local import MODEL, POOL, Engine, Local, configuration, running, simulated
from tests.ports import free_port
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINES = 4
POSITIONS = 20
TOKENS = POSITIONS + 4
STEP_MS = "25"


class Site(NamedTuple):
    """A stack, and engines that may be killed."""

    local: Local
    engines: list[Engine]
    returning: list[asyncio.Task[None]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(journal: Journal, folder: Path) -> AsyncIterator[Site]:
    """Four engines, a process and a port of its own each, behind a stack with a relay."""
    async with contextlib.AsyncExitStack() as stack:
        engines = []
        for _ in range(ENGINES):
            arguments = ("--port", str(free_port()), "--profile", "vllm-0.33", "--step-ms", STEP_MS)
            engines += await stack.enter_async_context(simulated(journal, arguments=arguments))
        document = configuration({POOL: [one.address for one in engines]}, relay={"enabled": True}, **PATIENT)
        local = await stack.enter_async_context(running(journal, folder / "warmpath.yaml", document, engines))
        yield Site(local, engines, [])


async def kill(site: Site, engine: Engine) -> None:
    """SIGKILL; it comes back by itself, at the same address and with an empty cache."""
    engine.process.send(signal.SIGKILL)
    await engine.process.wait()
    site.returning.append(asyncio.create_task(engine.process.start()))


async def all_back(site: Site) -> None:
    """Wait until every engine answers again."""
    await asyncio.gather(*site.returning)
    site.returning.clear()

    async def healthy() -> bool:
        for engine in site.engines:
            try:
                async with site.local.http.get(f"http://{engine.address}/health") as answer:
                    if answer.status != 200:
                        return False
            except aiohttp.ClientError:
                return False
        return True

    await until_async(healthy)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_engine_may_be_killed_at_any_of_twenty_positions(site: Site, path: str) -> None:
    """Text and usage are those of the undisturbed answer; one id, one role, one finish reason, one end."""
    body = request(path, "Tell me of the ship that sailed on without her crew.", MODEL, TOKENS)
    expected = await undisturbed(site.local, path, body)
    assert expected.usage["completion_tokens"] == TOKENS
    before = await site.local.metric("warmpath_relay_requests_total", outcome="continued")
    for position in range(1, POSITIONS + 1):
        async with streaming(site.local, path, body) as stream:
            serving = await server_of(site.engines)
            await stream.tokens(position)
            await kill(site, serving)
            await stream.rest()
        assert stream.text == expected.text, position
        assert stream.done
        assert stream.form == (1, int(path == CHAT), ["length"])
        assert [counts(one) for one in stream.usages] == [expected.usage]
        if position % 2 == 0:
            await all_back(site)
    await all_back(site)
    assert await site.local.metric("warmpath_relay_requests_total", outcome="continued") - before == POSITIONS


async def test_an_engine_may_be_killed_before_its_first_token(site: Site) -> None:
    """Nothing of the answer was sent, though its head may have been: the whole request moves."""
    await all_back(site)
    for tools in ({}, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
        body = request(CHAT, "long " * 8000, MODEL, TOKENS, **tools)
        expected = await undisturbed(site.local, CHAT, body)
        for engine in site.engines:
            await engine.control("reset_prefix_cache")
        sending = asyncio.create_task(_text(site.local, body))
        await kill(site, await server_of(site.engines))
        assert await sending == expected.text
        await all_back(site)


async def _text(local: Local, body: dict[str, object]) -> str:
    async with streaming(local, CHAT, body) as stream:
        await stream.rest()
        assert stream.done
        return stream.text


async def test_an_answer_in_one_piece_survives_its_engine(site: Site) -> None:
    """The client of a whole answer sees none of it."""
    await all_back(site)
    body = request(CHAT, "Whole and in one piece.", MODEL, TOKENS)
    expected = await undisturbed(site.local, CHAT, body)
    whole = {name: value for name, value in body.items() if not name.startswith("stream")}
    asking = asyncio.create_task(
        site.local.http.post(f"{site.local.url}{CHAT}", json=whole, headers={"x-warmpath-relay": "1"})
    )
    await kill(site, await server_of(site.engines))
    async with await asking as answer:
        told = await answer.json()
    assert told["choices"][0]["message"]["content"] == expected.text
    assert counts(told["usage"]) == expected.usage
    await all_back(site)


async def test_every_try_is_settled(site: Site) -> None:
    """Charges of lost tries and of their continuations end with the streams."""

    async def idle() -> bool:
        return await site.local.in_flight() == 0

    await until_async(idle)
    assert await site.local.metric("warmpath_relay_open") == 0
    assert await site.local.metric("warmpath_relay_held_bytes") == 0

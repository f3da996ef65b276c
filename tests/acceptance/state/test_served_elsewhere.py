"""The endpoint that was picked refuses connections and another one serves: what is known follows the request there."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from tests.acceptance.journal import Journal
from tests.acceptance.local import POOL, Engine, chat_body, simulated
from tests.acceptance.routing.asking import decide_chat
from tests.acceptance.state.replicas import Plan, Replica, Site, site
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

SESSIONS = 6
OPENING = "what was said so far, " * 120


class Ward(msgspec.Struct, frozen=True):
    """Two replicas behind an Envoy, and engines whose keepers look away: only a request finds out that one is gone."""

    here: Site
    engines: list[Engine]

    async def turn(self, prompt: str, session: str) -> Engine:
        """One turn while nobody else asks; returns who served it once its answer was learnt from."""
        told = await self.here.metric("warmpath_access_log_entries_total")
        before = [await engine.prompt_tokens() for engine in self.engines]
        assert (await self.here.front.chat(prompt, session)).status == 200
        after = [await engine.prompt_tokens() for engine in self.engines]
        [served] = [one for one, then, now in zip(self.engines, before, after, strict=True) if now > then]

        async def learnt() -> bool:
            return await self.here.metric("warmpath_access_log_entries_total") > told

        await until_async(learnt)
        return served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ward(journal: Journal, folder: Path) -> AsyncIterator[Ward]:
    """The site."""
    async with simulated(journal, each=3) as engines:
        sections = {"redis": {"timeout_ms": 2000}, "telemetry": {"scrape_ms": 60_000, "access_log_flush_ms": 10}}
        async with site(journal, folder, {POOL: engines}, Plan(envoys=[()], sections=sections)) as here:
            yield Ward(here, engines)


async def test_what_is_known_follows_a_request_to_who_serves_it(ward: Ward) -> None:
    """Charge, session and profile: while it runs, who serves it is charged, and the endpoint that was picked is not.

    The next turn, at whichever replica, goes to who served the last one, and finds it cached.
    """
    said = {f"moves-{number}": f"{number}: {OPENING}" for number in range(SESSIONS)}
    first = {session: await ward.turn(prompt, session) for session, prompt in said.items()}
    lost = first["moves-0"]
    await lost.control("restart", down_s=600.0)
    others = [one for one in ward.engines if one is not lost]
    for session in [session for session, engine in first.items() if engine is lost]:
        body = chat_body(f"{said[session]} and more", stream=True)
        async with contextlib.AsyncExitStack() as frozen:
            for engine in others:
                await frozen.enter_async_context(engine.frozen("engine"))
            asking = asyncio.create_task(ward.here.front.ask(body, {"x-session-id": session}))
            await until_async(partial(_is_charged_to_who_serves, ward, others))
            [served] = [one.address for one in others if await one.live()]
        assert (await asking).body.endswith(b"data: [DONE]\n\n")
        await ward.here.books.holds(0)
        for replica in ward.here.replicas:
            await until_async(partial(_follows, replica, f"{said[session]} and more still", session, served))
    await ward.here.books.holds(0)


async def _is_charged_to_who_serves(ward: Ward, engines: Sequence[Engine]) -> bool:
    charged = {name: load.running for name, load in (await ward.here.books.loads()).items()}
    serving = [one.address for one in engines if await one.live()]
    return len(serving) == 1 and {name: number for name, number in charged.items() if number} == {serving[0]: 1}


async def _follows(replica: Replica, prompt: str, session: str, endpoint: str) -> bool:
    """Whether a replica sends the next turn there, by the session's pin, and expects its beginning in the cache."""
    async with replica.as_gateway() as worker:
        told = await decide_chat(worker, prompt, session)
    return (told.endpoint, told.pinned, told.cached_tokens > 0.8 * told.prompt_tokens) == (endpoint, True, True)

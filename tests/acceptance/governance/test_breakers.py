"""Breakers on a whole stack: two workers, a real Valkey and Envoy, and engines that misbehave as they are told."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
import redis.asyncio

from tests.acceptance.journal import Journal
from tests.acceptance.local import Local, chat_body, configuration, running
from tests.bad_engine import BadEngine, Behave
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

AT_ONCE = 8

OPEN_S = 1.0
_RULES = {"strikes": 5, "open_s": OPEN_S, "max_open_s": 4.0, "slow_factor": 5.0, "slow_least_s": 0.3}


class Fleet:
    """The stack and its four engines."""

    def __init__(self, local: Local, engines: Sequence[BadEngine]) -> None:
        self.local = local
        self.engines = engines
        self._asked = 0

    async def chats(self, number: int) -> Counter[int]:
        """Send so many streamed chats, each with a prompt of its own; how often each status came, 0 for a cut."""
        statuses, turns = Counter[int](), asyncio.Semaphore(AT_ONCE)

        async def one(prompt: str) -> None:
            async with turns:
                try:
                    answer = await self.local.ask(body=chat_body(prompt, stream=True))
                except aiohttp.ClientError:
                    statuses[0] += 1
                else:
                    statuses[answer.status] += 1

        self._asked += number
        await asyncio.gather(*(one(f"{self._asked + at} is a number of its own") for at in range(number)))
        return statuses

    @contextlib.asynccontextmanager
    async def behaving(self, behave: Behave, *which: int) -> AsyncIterator[None]:
        """Let some engines misbehave for a while, and wait then until all are in use again."""
        for index in which:
            self.engines[index].behave = behave
        try:
            yield
        finally:
            for index in which:
                self.engines[index].behave = Behave()
            await self.all_closed()

    @contextlib.asynccontextmanager
    async def ill(self, behave: Behave, index: int) -> AsyncIterator[None]:
        """Let one engine misbehave for a while; nobody waits until it is in use again."""
        self.engines[index].behave = behave
        try:
            yield
        finally:
            self.engines[index].behave = Behave()

    async def flush(self) -> None:
        """Delete all that is in the store."""
        url = self.local.stack.config.redis.url
        assert url is not None
        async with redis.asyncio.Redis.from_url(url) as client:
            await client.flushall()

    async def opened_at(self, index: int) -> float:
        """How often the breaker of an engine was seen to open, over both workers."""
        return await self.local.metric("warmpath_breaker_openings_total", endpoint=self.engines[index].address)

    def taken(self) -> list[int]:
        """Requests that each engine has had so far."""
        return [len(engine.received) for engine in self.engines]

    async def opened(self) -> float:
        """How often breakers were seen to open, over both workers."""
        return await self.local.metric("warmpath_breaker_openings_total")

    async def all_closed(self) -> None:
        """Wait until every worker sees every breaker closed, while requests try those that are half open."""

        async def closed() -> bool:
            await self.chats(AT_ONCE)
            return await self.local.metric("warmpath_breaker_open") == 0.0

        await until_async(closed)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(journal: Journal, folder: Path) -> AsyncIterator[Fleet]:
    """One stack for all tests of this file; every test leaves its engines healthy and their breakers closed."""
    async with contextlib.AsyncExitStack() as cleanup:
        engines = [await cleanup.enter_async_context(BadEngine()) for _ in range(4)]
        document = configuration(
            {"main": [engine.address for engine in engines]},
            gateway={"sidecar": {"workers": 2}, "message_timeout_ms": 20_000},
            redis={"timeout_ms": 2000},
            breakers=_RULES,
        )
        local = await cleanup.enter_async_context(running(journal, folder / "warmpath.yaml", document))
        yield Fleet(local, engines)


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_refused_prompts_open_nothing(fleet: Fleet, status: int) -> None:
    """Case D3: a hundred bad requests say nothing of the engines."""
    before = await fleet.opened()
    async with fleet.behaving(Behave(status=status), 0, 1, 2, 3):
        assert await fleet.chats(100) == {status: 100}
    assert await fleet.opened() == before


async def test_an_engine_without_room_is_avoided_and_not_ejected(fleet: Fleet) -> None:
    """Case D3: 503 moves on to the next endpoint of the list, and its endpoint gets less than its share.

    Of two workers, the one that Envoy's log tells avoids it; the other goes by the gauges, which do not move here.
    """
    before, taken = await fleet.opened(), fleet.taken()
    async with fleet.behaving(Behave(status=503), 0):
        assert await fleet.chats(200) == {200: 200}
        shares = [now - then for now, then in zip(fleet.taken(), taken, strict=True)]
        assert shares[0] < sum(shares[1:]) / len(shares[1:]), shares
    assert await fleet.opened() == before


@pytest.mark.parametrize(
    "behave",
    [
        Behave(hang_up=True),
        Behave(hang_up=True, how="close"),
        Behave(garbage=True),
        Behave(status=500),
        Behave(status=502),
        Behave(cut_at=150),
    ],
    ids=["reset", "closed", "garbage", "500", "502", "cut"],
)
async def test_five_failures_leave_an_engine_alone_until_it_is_well(fleet: Fleet, behave: Behave) -> None:
    """Cases D3 and D4: broken connections, 5xx and cut answers open the breaker; the engine returns by itself."""
    before, taken = await fleet.opened(), fleet.taken()[0]
    async with fleet.behaving(behave, 0):

        async def opened() -> bool:
            await fleet.chats(AT_ONCE)
            return await fleet.opened() > before

        await until_async(opened)
        statuses = await fleet.chats(60)
        # Of these, only single probes go to it; Envoy moves on where nothing was answered yet.
        assert statuses[200] >= 50, statuses
    taken = fleet.taken()[0]

    async def in_use() -> bool:
        await fleet.chats(AT_ONCE)
        return fleet.taken()[0] > taken

    await until_async(in_use)


async def test_an_answer_that_its_engine_broke_off_is_told_from_a_whole_one(fleet: Fleet) -> None:
    """Its status was 200 long before: it counts as cut, and not as one that went well."""
    cut = await fleet.local.metric("warmpath_requests_total", outcome="cut")
    async with fleet.behaving(Behave(cut_at=150), 0, 1, 2, 3):
        assert await fleet.chats(8) == {0: 8}

        async def counted() -> bool:
            return await fleet.local.metric("warmpath_requests_total", outcome="cut") >= cut + 8

        await until_async(counted)


async def test_a_stopped_engine_costs_no_request_and_returns(fleet: Fleet) -> None:
    """Case D4: connections are refused, other endpoints answer; started again, it is used again."""
    async with fleet.engines[0].stopped():
        assert await fleet.chats(60) == {200: 60}
        taken = fleet.taken()[0]
    await fleet.all_closed()

    async def in_use() -> bool:
        await fleet.chats(AT_ONCE)
        return fleet.taken()[0] > taken

    await until_async(in_use)


async def test_a_flushed_store_forgets_an_open_breaker_and_it_opens_again(fleet: Fleet) -> None:
    """What is lost with Redis is learnt anew: a handful of failures later the engine is left alone again."""
    before = await fleet.opened()

    async def opened() -> bool:
        await fleet.chats(AT_ONCE)
        return await fleet.opened() > before

    async with fleet.behaving(Behave(status=500), 0):
        await until_async(opened)
        await fleet.flush()
        before = await fleet.opened()
        await until_async(opened)
        statuses = await fleet.chats(60)
        assert statuses[200] >= 50, statuses


async def test_an_engine_that_is_ill_every_other_moment_costs_little(fleet: Fleet) -> None:
    """Its breaker opens for longer each time, and nobody else's does: requests keep to the others."""
    healthy = [await fleet.opened_at(index) for index in (1, 2, 3)]
    total = Counter[int]()
    for _ in range(8):
        async with fleet.ill(Behave(status=500), 0):
            total += await fleet.chats(30)
        total += await fleet.chats(30)
    assert set(total) <= {200, 500}
    # One of four engines, ill half of the time, would fail an eighth of all requests if it kept its share.
    assert total[500] < total.total() / 8, total
    assert [await fleet.opened_at(index) for index in (1, 2, 3)] == healthy
    await fleet.all_closed()


async def test_an_engine_far_slower_than_its_peers_is_left_alone(fleet: Fleet) -> None:
    """Case D5: healthy by its status, ten times as late: first fewer requests, then none but probes."""
    await fleet.chats(40)
    before = await fleet.opened()
    async with fleet.behaving(Behave(first_s=1.0), 0):

        async def opened() -> bool:
            await fleet.chats(AT_ONCE)
            return await fleet.opened() > before

        await until_async(opened)
        taken = fleet.taken()
        await fleet.chats(60)
        shares = [now - then for now, then in zip(fleet.taken(), taken, strict=True)]
        assert shares[0] <= 5, shares
    assert await fleet.local.metric("warmpath_breaker_slow_total") > 0


async def test_a_pool_whose_engines_all_fail_still_gets_requests(fleet: Fleet) -> None:
    """Half of it is left alone at most: clients see the engines' own errors, and not that there is no endpoint."""
    async with fleet.behaving(Behave(status=500), 0, 1, 2, 3):
        await fleet.chats(60)
        assert await fleet.chats(20) == {500: 20}

"""What is in flight is charged from its pick to its end, neither longer nor shorter, whoever dies meanwhile."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, POOL, Answer, Engine, chat_body, simulated
from tests.acceptance.state.open_requests import finish, held
from tests.acceptance.state.replicas import Plan, Site, site
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEASE_MS = 1000
LEASES = 20
"""So many lease periods a long stream lasts."""
MANY, FEW = 50, 10
STREAMS = 6


class Desk(msgspec.Struct, frozen=True):
    """Two replicas behind an Envoy, on leases of a second, and two engines."""

    here: Site
    engines: list[Engine]

    @contextlib.asynccontextmanager
    async def frozen(self) -> AsyncIterator[None]:
        """No engine gets on with its work for a while."""
        async with contextlib.AsyncExitStack() as cleanup:
            for engine in self.engines:
                await cleanup.enter_async_context(engine.frozen("engine"))
            yield

    async def idle(self) -> None:
        """Wait until nothing is in flight, on the books and at the engines, and nothing was charged elsewhere."""
        await self.here.books.holds(0)

        async def quiet() -> bool:
            return sum([await one.live() for one in self.engines]) == 0

        await until_async(quiet)
        assert await self.here.metric("warmpath_fallbacks_total", rung="local_ledger") == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desk(journal: Journal, folder: Path) -> AsyncIterator[Desk]:
    """The site; a store that looks slow on a busy machine would leave nothing to see on its books."""
    async with simulated(journal, each=2) as engines:
        plan = Plan(envoys=[()], sections={"redis": {"timeout_ms": 2000, "lease_ms": LEASE_MS}})
        async with site(journal, folder, {POOL: engines}, plan) as here:
            yield Desk(here, engines)


async def test_a_long_stream_keeps_its_charge_to_its_end(desk: Desk) -> None:
    """A stream of twenty lease periods is on the books all the time, and its worker renews its lease in time."""
    books = desk.here.books
    async with stories(desk, 1) as [answer]:
        began = min((await books.leases()).values())
        while min((await books.leases()).values()) < began + LEASES * LEASE_MS:
            assert await books.in_flight() == 1
            await asyncio.sleep(LEASE_MS / 4000)
        assert not answer.done()
    await desk.idle()


@contextlib.asynccontextmanager
async def stories(desk: Desk, number: int) -> AsyncIterator[list[asyncio.Task[Answer]]]:
    """So many streams that no engine gets on with within the block, and that end after it as they should."""
    told = chat_body("a story", stream=True, max_tokens=50, ignore_eos=True)
    async with asyncio.TaskGroup() as tasks, desk.frozen():
        streams = [tasks.create_task(desk.here.front.ask(told)) for _ in range(number)]
        await desk.here.books.holds(number)
        yield streams
    for stream in streams:
        assert (stream.result().status, stream.result().body.endswith(b"data: [DONE]\n\n")) == (200, True)


async def test_an_endpoint_that_leaves_and_comes_back_is_never_counted_below_zero(desk: Desk) -> None:
    """Taken out of the configuration in mid-stream and put back: the count is never negative, and 0 at the end."""
    here, lowest = desk.here, [0.0]

    async def watch() -> None:
        while True:
            lowest.append(min(await here.books.written(), default=0.0))
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    try:
        async with stories(desk, STREAMS):
            gone = desk.engines[0]
            assert await gone.live() > 0
            await here.use({POOL: [one for one in desk.engines if one is not gone]})
            await heartbeats(here, 4)
            await here.use({POOL: desk.engines})
            await heartbeats(here, 4)
            assert await here.books.in_flight() == STREAMS
        await desk.idle()
    finally:
        watching.cancel()
    assert min(lowest) == 0
    assert len(lowest) > 10


async def heartbeats(here: Site, number: int) -> None:
    """Wait until every living worker has renewed its lease so often; each renewal may reap and count anew."""
    for _ in range(number):
        last = await here.books.leases()
        await until_async(partial(_renewed, here, last))


async def _renewed(here: Site, last: Mapping[str, float]) -> bool:
    told = await here.books.leases()
    return all(told[name] > end for name, end in last.items())


async def test_the_charges_of_a_killed_replica_end_with_its_lease(desk: Desk) -> None:
    """SIGKILL with fifty in flight: they vanish, those of the other replica stay to their end."""
    here = desk.here
    doomed, other = here.replicas
    async with held(other, FEW) as kept, held(doomed, MANY):
        await here.books.holds(FEW + MANY)
        await doomed.kill()
        await here.books.holds(FEW)
        await heartbeats(here, 6)
        assert await here.books.in_flight() == FEW
        await finish(kept)
    await here.books.holds(0)
    await doomed.start()
    await here.well()


async def test_the_charges_of_a_replica_that_stood_still_come_back(desk: Desk) -> None:
    """SIGSTOP for longer than its lease, then SIGCONT: what it has open is on the books again, and off at its end."""
    here = desk.here
    still, other = here.replicas
    async with held(other, FEW) as kept, held(still, MANY) as back:
        await here.books.holds(FEW + MANY)
        still.send(signal.SIGSTOP)
        try:
            await here.books.holds(FEW)
        finally:
            still.send(signal.SIGCONT)
        await here.books.holds(FEW + MANY)
        await finish(back[: MANY // 2])
        await here.books.holds(FEW + MANY - MANY // 2)
        await finish(back[MANY // 2 :])
        await finish(kept)
    await here.books.holds(0)
    await here.well()


async def whole(desk: Desk, number: int) -> list[asyncio.Task[Answer]]:
    """Clients that wait for whole answers, each over a connection of its own."""

    async def client(at: int) -> Answer:
        async with aiohttp.ClientSession() as http:
            sent = {"content-type": "application/json"}
            body_of = chat_body(f"question {at}, " * 100)
            async with http.post(f"{desk.here.front.url}{CHAT}", data=body_of, headers=sent) as answer:
                return Answer(answer.status, {}, await answer.read())

    return [asyncio.create_task(client(at)) for at in range(number)]


@pytest.mark.parametrize("scope", ["engine", "http"], ids=["queued at the engine", "picked, and no answer yet"])
async def test_clients_that_leave_before_an_answer_leave_nothing(desk: Desk, scope: str) -> None:
    """Whether the engine has them in its queue or has not even taken them in: their charges go with them."""
    async with contextlib.AsyncExitStack() as frozen:
        for engine in desk.engines:
            await frozen.enter_async_context(engine.frozen(scope))
        asking = await whole(desk, STREAMS)
        await desk.here.books.holds(STREAMS)
        for task in asking:
            task.cancel()
        ends = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
        await desk.here.books.holds(0)
    await desk.idle()


async def test_clients_that_leave_in_mid_stream_leave_nothing(desk: Desk) -> None:
    """They read the first piece of a long stream and close."""
    story = chat_body("a story", stream=True, max_tokens=20_000, ignore_eos=True)
    async with contextlib.AsyncExitStack() as open_streams:
        http = await open_streams.enter_async_context(aiohttp.ClientSession())
        for _ in range(STREAMS):
            answer = await open_streams.enter_async_context(http.post(f"{desk.here.front.url}{CHAT}", data=story))
            assert (await answer.content.readline()).startswith(b"data:")
            open_streams.callback(answer.close)
        assert await desk.here.books.in_flight() == STREAMS
    await desk.idle()


async def test_clients_that_leave_after_the_last_byte_were_served(desk: Desk) -> None:
    """A connection closed at `[DONE]`: nothing stays on the books, and the request counts as answered."""

    async def counted(outcome: str) -> float:
        return await desk.here.metric("warmpath_requests_total", outcome=outcome)

    served, failed = await counted("ok"), await counted("engine_error")
    for _ in range(STREAMS):
        async with aiohttp.ClientSession() as http:
            sent = {"content-type": "application/json", "connection": "close"}
            told = chat_body("a word", stream=True)
            async with http.post(f"{desk.here.front.url}{CHAT}", data=told, headers=sent) as answer:
                while await answer.content.readline() != b"data: [DONE]\n":
                    pass
    await desk.idle()

    async def all_counted() -> bool:
        return await counted("ok") == served + STREAMS

    await until_async(all_counted)
    assert await counted("engine_error") == failed

"""Whatever moment a client leaves at, its request is off the books: nothing stays in flight, on either store."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from extproc.state.values import Load
from tests.acceptance.inside import inside
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, POOL, Answer, Engine, ask, chat_body, configuration, running, simulated
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENTS = 5
LOCAL = "warmpath_fallbacks_total"
PROMPT = "a prompt that takes some blocks, " * 100


class Booth(msgspec.Struct, frozen=True):
    """A gateway, its only engine, and the books of its store.

    Attributes:
        url: base URL of the gateway.
        engine: the engine.
        loads: what the store has on its books.
        elsewhere: decisions that were charged on other books, because the store was too slow.
    """

    url: str
    engine: Engine
    loads: Callable[[], Awaitable[Mapping[str, Load]]]
    elsewhere: Callable[[], Awaitable[float]]

    async def in_flight(self) -> int:
        """Requests in flight."""
        return sum(load.running for load in (await self.loads()).values())

    async def all_gone(self) -> bool:
        """Whether nothing is in flight and the backlog has drained."""
        loads = (await self.loads()).values()
        return all(load.running == 0 and load.backlog_tokens <= 0 for load in loads)


async def never() -> float:
    """The count of what cannot happen."""
    return 0.0


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["redis", "memory"])
async def booth(request: pytest.FixtureRequest, journal: Journal, folder: Path) -> AsyncIterator[Booth]:
    """The whole stack on Valkey, and one worker on the memory store; in both, all requests meet one engine."""
    async with simulated(journal) as [engine]:
        # A store that looks slow on a busy machine would leave nothing to see on its books.
        document = configuration({POOL: [engine.address]}, redis={"timeout_ms": 2000})
        if request.param == "memory":
            async with inside(document, folder) as within:
                yield Booth(within.url, engine, lambda: within.store.loads(POOL), never)
        else:
            async with running(journal, folder / "warmpath.yaml", document, [engine]) as local:
                yield Booth(local.url, engine, local.loads, partial(local.metric, LOCAL, rung="local_ledger"))


@contextlib.asynccontextmanager
async def waiting(booth: Booth) -> AsyncIterator[None]:
    """Clients that wait for whole answers within the block, and close their connections at its end."""
    asking = [asyncio.create_task(whole(booth.url, PROMPT)) for _ in range(CLIENTS)]
    try:
        yield
    finally:
        for task in asking:
            task.cancel()
        ends = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


async def whole(url: str, prompt: str) -> Answer:
    """A client that waits for one whole answer."""
    async with aiohttp.ClientSession() as http:
        return await ask(http, f"{url}{CHAT}", chat_body(prompt))


async def settled(booth: Booth) -> None:
    """Wait for empty books, and for an engine that has nothing left to do. No other books were used."""
    await until_async(booth.all_gone)

    async def idle() -> bool:
        return await booth.engine.live() == 0

    await until_async(idle)
    assert await booth.elsewhere() == 0


async def test_leaving_while_queued_at_the_engine(booth: Booth) -> None:
    """Clients that wait in the engine's queue and give up take their charges with them."""

    async def queued() -> bool:
        return await booth.in_flight() == CLIENTS and await booth.engine.live() == CLIENTS

    async with booth.engine.frozen("engine"):
        async with waiting(booth):
            await until_async(queued)
        await until_async(booth.all_gone)
    await settled(booth)


async def test_leaving_after_the_pick_before_any_answer(booth: Booth) -> None:
    """The engine took the connection and says nothing: the charge ends with the client, not with the engine."""

    async def charged() -> bool:
        return await booth.in_flight() == CLIENTS

    async with booth.engine.frozen("http"):
        async with waiting(booth):
            await until_async(charged)
        await until_async(booth.all_gone)
    await settled(booth)


async def test_leaving_in_mid_stream(booth: Booth) -> None:
    """Clients read the first pieces of a long stream and close: nothing of it stays."""
    async with contextlib.AsyncExitStack() as open_streams:
        http = await open_streams.enter_async_context(aiohttp.ClientSession())
        body = chat_body(PROMPT, stream=True, max_tokens=20_000, ignore_eos=True)
        for _ in range(CLIENTS):
            answer = await open_streams.enter_async_context(http.post(f"{booth.url}{CHAT}", data=body))
            assert answer.status == 200
            assert (await answer.content.readline()).startswith(b"data:")
            open_streams.callback(answer.close)
        assert await booth.in_flight() == CLIENTS
        assert await booth.engine.live() == CLIENTS
    await settled(booth)


async def test_leaving_after_the_last_byte(booth: Booth) -> None:
    """A connection closed the moment its answer is complete leaves no charge, streamed or not."""
    for stream in (False, True) * CLIENTS:
        async with aiohttp.ClientSession() as http:
            answer = await ask(http, f"{booth.url}{CHAT}", chat_body(PROMPT, stream=stream), {"connection": "close"})
        assert answer.status == 200
    await settled(booth)


async def test_leaving_while_the_body_is_still_on_its_way(booth: Booth) -> None:
    """A client that never finishes its request was never charged."""
    host, _, port = booth.url.removeprefix("http://").rpartition(":")
    for _ in range(CLIENTS):
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n"
        writer.write(head.encode() + b'{"model":')
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    assert (await _after(booth)) == 200
    await settled(booth)


async def _after(booth: Booth) -> int:
    """Status of a request that comes after all that."""
    async with aiohttp.ClientSession() as http:
        return (await ask(http, f"{booth.url}{CHAT}", chat_body(PROMPT))).status

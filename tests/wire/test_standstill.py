"""Real engine simulators, a real keeper's scraper and a worker's upkeep: standstills, and requests of others."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from extproc.choose.fleet import Endpoint, Fleet
from extproc.clock import SystemClock
from extproc.config import Config, Model, Telemetry
from extproc.config import Pool as PoolSettings
from extproc.deciding import Outcome
from extproc.engines.detect import all_adapters
from extproc.envoy.contract import Call, Decision
from extproc.fleet.holding import Holding
from extproc.fleet.membership import Membership
from extproc.fleet.scraper import Scraper
from extproc.router import Router, Surroundings
from extproc.sim.fleet import SimFleet
from extproc.sim.settings import SimSettings
from extproc.state.feed import Delta
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from extproc.telemetry.metrics import Metrics
from extproc.upkeep import Upkeep
from tests.waiting import until, until_async


class Unheard:
    """Hears what a router tells, and keeps nothing."""

    def publish(self, pool: str, delta: Delta) -> None:
        """See `router.Publisher`."""

    def decided(self, outcome: Outcome) -> None:
        """See `router.Recorder`."""

    def settled(self, pool: str) -> None:
        """See `router.Recorder`."""


class Stack:
    """Two engines, one keeper's scraper and one worker's router and upkeep over one memory store."""

    def __init__(self, engines: SimFleet, http: aiohttp.ClientSession) -> None:
        self.one, self.two = engines.addresses
        self.http = http
        self.config = Config(
            models={"m": Model(pool="main")},
            pools={"main": PoolSettings(endpoints=[self.one, self.two])},
            telemetry=Telemetry(scrape_ms=50),
        )
        clock, self.store = SystemClock(), MemoryStore(SystemClock())
        membership, holding = Membership(), Holding(self.store, "scrape", "k1", clock)
        self._numbers = iter(range(1_000_000))
        self.around = Surroundings(
            self.config,
            Fleet({}, {}, ""),
            {"main": PoolKnowledge(Priors())},
            self.store,
            "r1",
            lambda: f"r1-{next(self._numbers)}",
        )
        self.router = Router(self.around, Unheard(), Unheard(), clock)
        self.upkeep = Upkeep(self.around, membership, clock)
        self.scraper = Scraper(membership, self.store, holding, all_adapters(), Metrics(), clock, random.Random(1))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep states and snapshots current."""
        await self.upkeep.apply(self.config)
        self.scraper.apply(self.config)
        tasks = [asyncio.create_task(work) for work in (self.scraper.run(), self.upkeep.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def seen(self, endpoint: str) -> Endpoint:
        """An endpoint as decisions see it."""
        return next(each for each in self.around.fleet.pools["main"].endpoints if each.id == endpoint)

    async def tell(self, endpoint: str, path: str, **body: Any) -> None:
        """Use a knob of a simulator."""
        async with self.http.post(f"http://{endpoint}{path}", json=body) as answer:
            assert answer.status == 200

    def ask(self, endpoint: str, tokens: int) -> asyncio.Task[None]:
        """A request that goes past Warmpath, answered with so many tokens, or given up."""

        async def answered() -> None:
            body = {"model": "sim", "prompt": "x " * 50, "max_tokens": tokens, "ignore_eos": True}
            async with self.http.post(f"http://{endpoint}/v1/completions", json=body) as answer:
                await answer.read()

        return asyncio.create_task(answered())

    async def decide(self, seed: int, session: str = "") -> Decision:
        """A decision on a prompt that nobody has cached, or on a session's next turn; settled at once."""
        body = b'{"model": "m", "messages": [{"role": "user", "content": "' + b"%08d " % seed * 100 + b'"}]}'
        headers = {"x-session-id": session} if session else {}
        decision = await self.router.decide(Call("POST", "/v1/chat/completions", headers, body))
        await self.router.settle(decision)
        return decision

    async def picks(self, count: int = 12) -> set[str]:
        """Endpoints of some cold requests, decided one after the other."""
        return {str((await self.decide(random.getrandbits(32))).metadata["endpoint"]) for _ in range(count)}


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """Both engines read, and idle."""
    settings = SimSettings(control=True)
    async with SimFleet(2, settings) as engines, aiohttp.ClientSession() as http:
        made = Stack(engines, http)
        async with made.running():
            await until(lambda: bool(made.around.fleet.pools["main"].endpoints))
            yield made


async def drained(stack: Stack) -> None:
    """Wait until the ledger has no backlog anywhere."""

    async def empty() -> bool:
        return not any(load.backlog_tokens for load in (await stack.store.loads("main")).values())

    await until_async(empty)


@pytest.mark.parametrize("scope", ["engine", "http"])
async def test_an_engine_that_stands_still_gets_no_cold_request(stack: Stack, scope: str) -> None:
    """However long its bucket has been empty; once it goes on, it is used again."""
    waiting = stack.ask(stack.one, 50_000)
    await until(lambda: stack.seen(stack.one).running == 1)
    await stack.tell(stack.one, "/sim/freeze", frozen=True, scope=scope)
    await until(lambda: stack.seen(stack.one).silent_ms > 0)
    await drained(stack)
    assert await stack.picks() == {stack.two}
    await stack.tell(stack.one, "/sim/freeze", frozen=False, scope=scope)
    waiting.cancel()
    await until(lambda: stack.seen(stack.one).silent_ms == 0 and stack.seen(stack.one).running == 0)
    await drained(stack)
    assert stack.one in await stack.picks()


async def test_a_session_stays_until_the_standstill_costs_more_than_it_may(stack: Stack) -> None:
    """Its pin holds against other load; it breaks when the pinned engine is dearer by `break_out_ms`."""
    first = str((await stack.decide(1, "s")).metadata["endpoint"])
    other = stack.two if first == stack.one else stack.one
    waiting = stack.ask(first, 50_000)
    await until(lambda: stack.seen(first).running == 1)
    await drained(stack)
    assert (await stack.decide(1, "s")).metadata["endpoint"] == first
    await stack.tell(first, "/sim/freeze", frozen=True)
    await until(lambda: stack.seen(first).silent_ms > stack.config.routing.session.break_out_ms)
    assert (await stack.decide(1, "s")).metadata["endpoint"] == other
    waiting.cancel()


async def test_an_engine_that_others_keep_busy_is_left_to_them(stack: Stack) -> None:
    """Fifty requests that Warmpath never saw cost 100 ms: until they are over, cold requests go to the other engine.

    There the third of those in a row meets the prefill of two, less than 70 ms.
    """
    await stack.tell(stack.one, "/sim/slow", factor=20.0)
    waiting = [stack.ask(stack.one, 50_000) for _ in range(50)]
    await until(lambda: stack.seen(stack.one).floor_running == 50)
    await drained(stack)
    for _ in range(3):
        assert await stack.picks(3) == {stack.two}
        await drained(stack)
    for each in waiting:
        each.cancel()
    await until(lambda: stack.seen(stack.one).floor_running == 0)
    assert stack.one in await stack.picks()

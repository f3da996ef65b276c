"""Engines that are full, or that nobody can read: sessions leave the full ones, and nobody is put out for silence."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from extproc.sim.workload import text
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, POOL, Engine, Local, ask, chat_body, configuration, running, simulated
from tests.acceptance.routing.asking import at_workers, decide_chat, use
from tests.acceptance.routing.veil import Veil, veiled
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

FULL, VEILED = 4, 2
WORKERS = 2
BLOCKS = 1537
"""24,576 tokens."""
SCRAPE_S = 0.5
RNG = random.Random(5)


class Pressed(msgspec.Struct, frozen=True):
    """A stack with two pools: four engines as they are, and two behind veils."""

    local: Local
    veils: Sequence[Veil]
    document: dict[str, Any]
    path: Path

    @contextlib.asynccontextmanager
    async def strict(self) -> AsyncIterator[None]:
        """Session pins are strict for a while, without a restart."""
        await use(self.local, self.path, {**self.document, "routing": {"session": {"strict": True}}})
        try:
            yield
        finally:
            await use(self.local, self.path, self.document)

    async def scrapes(self, outcome: str) -> float:
        """How many scrapes of veiled engines ended so."""
        return await self.local.metric("warmpath_scrapes_total", pool="veiled", outcome=outcome)

    async def served(self, prompts: int, each: int = 400) -> Counter[str]:
        """Ask the veiled pool so many equal prompts at once; how many each veil's engine answered."""
        veiled_engines = self.local.engines[FULL:]
        before = [await engine.prompt_tokens() for engine in veiled_engines]
        asked = [self.local.chat(text(RNG, each), model="veiled", max_tokens=60) for _ in range(prompts)]
        answers = await asyncio.gather(*asked)
        assert {answer.status for answer in answers} == {200}
        size = answers[0].json["usage"]["prompt_tokens"]
        after = [await engine.prompt_tokens() for engine in veiled_engines]
        counts = [(now - then) // size for then, now in zip(before, after, strict=True)]
        assert sum(counts) == prompts
        return Counter({veil.address: count for veil, count in zip(self.veils, counts, strict=True)})

    async def nobody_was_put_out(self) -> None:
        """No endpoint is called unreachable, and nothing was refused."""
        for veil in self.veils:
            assert await self.local.metric("warmpath_endpoint_up", endpoint=veil.address) == 1
        assert await self.local.metric("warmpath_refusals_total") == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pressed(journal: Journal, folder: Path) -> AsyncIterator[Pressed]:
    """Both pools behind two workers."""
    arguments = ("--blocks", str(BLOCKS), "--adapter", "veiled")
    async with contextlib.AsyncExitStack() as cleanup:
        engines = await cleanup.enter_async_context(simulated(journal, each=FULL + VEILED, arguments=arguments))
        veils = [await cleanup.enter_async_context(veiled(engine.address)) for engine in engines[FULL:]]
        pools = {POOL: [one.address for one in engines[:FULL]], "veiled": [one.address for one in veils]}
        document = configuration(pools, telemetry={"scrape_ms": int(1000 * SCRAPE_S)})
        document["gateway"]["sidecar"]["workers"] = WORKERS
        document["redis"] = {"timeout_ms": 2000}  # pins and charges are what is tested, not a store that looks slow
        path = folder / "warmpath.yaml"
        local = await cleanup.enter_async_context(running(journal, path, document, engines))
        yield Pressed(local, veils, document, path)


async def test_slow_scrapes_shed_nothing_and_put_nobody_out(pressed: Pressed) -> None:
    """Every metrics page comes a second late: all requests are answered, and spread by what is in flight."""
    read = await pressed.scrapes("read")
    for veil in pressed.veils:
        veil.late_s = 1.0
    try:
        await until_async(lambda: _at_least(pressed, "read", read + 2 * VEILED))
        counts = await pressed.served(20)
    finally:
        for veil in pressed.veils:
            veil.late_s = 0.0
    assert all(abs(count - 10) <= 2 for count in counts.values()), counts
    await pressed.nobody_was_put_out()


async def test_one_failed_scrape_changes_nothing(pressed: Pressed) -> None:
    """The numbers of the last good scrape stay, and traffic is even."""
    failed = await pressed.scrapes("unreadable")
    pressed.veils[0].failing = 1
    await until_async(lambda: _at_least(pressed, "unreadable", failed + 1))
    counts = await pressed.served(20)
    assert all(abs(count - 10) <= 2 for count in counts.values()), counts
    await pressed.nobody_was_put_out()


async def test_an_engine_nobody_can_read_gets_less_but_is_not_put_out(pressed: Pressed) -> None:
    """Failed scrapes in a row make what is known of it stale: it is believed slower, and still serves."""
    quiet = pressed.veils[0]
    failed = await pressed.scrapes("unreadable")
    quiet.failing = 1_000_000
    try:
        # Seven scrapes, half a second each: past three intervals and two seconds, when numbers count as stale.
        await until_async(lambda: _at_least(pressed, "unreadable", failed + 7))
        counts = await pressed.served(30)
    finally:
        quiet.failing = 0
    assert 0 < counts[quiet.address] <= 12, counts
    await pressed.nobody_was_put_out()


async def test_engines_nobody_can_read_share_the_traffic(pressed: Pressed) -> None:
    """When all fall silent together nothing is shed: what is in flight decides."""
    read, failed = await pressed.scrapes("read"), await pressed.scrapes("unreadable")
    # One that had been silent for longer than the others would count as the slower one.
    await until_async(lambda: _at_least(pressed, "read", read + 2 * VEILED))
    for veil in pressed.veils:
        veil.failing = 1_000_000
    try:
        await until_async(lambda: _at_least(pressed, "unreadable", failed + 7 * VEILED))
        counts = await pressed.served(20)
    finally:
        for veil in pressed.veils:
            veil.failing = 0
    assert all(abs(count - 10) <= 2 for count in counts.values()), counts
    await pressed.nobody_was_put_out()


async def _at_least(pressed: Pressed, outcome: str, number: float) -> bool:
    return await pressed.scrapes(outcome) >= number


@pytest.mark.parametrize("tokens", [250, 1000], ids=["short prompts", "long prompts"])
async def test_a_full_engine_loses_soft_sessions_and_keeps_strict_ones(pressed: Pressed, tokens: int) -> None:
    """KV cache near full, twenty waiting: pinned sessions go elsewhere unless pins are strict, and so do new ones."""
    local = pressed.local
    sessions = {f"s{tokens}-{number}": text(RNG, tokens) for number in range(16)}
    homes = {}
    for session, prompt in sessions.items():
        _, engine = await local.chat_served(prompt, session)
        homes[session] = engine.address
    home, number = Counter(homes.values()).most_common(1)[0]
    assert number >= 4
    full = next(engine for engine in local.engines if engine.address == home)
    soft = [session for session in sessions if homes[session] == home]
    strict = [soft.pop(), soft.pop()]
    async with at_workers(local) as workers:
        for session in soft:
            told = await decide_chat(workers[0], sessions[session] + " and", session)
            assert (told.endpoint, told.pinned) == (home, True)
        async with filled(local, full):
            moved = [await decide_chat(workers[0], sessions[one] + " and more", one) for one in soft]
            fresh = [await decide_chat(workers[1], text(RNG, tokens), f"new{number}") for number in range(12)]
            async with pressed.strict():
                held = [await decide_chat(workers[1], sessions[one] + " and more", one) for one in strict]
                waits = asyncio.create_task(local.chat(sessions[strict[0]] + " and more", strict[0]))
                await until_async(lambda: _in_flight(local, home))
            assert not waits.done()
    answer = await waits
    assert home not in {one.endpoint for one in moved}
    assert home not in {one.endpoint for one in fresh}
    assert [(one.endpoint, one.pinned) for one in held] == [(home, True)] * len(strict)
    assert answer.status == 200


async def _in_flight(local: Local, endpoint: str) -> bool:
    """Whether a request is in flight, and there alone."""
    return [name for name, one in (await local.loads()).items() if one.running] == [endpoint]


@contextlib.asynccontextmanager
async def filled(local: Local, engine: Engine) -> AsyncIterator[None]:
    """Fill an engine past its KV cache by requests that do not come through the gateway, until that is known."""
    url = f"http://{engine.address}{CHAT}"
    bodies = [chat_body(text(RNG, 1000), max_tokens=2000, ignore_eos=True) for _ in range(48)]
    asking = [asyncio.create_task(ask(local.http, url, body)) for body in bodies]

    async def known() -> bool:
        usage = await local.metric("warmpath_engine_kv_usage", endpoint=engine.address)
        return usage >= 0.95 and await local.metric("warmpath_engine_waiting", endpoint=engine.address) >= 20

    try:
        await until_async(known)
        await engine.control("slow", factor=50.0)
        await asyncio.sleep(2 * SCRAPE_S)  # until workers have read what the keeper published
        yield
    finally:
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await engine.control("slow", factor=1.0)

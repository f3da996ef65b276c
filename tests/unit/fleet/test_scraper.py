"""Scraping of real HTTP servers: what is asked, what is published, and what failures leave."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from extproc.engines.adapter import MAX_PAGE_BYTES
from extproc.fleet.membership import Membership
from extproc.state.endpoint import EndpointState
from tests.unit.fleet.parts import Engine, Keeper, configuration


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    """One engine that serves."""
    engine = Engine()
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def bench() -> AsyncIterator[Keeper]:
    """A keeper that is alone in its fleet."""
    keeper = Keeper()
    yield keeper
    await keeper.close()


async def test_a_round_writes_each_pool_once(bench: Keeper, engine: Engine) -> None:
    """All endpoints of a pool go out in one write, dated, with their numbers."""
    other = Engine()
    other.running = 7
    await other.start()
    try:
        await bench.configure(chat=[engine.address, other.address], long=[other.address])
        await bench.round()
    finally:
        await other.stop()

    def state(engine: Engine) -> EndpointState:
        return EndpointState(destination=engine.address, scraped_at=1000.0, running=engine.running)

    assert sorted(bench.shelf.writes, key=lambda write: write[0]) == [
        ("chat", {engine.address: state(engine), other.address: state(other)}),
        ("long", {other.address: state(other)}),
    ]
    assert bench.scraper.states()["long"] == {other.address: state(other)}


async def test_connections_are_kept_between_rounds(bench: Keeper, engine: Engine) -> None:
    """Five rounds use one connection."""
    await bench.configure(chat=[engine.address])
    for _ in range(5):
        await bench.round()
    assert engine.asked == 5
    assert len(engine.connections) == 1


@pytest.mark.parametrize(
    ("status", "page"), [(500, None), (302, None), (200, b"hello"), (200, b"#" * (MAX_PAGE_BYTES + 1))]
)
async def test_an_engine_that_answers_badly_is_reachable_with_old_numbers(
    bench: Keeper, engine: Engine, status: int, page: bytes | None
) -> None:
    """HTTP errors, redirects, foreign pages and pages over the cap leave numbers and their date, however many."""
    await bench.configure(chat=[engine.address])
    await bench.round()
    engine.status, engine.page = status, page
    for _ in range(4):
        bench.clock.advance(1.0)
        await bench.round()
    assert bench.shelf.writes[-1][1][engine.address] == EndpointState(
        destination=engine.address, scraped_at=1000.0, running=1
    )
    assert engine.asked == 5
    assert bench.samples()["warmpath_scrapes_total", "unreadable"] == 4


async def test_an_engine_that_died_is_unreachable_from_the_third_miss_and_comes_back(
    bench: Keeper, engine: Engine
) -> None:
    """Refused connections count; the first answer afterwards ends it."""
    await bench.configure(chat=[engine.address])
    await bench.round()
    await engine.stop()
    reachable = []
    for _ in range(4):
        await bench.round()
        reachable.append(bench.shelf.writes[-1][1][engine.address].reachable)
    assert reachable[:2] == [True, True]
    assert reachable[3] is False
    assert bench.samples()["warmpath_endpoint_up", engine.address] == 0
    await engine.start(int(engine.address.rpartition(":")[2]))
    await bench.round()
    assert bench.shelf.writes[-1][1][engine.address].reachable is True
    assert bench.samples()["warmpath_endpoint_up", engine.address] == 1


async def test_a_slow_engine_is_asked_once_and_holds_up_nobody(bench: Keeper, engine: Engine) -> None:
    """While one answer is out, rounds go on for the others, and its engine gets no second request."""
    quick = Engine()
    await quick.start()
    try:
        await bench.configure(scrape_ms=50, chat=[engine.address, quick.address])
        engine.gate.clear()
        async with asyncio.timeout(20):
            # A stalled machine may let a round end before the quick engine's answer: it joins a later one.
            while quick.asked < 3:
                await bench.round()
        assert all(engine.address not in states for _, states in bench.shelf.writes)
        assert engine.most_open == engine.asked == 1
        engine.gate.set()
        while engine.address not in bench.shelf.writes[-1][1]:
            await bench.round()
        assert bench.shelf.writes[-1][1][engine.address].running == 1
    finally:
        await quick.stop()


async def test_an_endpoint_that_left_is_forgotten(bench: Keeper, engine: Engine) -> None:
    """After a reconfiguration the old endpoint is neither asked, nor shown, nor remembered."""
    await bench.configure(chat=[engine.address])
    await bench.round()
    assert ("warmpath_engine_running", engine.address) in bench.samples()
    asked = engine.asked
    other = Engine()
    await other.start()
    try:
        await bench.configure(chat=[other.address])
        await bench.round()
    finally:
        await other.stop()
    assert list(bench.scraper.states()["chat"]) == [other.address]
    assert engine.asked == asked
    assert ("warmpath_engine_running", engine.address) not in bench.samples()


async def test_a_name_that_moved_starts_from_nothing(bench: Keeper, engine: Engine) -> None:
    """Behind a new address stands another engine: none of the old one's numbers are kept for it."""
    addresses = ["127.0.0.1"]

    async def resolve(_: str) -> list[str]:
        return addresses

    port = engine.address.rpartition(":")[2]
    bench.look_up_with(Membership(resolve))
    await bench.configure(chat=[f"engine:{port}"])
    await bench.round()
    assert bench.shelf.writes[-1][1][f"engine:{port}"].running == 1
    addresses[:] = ["127.0.0.2"]
    await bench.membership.refresh()
    await bench.round()
    assert bench.shelf.writes[-1][1] == {f"engine:{port}": EndpointState(f"127.0.0.2:{port}", misses=1)}


async def test_a_reload_halfway_through_is_no_error(bench: Keeper, engine: Engine) -> None:
    """Between the reloads of membership and scraper, a pool that only one of them knows is left alone."""
    await bench.configure(chat=[engine.address], long=[engine.address])
    await bench.round()
    only_chat = configuration(chat=[engine.address])
    bench.scraper.apply(only_chat)
    await bench.round()
    assert list(bench.scraper.states()) == ["chat"]
    await bench.membership.apply(only_chat)
    await bench.round()
    assert [pool for pool, _ in bench.shelf.writes[2:]] == ["chat", "chat"]


async def test_a_store_that_fails_for_a_moment_stops_no_scraping(bench: Keeper, engine: Engine) -> None:
    """Within the lease, engines are asked; states are published again as soon as the store takes them."""
    await bench.configure(chat=[engine.address])
    await bench.round()
    bench.shelf.down = True
    for _ in range(2):
        bench.clock.advance(1.0)
        await bench.round()
    assert (engine.asked, len(bench.shelf.writes)) == (3, 1)
    bench.shelf.down = False
    engine.running = 9
    await bench.round()
    assert bench.shelf.writes[-1][1][engine.address].running == 9


async def test_run_scrapes_until_cancelled_and_leaves_nothing(bench: Keeper, engine: Engine) -> None:
    """`run` makes rounds by itself; cancelled, even in mid-scrape, it ends its tasks and connections."""
    await bench.configure(scrape_ms=50, chat=[engine.address])
    running = asyncio.create_task(bench.scraper.run())
    async with asyncio.timeout(10):
        await engine.until(lambda: engine.asked >= 3)
        engine.gate.clear()
        await engine.until(lambda: engine.open == 1)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        await engine.until(lambda: engine.open == 0)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("scrape")]


async def test_a_frozen_engine_is_silent(bench: Keeper, engine: Engine) -> None:
    """Its kernel still takes connections, and no page comes: no miss, and after two seconds it stands still."""
    await bench.configure(chat=[engine.address])
    await bench.round()
    engine.gate.clear()
    bench.clock.advance(2.5)
    patient, bench.session = bench.session, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(sock_read=0.05))
    async with patient, bench.session:
        async with asyncio.timeout(20):
            while ("warmpath_scrapes_total", "silent") not in bench.samples():
                await bench.round()
        state = bench.shelf.writes[-1][1][engine.address]
        assert (state.reachable, state.misses, state.stalled_s) == (True, 0, 2.5)
        assert bench.samples()["warmpath_engine_stalled_seconds", engine.address] == 2.5
        engine.gate.set()
        await bench.scraper.round(patient)
        assert bench.shelf.writes[-1][1][engine.address].stalled_s == 0.0

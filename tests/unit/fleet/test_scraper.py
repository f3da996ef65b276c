"""Scraping of real HTTP servers: what is asked, what is published, and what failures leave."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import aiohttp.web
import msgspec
import pytest

from extproc.engines.adapter import MAX_PAGE_BYTES
from extproc.fleet.membership import Membership
from extproc.state.endpoint import EndpointState
from tests.unit.fleet.parts import Engine, Keeper, configuration


def _read_once(address: str, running: int, **changes: int) -> EndpointState:
    """State of an engine whose page has one number, after its first scrape."""
    found = EndpointState(address, 1000.0, running=running, kind="vllm", page="/metrics", ranks=1)
    return msgspec.structs.replace(found, **changes)


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
        return _read_once(engine.address, engine.running)

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
    ("status", "page", "fault"),
    [
        (500, None, "status"),
        (404, None, "not_found"),
        (403, None, "forbidden"),
        (302, None, "redirect"),
        (200, b"hello", "other_kind"),
        (200, b"vllm:num_requests_running one\n", "malformed"),
        (200, b"#" * (MAX_PAGE_BYTES + 1), "too_long"),
    ],
)
async def test_an_engine_that_answers_badly_is_reachable_with_old_numbers(
    bench: Keeper, engine: Engine, status: int, page: bytes | None, fault: str
) -> None:
    """HTTP errors, redirects, foreign pages and pages over the cap leave numbers and their date; each is counted."""
    await bench.configure(chat=[engine.address])
    await bench.round()
    engine.status, engine.page = status, page
    for _ in range(4):
        bench.clock.advance(1.0)
        await bench.round()
    assert bench.shelf.writes[-1][1][engine.address] == _read_once(engine.address, 1, unread=4)
    assert engine.asked == 5
    assert bench.samples()["warmpath_scrapes_total", "unreadable"] == 4
    faults = {reason: bench.samples().get(("warmpath_scrape_faults_total", reason), 0) for reason in (fault, "silent")}
    assert faults == {fault: 4, "silent": 0}


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
    assert bench.shelf.writes[-1][1] == {f"engine:{port}": EndpointState(f"127.0.0.2:{port}", misses=1, unread=1)}


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


_MODELS = b'{"data": [{"id": "m", "owned_by": "%s"}, {"id": "sql", "parent": "m"}]}'


async def test_what_slow_pages_tell_is_published_with_the_first_round(bench: Keeper, engine: Engine) -> None:
    """Models, adapters, version and event sources, and again after some time or a restart, but not every round."""
    engine.pages = {"/v1/models": _MODELS % b"vllm", "/version": b'{"version": "0.33.0"}'}
    await bench.configure(chat=[engine.address])

    async def adapters() -> tuple[str, ...]:
        await bench.round()
        state = bench.shelf.writes[-1][1][engine.address]
        assert (state.kind, state.version, state.models) == ("vllm", "0.33.0", ("m",))
        return state.adapters

    assert await adapters() == ("sql",)
    engine.pages["/v1/models"] = b'{"data": [{"id": "m"}]}'
    bench.clock.advance(1.0)
    assert await adapters() == ("sql",)
    bench.clock.advance(10.0)
    assert await adapters() == ()
    engine.pages["/v1/models"] = _MODELS % b"vllm"
    engine.page = b"vllm:num_requests_running 1\nprocess_start_time_seconds 77\n"
    await bench.round()
    assert await adapters() == ("sql",)


async def test_slow_pages_that_cannot_be_read_are_counted(bench: Keeper, engine: Engine) -> None:
    """The load is read all the same, and what versions lack is no fault."""
    engine.pages = {"/v1/models": b"<html>"}
    await bench.configure(chat=[engine.address])
    await bench.round()
    assert bench.shelf.writes[-1][1][engine.address].running == 1
    page = bench.metrics.page().decode()
    assert 'warmpath_scrape_faults_total{page="about",pool="chat",reason="malformed"} 1.0' in page
    assert "not_found" not in page


async def test_a_slow_page_that_does_not_come_holds_up_nothing(bench: Keeper) -> None:
    """The load goes out with its round; what comes late goes out with a later one."""
    release = asyncio.Event()

    async def late(_: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        await release.wait()
        return aiohttp.web.Response(body=b'{"version": "0.33.0"}')

    other = Engine()
    other.routes["/version"] = late
    await other.start()
    try:
        await bench.configure(scrape_ms=50, chat=[other.address])
        async with asyncio.timeout(20):
            while len(bench.shelf.writes) < 3:
                await bench.round()
            assert bench.shelf.writes[-1][1][other.address].version == ""
            release.set()
            while bench.shelf.writes[-1][1][other.address].version != "0.33.0":
                await bench.round()
    finally:
        release.set()
        await other.stop()


async def test_a_kind_that_is_configured_anew_is_read_anew(bench: Keeper, engine: Engine) -> None:
    """What was found out is forgotten; a page of another kind than configured leaves the numbers and is counted."""
    await bench.configure(chat=[engine.address])
    await bench.round()
    config = configuration(chat=[engine.address])
    pools = {name: msgspec.structs.replace(pool, engine="sglang") for name, pool in config.pools.items()}
    bench.scraper.apply(msgspec.structs.replace(config, pools=pools))
    await bench.round()
    assert bench.shelf.writes[-1][1][engine.address] == _read_once(engine.address, 1, unread=1)
    assert bench.samples()["warmpath_scrape_faults_total", "other_kind"] == 1
    engine.page = b"sglang:num_running_reqs 5\n"
    bench.clock.advance(10.0)
    await bench.round()
    state = bench.shelf.writes[-1][1][engine.address]
    assert (state.kind, state.running) == ("sglang", 5)

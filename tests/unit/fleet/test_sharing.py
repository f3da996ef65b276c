"""Several keepers of one fleet: one reads each endpoint, goes on where the last one stopped, and is never too late."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import pytest

from extproc.fleet.scraper import ALONE_EVERY_S, LEFT_S, TIDY_EVERY_S
from extproc.state.endpoint import EndpointState, decode, encode
from extproc.state.memory import MemoryStore
from tests.unit.fleet.parts import Engine, Keeper, Shelf, SkewedClock

LEASE_S = 3.0


@pytest.fixture
async def engines() -> AsyncIterator[list[Engine]]:
    """Four engines."""
    engines = [Engine() for _ in range(4)]
    for engine in engines:
        await engine.start()
    yield engines
    for engine in engines:
        await engine.stop()


class Fleet(Protocol):
    """Makes keepers that share one store."""

    def __call__(self, name: str) -> Keeper:
        """One more, by its id."""
        ...


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    """Keepers on hosts of their own, whose monotonic clocks go together and whose wall clocks need not."""
    keepers: list[Keeper] = []
    clock = SkewedClock()
    shelf = Shelf(clock)

    def make(name: str) -> Keeper:
        keepers.append(Keeper(name, shelf, clock))
        return keepers[-1]

    yield make
    for keeper in keepers:
        shelf.down = False
        await keeper.close()


def addresses(engines: Sequence[Engine]) -> list[str]:
    """Where they listen."""
    return [engine.address for engine in engines]


async def start(fleet: Fleet, names: str, engines: Sequence[Engine]) -> list[Keeper]:
    """Keepers with even shares."""
    keepers = [fleet(name) for name in names]
    for keeper in keepers:
        await keeper.configure(main=addresses(engines))
    await turns(keepers, 4)
    return keepers


async def turns(keepers: Sequence[Keeper], times: int, step_s: float = 0.3) -> None:
    """Let time pass, with a round of each keeper after each step."""
    for _ in range(times):
        for keeper in keepers:
            await keeper.round()
        keepers[0].clock.advance(step_s)


def held(keeper: Keeper) -> set[str]:
    """What a keeper may read."""
    return set(keeper.holding.held("main"))


async def test_each_endpoint_is_asked_once_a_round(fleet: Fleet, engines: list[Engine]) -> None:
    """Two keepers halve the work: engines are asked no more often than by one."""
    keepers = await start(fleet, "ab", engines)
    assert [len(held(keeper)) for keeper in keepers] == [2, 2]
    asked = [engine.asked for engine in engines]
    await turns(keepers, 3)
    assert [engine.asked - before for engine, before in zip(engines, asked, strict=True)] == [3] * 4


async def test_a_page_shows_what_its_keeper_reads(fleet: Fleet, engines: list[Engine]) -> None:
    """Whoever reads the pages of all keepers meets each engine once; `states` knows all of them on each host."""
    keepers = await start(fleet, "ab", engines)
    await turns(keepers, 4)
    shown = [{name for metric, name in keeper.samples() if metric == "warmpath_engine_running"} for keeper in keepers]
    assert shown == [held(keeper) for keeper in keepers]
    assert shown[0] ^ shown[1] == set(addresses(engines))
    assert [keeper.samples()["warmpath_endpoints_held", ""] for keeper in keepers] == [2, 2]
    assert all(keeper.scraper.states()["main"].keys() == set(addresses(engines)) for keeper in keepers)


async def test_a_dead_keepers_endpoints_are_taken_over(fleet: Fleet, engines: list[Engine]) -> None:
    """When its lease is over, the next round of another keeper reads them."""
    one, two = await start(fleet, "ab", engines)
    lost = held(two)
    one.clock.advance(LEASE_S / 2)
    await one.round()
    assert held(one) == set(addresses(engines)) - lost
    one.clock.advance(LEASE_S / 2)
    asked = {engine.address: engine.asked for engine in engines}
    await one.round()
    assert held(one) == set(addresses(engines))
    assert all(engine.asked == asked[engine.address] + 1 for engine in engines)


async def test_a_keeper_that_stops_gives_up_its_endpoints_at_once(fleet: Fleet, engines: list[Engine]) -> None:
    """No lease has to run out."""
    one, two = await start(fleet, "ab", engines)
    await two.scraper.close()
    one.clock.advance(LEASE_S / 3)
    await one.round()
    assert held(one) == set(addresses(engines))


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ((50, 100), (50, 110), False),
        ((50, 100), (60, 0), True),
        ((50, 100), (60, 200), True),
        ((0, 100), (0, 110), False),
        ((0, 100), (0, 90), True),
        ((50, 100), (50, 90), True),
    ],
)
async def test_a_takeover_is_no_restart_and_hides_none(
    fleet: Fleet, engines: list[Engine], before: tuple[int, int], after: tuple[int, int], changes: bool
) -> None:
    """The start that is published changes when the engine restarted meanwhile, told or by its counters; else never."""

    def page(start: int, queries: int) -> bytes:
        lines = ["vllm:num_requests_running 1", f"vllm:prefix_cache_queries_total {queries}"]
        return "\n".join(lines + [f"process_start_time_seconds {start}"] * bool(start) + [""]).encode()

    engine = engines[0]
    engine.page = page(*before)
    one, two = fleet("a"), fleet("b")
    for keeper in (one, two):
        await keeper.configure(main=[engine.address])
        await keeper.round()
    first = decode((await one.shelf.states("main"))[engine.address])
    one.clock.advance(LEASE_S + 1)
    engine.page = page(*after)
    await two.round()
    second = decode((await two.shelf.states("main"))[engine.address])
    assert second.scraped_at > first.scraped_at
    assert (second.started_at != first.started_at) is changes
    await two.round()
    assert decode((await two.shelf.states("main"))[engine.address]).started_at == second.started_at


async def test_a_restart_that_a_keeper_saw_is_the_same_for_the_next(fleet: Fleet, engines: list[Engine]) -> None:
    """A core replaced under its API process has a later start than it tells: taking over does not take that back."""
    engine = engines[0]
    one, two = fleet("a"), fleet("b")
    told = "vllm:num_requests_running 1\nprocess_start_time_seconds 50\nvllm:prefix_cache_queries_total "
    for keeper in (one, two):
        await keeper.configure(main=[engine.address])
    for queries in (100, 20):
        engine.page = f"{told}{queries}\n".encode()
        await one.round()
    await two.round()
    one.clock.advance(LEASE_S + 1)
    await two.round()
    assert decode((await two.shelf.states("main"))[engine.address]).started_at == 1000.0


async def test_misses_and_stalls_are_counted_on(fleet: Fleet, engines: list[Engine]) -> None:
    """An engine that two keepers in turn cannot connect to is unreachable after three misses of both."""
    engine = engines[0]
    one, two = fleet("a"), fleet("b")
    for keeper in (one, two):
        await keeper.configure(main=[engine.address])
        await keeper.round()
    await engine.stop()
    for _ in range(2):
        await one.round()
    assert one.scraper.states()["main"][engine.address].reachable
    one.clock.advance(LEASE_S + 1)
    await two.round()
    state = decode((await two.shelf.states("main"))[engine.address])
    assert (state.misses, state.reachable) == (3, False)
    assert state.stalled_s == 0.0 or state.stalled_s > 2.0


async def test_a_keeper_that_was_frozen_does_nothing_on_a_lapsed_lease(fleet: Fleet, engines: list[Engine]) -> None:
    """Stopped in mid-scrape until its lease was over, it publishes nothing, and asks nobody before the store."""
    one, two = await start(fleet, "ab", engines)
    mine = [engine for engine in engines if engine.address in held(two)]
    for engine in mine:
        engine.gate.clear()
    frozen = asyncio.create_task(two.round())
    for engine in mine:
        await engine.until(lambda engine=engine: engine.open == 1)  # type: ignore[misc]
    one.clock.advance(LEASE_S + 1)
    for engine in mine:
        engine.gate.set()
    writes = len(two.shelf.writes)
    await frozen
    assert len(two.shelf.writes) == writes
    await one.round()
    assert held(one) == set(addresses(engines))
    asked = [engine.asked for engine in engines]
    await two.round()
    assert held(two) == set()
    assert [engine.asked for engine in engines] == asked
    assert not [name for metric, name in two.samples() if metric == "warmpath_engine_running"]


async def test_an_answer_from_before_a_freeze_is_not_taken_for_a_fresh_one(fleet: Fleet, engines: list[Engine]) -> None:
    """Even when the endpoint is held again: what was asked under the lease before says nothing of the time since."""
    engine = engines[0]
    one = fleet("a")
    await one.configure(main=[engine.address])
    await one.round()
    engine.gate.clear()
    frozen = asyncio.create_task(one.round())
    await engine.until(lambda: engine.open == 1)
    one.clock.advance(LEASE_S + 1)
    await frozen
    # The next round renews the lease: it asks again, and the old answer is given up.
    again = asyncio.create_task(one.round())
    async with asyncio.timeout(20):
        await engine.until(lambda: engine.asked == 3)
    engine.gate.set()
    await again
    assert held(one) == {engine.address}
    assert len(one.shelf.writes) == 2


async def test_a_keeper_that_was_frozen_and_finds_no_store_asks_nobody(fleet: Fleet, engines: list[Engine]) -> None:
    """Others may have its endpoints: only a store that was silent for a lease leaves it to itself."""
    one, two = await start(fleet, "ab", engines)
    one.clock.advance(LEASE_S + 1)
    two.shelf.down = True
    asked = [engine.asked for engine in engines]
    await turns([two], 9)
    assert [engine.asked for engine in engines] == asked


async def test_without_a_store_a_keeper_goes_on_slowly_with_what_it_had(fleet: Fleet, engines: list[Engine]) -> None:
    """At its pace until its lease is over; a lease later slowly, shown but not published; all again with the store."""
    one, two = await start(fleet, "ab", engines)
    mine = held(one)
    one.shelf.down = True
    await turns([one, two], 25)
    assert (held(one), held(two)) == (set(), set())
    asked, writes = {engine.address: engine.asked for engine in engines}, len(one.shelf.writes)
    await turns([one, two], 10, ALONE_EVERY_S / 2)
    # Each endpoint is asked by the one keeper that had it.
    assert {engine.asked - asked[engine.address] for engine in engines} <= {4, 5}
    assert {name for metric, name in one.samples() if metric == "warmpath_engine_running"} == mine
    assert len(one.shelf.writes) == writes
    one.shelf.down = False
    await turns([one, two], 4)
    assert [len(held(keeper)) for keeper in (one, two)] == [2, 2]
    assert len(one.shelf.writes) > writes


async def test_a_keeper_that_never_met_a_store_reads_all_for_its_own_page(fleet: Fleet, engines: list[Engine]) -> None:
    """It cannot know what others read: it waits for a lease, then asks every engine, slowly."""
    lonely = fleet("a")
    lonely.shelf.down = True
    await lonely.configure(main=addresses(engines))
    await turns([lonely], 10)
    assert not any(engine.asked for engine in engines)
    await turns([lonely], 10, ALONE_EVERY_S)
    assert {engine.asked for engine in engines} <= {9, 10}
    assert lonely.scraper.states()["main"].keys() == set(addresses(engines))
    assert not lonely.shelf.writes


async def test_wall_clocks_that_jump_drop_nothing_that_lives(fleet: Fleet, engines: list[Engine]) -> None:
    """A state is as old as the time since it last changed here, whatever date another host gave it."""
    one = fleet("a")
    await one.configure(main=[engines[0].address])
    for skew_s in (-3600.0, 3600.0, 0.0):
        one.clock.skew_s = skew_s
        for passed in range(20):
            # Another keeper, whose configuration has more endpoints, dates them by a clock of its own.
            state = EndpointState("10.0.0.2:80", scraped_at=1000.0 + passed)
            await one.shelf.put_states("main", {"10.0.0.2:80": encode(state)})
            one.clock.advance(LEFT_S / 4)
            await one.round()
    assert (await one.shelf.states("main")).keys() == {engines[0].address, "10.0.0.2:80"}


@pytest.mark.parametrize("date", [0.0, 1000.0, 1e12])
async def test_endpoints_that_left_do_not_stay_in_the_store(fleet: Fleet, engines: list[Engine], date: float) -> None:
    """What nobody changes for a while goes, whatever its date, and so does what cannot be read."""
    one = fleet("a")
    left = encode(EndpointState("10.0.0.1:80", scraped_at=date))
    await MemoryStore.put_states(one.shelf, "main", {"10.0.0.1:80": left, "junk": b"\x90"})
    await one.configure(main=[engines[0].address])
    await one.round()
    one.clock.advance(LEFT_S - 1)
    await one.round()
    assert (await one.shelf.states("main")).keys() == {engines[0].address, "10.0.0.1:80", "junk"}
    one.clock.advance(TIDY_EVERY_S)
    await one.round()
    assert (await one.shelf.states("main")).keys() == {engines[0].address}


async def test_a_pool_that_left_is_given_up(fleet: Fleet, engines: list[Engine]) -> None:
    """A configuration without it leaves the group of its holders; other hosts may still have it."""
    one, two = await start(fleet, "ab", engines)
    await one.configure(other=[engines[0].address])
    await turns([one, two], 2)
    assert held(one) == set()
    assert held(two) == set(addresses(engines))
    assert one.samples()["warmpath_endpoints_held", ""] in {0, 1}

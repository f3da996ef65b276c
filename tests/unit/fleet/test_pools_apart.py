"""Pools whose nodes of the store are apart: one that stands still is no reason for the others to wait."""

import asyncio
from collections.abc import AsyncIterator, Mapping

import pytest

from tests.unit.fleet.parts import Engine, Keeper, Shelf, SkewedClock
from tests.waiting import until


@pytest.fixture
async def engines() -> AsyncIterator[list[Engine]]:
    """Three engines."""
    engines = [Engine() for _ in range(3)]
    for engine in engines:
        await engine.start()
    yield engines
    for engine in engines:
        await engine.stop()


class Uneven(Shelf):
    """A store in which each pool has its own node; that of the first that is written stands still until `thawed`."""

    def __init__(self, clock: SkewedClock) -> None:
        super().__init__(clock)
        self.thawed = asyncio.Event()
        self.ill = ""

    async def put_states(self, pool: str, states: Mapping[str, bytes]) -> None:
        """See `Store.put_states`."""
        self.ill = self.ill or pool
        if pool == self.ill:
            await self.thawed.wait()
        await super().put_states(pool, states)


async def test_a_pool_whose_node_stands_still_holds_up_no_other(engines: list[Engine]) -> None:
    """States of other pools are published meanwhile; one after the other they would outlast a lease."""
    clock = SkewedClock()
    shelf = Uneven(clock)
    keeper = Keeper("a", shelf, clock)
    first, second, third = ([engine.address] for engine in engines)
    await keeper.configure(a=first, b=second, c=third)
    going = asyncio.create_task(keeper.round())
    await until(lambda: {pool for pool, _ in shelf.writes} == {"a", "b", "c"} - {shelf.ill})
    assert shelf.ill
    shelf.thawed.set()
    await going
    assert {pool for pool, _ in shelf.writes} == {"a", "b", "c"}
    await keeper.close()

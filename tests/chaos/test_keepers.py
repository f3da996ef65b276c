"""Keepers as processes, killed and frozen: each engine is asked by one of them, and no more often than by one alone."""

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from tests.chaos.keepers import Engines, KeeperProcess, keeper, serve_engines
from tests.valkey import Valkey
from tests.waiting import until

HOLD_MS = 1000


@pytest.fixture
def server() -> Iterator[Valkey]:
    """A store to be ill-treated."""
    with Valkey() as server:
        yield server


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    """Eight engines."""
    async with serve_engines(8) as engines:
        yield engines


class Fleet:
    """Keepers that come and go; all are ended with the test."""

    def __init__(self, folder: Path, server: Valkey, engines: Engines, stack: contextlib.AsyncExitStack) -> None:
        self._folder = folder
        self._server = server
        self._engines = engines
        self._stack = stack
        self._numbers = itertools.count()

    async def start(self, number: int, beside: Sequence[KeeperProcess] = ()) -> list[KeeperProcess]:
        """So many more beside those, all with even shares."""
        starting = (
            keeper(self._folder / f"k{next(self._numbers)}", self._server.url, self._engines.addresses, hold_ms=HOLD_MS)
            for _ in range(number)
        )
        keepers = list(await asyncio.gather(*(self._stack.enter_async_context(each) for each in starting)))
        await self.shared([each.id for each in (*beside, *keepers)])
        return keepers

    async def shared(self, ids: list[str]) -> None:
        """Wait until these keepers, and nobody else, have asked for a while, each engine by one, in even shares."""
        window_s = 0.5

        def even() -> bool:
            by = self._engines.keepers_of(time.monotonic() - window_s)
            sizes = [sum(who == {id_} for who in by.values()) for id_ in ids]
            return sum(sizes) == len(by) and max(sizes) - min(sizes) <= 1

        await until(even)


@pytest.fixture
async def fleet(tmp_path: Path, server: Valkey, engines: Engines) -> AsyncIterator[Fleet]:
    """A fleet without keepers."""
    async with contextlib.AsyncExitStack() as stack:
        yield Fleet(tmp_path, server, engines, stack)


async def rate(engines: Engines) -> float:
    """Scrapes a second of all engines, over a few hundred of them."""
    begun, before = time.monotonic(), len(engines.asked)
    await until(lambda: len(engines.asked) >= before + 200)
    return (len(engines.asked) - before) / (time.monotonic() - begun)


async def test_more_keepers_ask_no_more(fleet: Fleet, engines: Engines) -> None:
    """Four keepers load the engines as one does; without sharing it would be four times as much."""
    keepers = await fleet.start(1)
    alone = await rate(engines)
    keepers += await fleet.start(3, beside=keepers)
    together = await rate(engines)
    assert 0.5 < together / alone < 1.5


async def test_a_killed_keepers_engines_are_read_by_the_others(fleet: Fleet, engines: Engines) -> None:
    """Nobody tells them: the lease of the dead runs out."""
    keepers = await fleet.start(3)
    victim, *others = keepers
    victim.send(signal.SIGKILL)
    await fleet.shared([each.id for each in others])
    await until(lambda: all(engines.keepers_of(time.monotonic() - 0.5).values()))
    assert victim.id not in set().union(*engines.keepers_of(time.monotonic() - 0.5).values())


async def test_a_frozen_keeper_that_wakes_up_disturbs_nobody(fleet: Fleet, engines: Engines) -> None:
    """While it stands still others read its engines; awake, it asks none that another one still asks."""
    keepers = await fleet.start(3)
    frozen, *others = keepers
    frozen.send(signal.SIGSTOP)
    await fleet.shared([each.id for each in others])
    woken = time.monotonic()
    frozen.send(signal.SIGCONT)
    await fleet.shared([each.id for each in keepers])
    for engine in engines.addresses:
        asked = [each.keeper for each in engines.since(woken) if each.engine == engine]
        turns = [who for who, _ in itertools.groupby(asked)]
        assert len(turns) == len(set(turns)), turns


async def test_without_a_store_each_engine_keeps_its_keeper(fleet: Fleet, server: Valkey, engines: Engines) -> None:
    """Keepers go on with what they had, ask for no more, and share again when the store is back."""
    keepers = await fleet.start(2)
    server.kill()
    killed = time.monotonic()
    # Past the leases they ask slowly, and are heard of again.
    await until(lambda: all(engines.keepers_of(killed + 3 * HOLD_MS / 1000).values()))
    assert {len(who) for who in engines.keepers_of(killed).values()} == {1}
    server.start()
    await fleet.shared([each.id for each in keepers])

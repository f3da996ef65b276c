"""What a keeper has asked engines and not heard yet, and what it remembers of how each is read."""

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import aiohttp

from extproc.clock import Clock
from extproc.config import EngineKind
from extproc.engines.adapter import Adapter
from extproc.fleet.asking import fetch
from extproc.fleet.health import Failure
from extproc.fleet.reader import Described, Reader, Told

Key = tuple[str, str]
"""Pool and endpoint id."""

_T = TypeVar("_T")


class Inquiries:
    """One question about the load and one for the slow pages may be out for each endpoint."""

    def __init__(self, adapters: Sequence[Adapter], clock: Clock, rng: random.Random) -> None:
        """Begin with nothing.

        Args:
            adapters: how to read each kind of engine.
            clock: says when the slow pages are due, by monotonic time.
            rng: spreads the questions for them.
        """
        self._adapters = adapters
        self._clock = clock
        self._rng = rng
        self._kinds: Mapping[str, EngineKind] = {}
        self._readers: dict[Key, tuple[str, Reader]] = {}
        self._loads: dict[Key, asyncio.Task[Told]] = {}
        self._abouts: dict[Key, asyncio.Task[Described]] = {}

    def apply(self, kinds: Mapping[str, EngineKind]) -> None:
        """Take the configured kind of engine of each pool; what was found out under another one is forgotten."""
        for key in [key for key in self._readers if kinds.get(key[0]) != self._kinds[key[0]]]:
            del self._readers[key]
        self._kinds = dict(kinds)

    def __contains__(self, key: Key) -> bool:
        """Whether an endpoint owes the answer about its load."""
        return key in self._loads

    def keys(self) -> set[Key]:
        """Endpoints of which anything is remembered, or that owe an answer."""
        return {*self._readers, *self._loads, *self._abouts}

    def ask(self, session: aiohttp.ClientSession, key: Key, destination: str) -> None:
        """Ask an endpoint for its load. Behind a new address stands another engine, of which nothing is known."""
        known = self._readers.get(key)
        if known is None or known[0] != destination:
            known = self._readers[key] = destination, Reader(self._adapters, self._kinds[key[0]])
        asking = known[1].load(partial(fetch, session, destination), self._clock.monotonic())
        self._loads[key] = asyncio.create_task(asking, name=f"scrape {destination}")

    async def loads(self, until: float) -> dict[Key, Told]:
        """Answers about loads that came, or come until this monotonic time."""
        return await self._answers(self._loads, until)

    async def abouts(
        self, session: aiohttp.ClientSession, answered: Mapping[Key, Told], until: float
    ) -> dict[Key, Described]:
        """Ask those that just answered for their slow pages, where it is time; the answers that come until then.

        It is done behind the answer about the load to use the same connection, which engines have few of.
        """
        now = self._clock.monotonic()
        for key, told in answered.items():
            lost = told.outcome in {Failure.UNREACHABLE, Failure.SILENT}
            known = self._readers.get(key)
            if known is None or lost or key in self._abouts or not known[1].about_due(now):
                continue
            destination, reader = known
            asking = reader.about(partial(fetch, session, destination), now, self._rng.random())
            self._abouts[key] = asyncio.create_task(asking, name=f"scrape {destination} for more")
        return await self._answers(self._abouts, until)

    async def _answers(self, tasks: dict[Key, asyncio.Task[_T]], until: float) -> dict[Key, _T]:
        if tasks:
            await asyncio.wait(tasks.values(), timeout=max(0.0, until - self._clock.monotonic()))
        done = [key for key, task in tasks.items() if task.done()]
        return {key: tasks.pop(key).result() for key in done}

    def restarted(self, key: Key) -> None:
        """An engine was started anew: its slow pages are due."""
        if key in self._readers:
            self._readers[key][1].restarted()

    async def drop(self, keys: Collection[Key]) -> None:
        """Give up the answers of these endpoints that are still out, and forget how they are read."""
        out: Sequence[dict[Key, asyncio.Task[Any]]] = (self._loads, self._abouts)
        tasks = [task for key in keys for asked in out if (task := asked.pop(key, None))]
        for key in keys:
            self._readers.pop(key, None)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

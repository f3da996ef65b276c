"""What tests of rollouts share: a model with two versions, a rollout of it, a store that can be down or flushed."""

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest

from extproc.config import Config
from extproc.config_rollouts import Gates
from extproc.errors import StoreError
from extproc.fleet.holding import Holding
from extproc.fleet.rollouts import WORK, Controller
from extproc.rollout import advance
from extproc.rollout.state import GROUP, Event, Plan, Rollout, decode, decode_event, encode
from extproc.state.document_store import Document, Documents
from extproc.state.memory import MemoryStore
from extproc.state.values import FeedEntry
from extproc.telemetry.families import Families
from extproc.telemetry.rollout_metrics import RolloutMetrics
from tests.unit.fleet.parts import SkewedClock

LEASE_S = 3.0


def configured(**sections: Any) -> Config:
    """Model `m` in versions `one`, which has all traffic, and `two`."""
    versions = {"one": {"pool": "p1", "weight": 1}, "two": {"pool": "p2"}}
    base = {
        "models": {"m": {"versions": versions}},
        "pools": {"p1": {"endpoints": ["10.0.0.1:80"]}, "p2": {"endpoints": ["10.0.0.2:80"]}},
    }
    return msgspec.convert({**base, **sections}, Config)


def plan(**changes: Any) -> Plan:
    """Three steps of ten seconds that need no answers."""
    fields: dict[str, Any] = {
        "steps": (0.05, 0.25, 1.0),
        "hold_s": 10.0,
        "settle_s": 0.0,
        "min_samples": 0,
        "on_failure": "rollback",
        "false_alarms": 0.01,
        "require_verdict": False,
        "retire_after_s": 20.0,
        "gates": Gates(),
    }
    return Plan(**(fields | changes))


def started(now: float, name: str = "r1", **changes: Any) -> Rollout:
    """A rollout of `m` to version `two` that begins now, with its event."""
    rollout, event = advance.begin(name, "m", "two", {"one": 1.0, "two": 0.0}, plan(**changes), (now, "ann"))
    return msgspec.structs.replace(rollout, event=event)


class Shelf(MemoryStore):
    """A store that can be down, or flushed.

    Attributes:
        down: no call is answered.
        record_down: nothing can be recorded.
        asked: how often documents were asked for.
        searched: how often records were.
        puts: parts that were put.
    """

    def __init__(self, clock: SkewedClock) -> None:
        super().__init__(clock)
        self.clock = clock
        self.down = self.record_down = False
        self.asked = self.searched = 0
        self.puts: list[tuple[str, str]] = []

    def _answer(self) -> None:
        if self.down:
            raise StoreError("the store is down")

    async def documents(self, group: str) -> Documents:
        """See `Store.documents`."""
        self.asked += 1
        self._answer()
        return await super().documents(group)

    async def put_document(self, group: str, name: str, document: Document) -> bool:
        """See `Store.put_document`."""
        self._answer()
        return await super().put_document(group, name, document)

    async def put_part(self, group: str, name: str, part: str, payload: bytes, ttl_ms: int) -> None:
        """See `Store.put_part`."""
        self._answer()
        self.puts.append((name, part))
        await super().put_part(group, name, part, payload, ttl_ms)

    async def parts(self, group: str, name: str) -> Mapping[str, bytes]:
        """See `Store.parts`."""
        self._answer()
        return await super().parts(group, name)

    async def record(self, group: str, name: str, payload: bytes, cap: int, keep_ms: int) -> str:
        """See `Store.record`."""
        self._answer()
        if self.record_down:
            raise StoreError("nothing can be recorded")
        return await super().record(group, name, payload, cap, keep_ms)

    async def records(self, group: str, name: str, limit: int, before: str = "") -> Sequence[FeedEntry]:
        """See `Store.records`."""
        self.searched += 1
        self._answer()
        return await super().records(group, name, limit, before)

    async def hold(self, pool: str, group: str, holder: str, names: Collection[str], lease_ms: int) -> Collection[str]:
        """See `Store.hold`."""
        self._answer()
        return await super().hold(pool, group, holder, names, lease_ms)

    def flush(self) -> None:
        """Lose everything."""
        self.__dict__.update(MemoryStore(self.clock).__dict__)

    async def put(self, rollout: Rollout) -> bool:
        """Put a rollout as the next revision, as an operator does."""
        found = (await self.documents(GROUP)).found.get(rollout.model)
        return await self.put_document(
            GROUP, rollout.model, Document(found.revision + 1 if found else 1, encode(rollout))
        )

    async def kept(self, model: str = "m") -> Document:
        """The document of a model."""
        return (await MemoryStore.documents(self, GROUP)).found[model]

    async def rollout(self, model: str = "m") -> Rollout:
        """The rollout of a model."""
        return decode((await self.kept(model)).payload)

    async def log(self, model: str = "m") -> list[Event]:
        """Its audit log, oldest first."""
        return [decode_event(entry.payload) for entry in reversed(await MemoryStore.records(self, GROUP, model, 1000))]


class HostClock:
    """A host's own clock: it goes as that of all others, and tells a wall time of its own."""

    def __init__(self, clock: SkewedClock) -> None:
        self._clock = clock
        self.skew_s = 0.0

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return self._clock.monotonic()

    def wall(self) -> float:
        """See `Clock.wall`."""
        return self._clock.monotonic() + self.skew_s


class Keeper:
    """A controller with its surroundings; several may share a shelf."""

    def __init__(self, shelf: Shelf, name: str = "k1", config: Config | None = None) -> None:
        self.shelf = shelf
        self.clock = HostClock(shelf.clock)
        self.registry = CollectorRegistry()
        self.holding = Holding(shelf, WORK, name, self.clock)
        metrics = RolloutMetrics(Families(self.registry))
        self.controller = Controller(shelf, self.holding, metrics, self.clock, random.Random(1))
        self.controller.apply(config or configured())

    async def rounds(self, seconds: float) -> None:
        """A round every half second, for so long by everybody's clock."""
        await rounds(self.shelf, [self], seconds)

    def page(self) -> list[str]:
        """Lines of its metrics page."""
        return generate_latest(self.registry).decode().splitlines()


async def rounds(shelf: Shelf, keepers: Sequence[Keeper], seconds: float) -> None:
    """Rounds of all these keepers."""
    for _ in range(round(seconds * 2)):
        for keeper in keepers:
            await keeper.controller.round()
        shelf.clock.advance(0.5)

"""Rollouts on a real Valkey: two keepers and a worker share one, and what is lost there comes back."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from extproc.choose.fleet import Fleet
from extproc.clock import SystemClock
from extproc.config import Config
from extproc.config_rollouts import Gates
from extproc.fleet.holding import Holding
from extproc.fleet.rollouts import SHARD, WORK, Controller
from extproc.rollout import advance
from extproc.rollout.state import GROUP, Plan, Rollout, decode, decode_event, encode
from extproc.rollout_following import Following
from extproc.router import Surroundings
from extproc.state.document_store import Document
from extproc.state.store import Store
from extproc.telemetry.families import Families
from extproc.telemetry.rollout_metrics import RolloutMetrics, VersionMetrics
from tests.contract.conftest import RedisWorld, redis_world_on
from tests.valkey import Valkey

CONFIG: Final = msgspec.convert(
    {
        "models": {"m": {"versions": {"one": {"pool": "p", "weight": 1}, "two": {"pool": "q"}}}},
        "pools": {"p": {"endpoints": ["10.0.0.1:80"]}, "q": {"endpoints": ["10.0.0.2:80"]}},
        "redis": {"hold_ms": 500},
    },
    Config,
)
PLAN: Final = Plan(
    steps=(0.05, 0.25, 1.0),
    hold_s=0.5,
    settle_s=0.0,
    min_samples=0,
    on_failure="rollback",
    false_alarms=0.01,
    require_verdict=False,
    retire_after_s=0.5,
    gates=Gates(),
)
WHOLE: Final = ["started", "step", "step", "promoted", "retired"]


@pytest.fixture
async def world(valkey: Valkey) -> AsyncIterator[RedisWorld]:
    """Stores on one Valkey."""
    async with redis_world_on(valkey) as opened:
        yield opened


async def start(store: Store) -> Rollout:
    """Begin a rollout, as an operator does."""
    now = (await store.documents(GROUP)).now
    rollout, event = advance.begin("r1", "m", "two", {"one": 1.0, "two": 0.0}, PLAN, (now, "ann"))
    rollout = msgspec.structs.replace(rollout, event=event)
    assert await store.put_document(GROUP, "m", Document(1, encode(rollout)))
    return rollout


class Keeper:
    """One keeper's part."""

    def __init__(self, store: Store, name: str) -> None:
        clock = SystemClock()
        self.holding = Holding(store, WORK, name, clock)
        metrics = RolloutMetrics(Families(CollectorRegistry()))
        self.controller = Controller(store, self.holding, metrics, clock, random.Random(1))
        self.controller.apply(CONFIG)


def worker(store: Store) -> Following:
    """One worker's part."""
    around = Surroundings(CONFIG, Fleet({}, {}, ""), {}, store, "w1", lambda: "c")
    return Following(around, VersionMetrics(Families(CollectorRegistry())), SystemClock(), random.Random(1))


async def rounds(keepers: Sequence[Keeper], until: Callable[[Rollout], bool], store: Store) -> Rollout:
    """Rounds of all these keepers until the rollout is as it should be."""
    async with asyncio.timeout(60):
        while True:
            for keeper in keepers:
                await keeper.controller.round()
            rollout = await kept(store)
            if until(rollout):
                return rollout
            await asyncio.sleep(0.05)


async def kept(store: Store) -> Rollout:
    """The rollout in the store."""
    return decode((await store.documents(GROUP)).found["m"].payload)


async def log(store: Store) -> list[str]:
    """What happened, oldest first."""
    return [decode_event(entry.payload).what for entry in reversed(await store.records(GROUP, "m", 100))]


@pytest.mark.parametrize("dies", [False, True], ids=["both live", "one dies"])
async def test_two_keepers_take_each_step_once(world: RedisWorld, dies: bool) -> None:
    """Whether the one that acts lives to the end or not; each line of the audit log is there once."""
    store = world.store()
    await start(store)
    keepers = [Keeper(world.store(), name) for name in ("k1", "k2")]
    await rounds(keepers, lambda rollout: rollout.step == 1, store)
    acting = [keeper for keeper in keepers if keeper.holding.held(SHARD)]
    assert len(acting) == 1
    if dies:
        keepers.remove(acting[0])
    await rounds(keepers, lambda rollout: rollout.phase == "retired", store)
    assert await log(store) == WHOLE
    assert (await store.documents(GROUP)).found["m"].revision == len(WHOLE)


async def test_keepers_that_run_beside_each_other_take_each_step_once(world: RedisWorld) -> None:
    """At their own pace, as processes do; the one that is stopped gives its lease up."""
    store = world.store()
    await start(store)
    keepers = [Keeper(world.store(), name) for name in ("k1", "k2")]
    tasks = [asyncio.create_task(keeper.controller.run()) for keeper in keepers]
    try:
        await rounds([], lambda rollout: rollout.step == 1, store)
        acting = next(at for at, keeper in enumerate(keepers) if keeper.holding.held(SHARD))
        tasks[acting].cancel()
        await rounds([], lambda rollout: rollout.phase == "retired", store)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert await log(store) == WHOLE


async def test_a_flush_moves_no_traffic(world: RedisWorld) -> None:
    """The worker goes on by what it knows, and the keeper puts the document back as it was."""
    store = world.store()
    await start(store)
    keeper, following = Keeper(world.store(), "k1"), worker(world.store())
    await rounds([keeper], lambda rollout: rollout.step == 1, store)
    await following.look()
    before: Any = (await store.documents(GROUP)).found
    for key in world.raw.scan_iter(f"{world.prefix}:*", count=1000):
        world.raw.delete(key)
    assert (await store.documents(GROUP)).found == {}
    await following.look()
    splits = following._around.fleet.splits
    assert splits["m"].weights["two"] == 0.25
    await keeper.controller.round()
    assert (await store.documents(GROUP)).found == before
    await rounds([keeper], lambda rollout: rollout.phase == "retired", store)
    await following.look()
    assert following._around.fleet.splits["m"].weights == {"two": 1.0}

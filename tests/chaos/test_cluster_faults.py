"""One node of a cluster frozen: pools on other nodes do not notice."""

from collections.abc import AsyncIterator, Iterator

import pytest

from extproc.clock import SystemClock
from extproc.state.memory import MemoryStore
from extproc.state.redis import RedisStore
from extproc.state.resilient import ResilientStore
from extproc.state.trouble import Trouble
from extproc.state.values import Reserve, Settle
from tests.chaos.traffic import DEADLINE_MS, ENGINES, PROBE_S
from tests.cluster import ClusterFleet
from tests.waiting import until


@pytest.fixture
def fleet() -> Iterator[ClusterFleet]:
    """Three nodes."""
    with ClusterFleet() as running:
        yield running


@pytest.fixture
async def store(fleet: ClusterFleet) -> AsyncIterator[ResilientStore]:
    """The store as a worker composes it."""
    store = ResilientStore(RedisStore(fleet.url, DEADLINE_MS), MemoryStore(SystemClock()), probe_s=PROBE_S)
    for pool in fleet.pools_apart():
        await store.ping(pool)
    yield store
    await store.close()


async def serve(store: ResilientStore, pool: str, charge: str) -> None:
    """One request from its decision to its end."""
    assert (await store.reserve(Reserve(pool, charge, "worker", ENGINES, pin_key=charge))).endpoint
    await store.settle(Settle(pool, charge, "worker"))


async def test_a_frozen_node_degrades_its_own_pools_alone(fleet: ClusterFleet, store: ResilientStore) -> None:
    """Decisions for a pool of another node are shared throughout, without a wait."""
    ill, well = fleet.pools_apart()
    await store.reserve(Reserve(ill, "open", "worker", ENGINES))
    node = fleet.owner(ill)
    node.freeze()
    try:
        await serve(store, ill, "first")
        assert store.degraded_in(ill)
        for number in range(20):
            await serve(store, well, f"c{number}")
            await serve(store, ill, f"c{number}")
        assert not store.degraded_in(well)
        assert store.troubles() == {ill: Trouble.SLOW}
        assert store.stats.failures == {Trouble.SLOW: 1}
    finally:
        node.thaw()
    await until(lambda: store.settled and not store.degraded)
    witness = RedisStore(fleet.url, 10_000.0)
    await witness.ping(ill)
    assert sum(load.running for load in (await witness.loads(ill)).values()) == 1
    await store.settle(Settle(ill, "open", "worker"))
    assert sum(load.running for load in (await witness.loads(ill)).values()) == 0
    await witness.close()

"""What the keeper says of the shared store: one word, one log line per change, the node's own numbers."""

import logging
from typing import Any

import msgspec
import pytest

from extproc.clock import ManualClock
from extproc.errors import StoreError
from extproc.state.memory import MemoryStore
from extproc.state.report import Report
from extproc.state.resilient import ResilientStore
from extproc.state.trouble import RefusedError, StoreDeadlineError
from extproc.store_watch import StoreWatch
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.store_metrics import StoreMetrics

WELL = Report(
    kind="valkey",
    version="9.0.1",
    role="master",
    used_bytes=100,
    max_bytes=1000,
    policy="volatile-lru",
    evicted_keys=40,
    connected_clients=3,
    uptime_s=60,
)


class Nodes:
    """Servers that tell what they are told to tell, one for each pool."""

    def __init__(self, *pools: str) -> None:
        self.told: dict[str, Report | StoreError] = dict.fromkeys(pools, WELL)

    async def report(self, pool: str = "") -> Report:
        """See `store_watch.Reporting.report`."""
        told = self.told[pool]
        if isinstance(told, StoreError):
            raise told
        return told


class Bench:
    """A watch over the nodes of two pools."""

    def __init__(self) -> None:
        self.nodes = Nodes("p", "q")
        self.clock = ManualClock()
        self.metrics = Metrics()
        self.store = ResilientStore(MemoryStore(self.clock), MemoryStore(self.clock))
        shown: StoreMetrics = self.metrics.store
        self.watch = StoreWatch(self.nodes, self.store, lambda: self.nodes.told, shown, self.clock)

    async def look(self, pool: str = "p", told: StoreError | None = None, **changes: object) -> str:
        """Let a pool's node change, look, and return the word."""
        self.nodes.told[pool] = told or msgspec.structs.replace(WELL, **changes)
        await self.watch.look()
        return self.watch.component()


@pytest.fixture
def bench() -> Bench:
    """Two nodes that are well."""
    return Bench()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "ok"),
        ({"version": "7.0.1"}, "old_version"),
        ({"role": "replica"}, "read_only"),
        ({"policy": "allkeys-lru"}, "bad_policy"),
        ({"policy": "volatile-ttl"}, "bad_policy"),
        ({"policy": "noeviction"}, "ok"),
        ({"policy": "noeviction", "used_bytes": 950}, "nearly_full"),
        ({"used_bytes": 950}, "ok"),
        ({"policy": "allkeys-lru", "max_bytes": 0}, "ok"),
    ],
)
async def test_what_the_store_tells_of_itself_is_one_word(bench: Bench, changes: dict[str, Any], word: str) -> None:
    """Only what makes it unfit for a ledger is a word other than `ok`: a cache at its cap that drops pins is fit."""
    assert await bench.look(**changes) == word


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (StoreError("gone"), "down"),
        (StoreDeadlineError("late"), "slow"),
        (RefusedError("LOADING"), "loading"),
        (RefusedError("WRONGPASS"), "wrong_password"),
        (RefusedError("NOPERM"), "ok"),
    ],
)
async def test_a_store_that_does_not_tell_is_named_by_its_trouble(bench: Bench, error: StoreError, word: str) -> None:
    """All but a missing permission for the report alone: the calls that matter say themselves what they lack."""
    assert await bench.look(told=error) == word
    assert await bench.look() == "ok"


async def test_calls_of_this_process_count_too(bench: Bench) -> None:
    """A circuit that opened between two looks shows at once, and goes before what the store tells of itself."""

    class Gone(MemoryStore):
        async def ping(self, pool: str = "") -> None:
            raise StoreError(f"{pool} is gone")

    bench.store = ResilientStore(Gone(bench.clock), MemoryStore(bench.clock))
    bench.watch = StoreWatch(bench.nodes, bench.store, lambda: bench.nodes.told, bench.metrics.store, bench.clock)
    assert await bench.look(role="replica") == "read_only"
    with pytest.raises(StoreError):
        await bench.store.ping("q")
    assert bench.watch.component() == "down"
    bench.watch.tell()
    assert 'warmpath_store_degraded{pool="q"} 1.0' in bench.metrics.page().decode()
    await bench.store.close()


async def test_evictions_show_for_a_minute(bench: Bench) -> None:
    """Those of before the first look do not, nor does a count that a restart set back."""
    assert await bench.look() == "ok"
    assert await bench.look(evicted_keys=41) == "evicting"
    bench.clock.advance(59.0)
    assert await bench.look(evicted_keys=41) == "evicting"
    bench.clock.advance(2.0)
    assert await bench.look(evicted_keys=41) == "ok"
    assert await bench.look(evicted_keys=0) == "ok"


async def test_the_worst_of_several_nodes_is_the_word(bench: Bench) -> None:
    """In a cluster pools' nodes differ."""
    await bench.look("p", policy="allkeys-lru")
    assert await bench.look("q", role="replica") == "read_only"
    del bench.nodes.told["q"]
    await bench.watch.look()
    assert bench.watch.component() == "bad_policy"


async def test_a_finding_is_logged_once_when_it_comes_and_once_when_it_goes(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """However many pools have it, and although its numbers change from look to look."""
    caplog.set_level(logging.INFO)
    for used in (910, 930, 950):
        await bench.look("p", used_bytes=used)
        await bench.look("q", used_bytes=used)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    await bench.look("p")
    assert len(caplog.records) == 1
    await bench.look("q")
    await bench.look("q")
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_the_nodes_numbers_are_on_the_page(bench: Bench) -> None:
    """Memory, evictions, connections and role, by the pool that a node has."""
    await bench.look("q", role="replica", evicted_keys=77)
    page = bench.metrics.page().decode()
    for line in (
        'warmpath_store_used_bytes{pool="p"} 100.0',
        'warmpath_store_max_bytes{pool="p"} 1000.0',
        'warmpath_store_clients{pool="p"} 3.0',
        'warmpath_store_master{pool="p"} 1.0',
        'warmpath_store_master{pool="q"} 0.0',
        'warmpath_store_evicted_keys{pool="q"} 77.0',
    ):
        assert line in page

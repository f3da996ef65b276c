"""A worker's background work: current members and states, without a store too."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from extproc.clock import ManualClock
from extproc.config import Config
from extproc.errors import StoreError
from extproc.fleet.membership import Membership
from extproc.router import Surroundings
from extproc.state.endpoint import EndpointState, encode
from extproc.state.feed import Cached, Exact, pack
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from extproc.state.values import Beat
from extproc.upkeep import Upkeep
from tests.unit.top.parts import config, surroundings
from tests.unit.top.test_splits import rollout
from tests.waiting import until

ONE, TWO = "10.0.0.1:80", "10.0.0.2:80"


class Store(MemoryStore):
    """A memory store that can be gone, or hold one answer back."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.gone = False
        self.heartbeats: list[str] = []
        self.held_back: asyncio.Event | None = None

    async def states(self, pool: str) -> Mapping[str, bytes]:
        """As ever, unless gone or held back."""
        if self.gone:
            raise StoreError("gone")
        held_back, self.held_back = self.held_back, None
        if held_back:
            await held_back.wait()
        return await super().states(pool)

    async def heartbeat(self, pool: str, replica: str, lease_ms: int) -> Beat:
        """As ever, noted, unless gone."""
        if self.gone:
            raise StoreError("gone")
        self.heartbeats.append(pool)
        return await super().heartbeat(pool, replica, lease_ms)


class Bench:
    """An upkeep over one pool, with names resolved from a table."""

    def __init__(self, *endpoints: str) -> None:
        self.store = Store()
        self.names = {"engine": ["10.0.0.7"]}
        self.settings = config(pools={"main": {"endpoints": list(endpoints)}}, redis={"lease_ms": 1000})
        self.around: Surroundings = surroundings(settings=self.settings)
        self.around.store = self.store
        self.membership = Membership(self.resolve, every_s=0.01)
        self.clock = ManualClock()
        self.upkeep = Upkeep(self.around, self.membership, self.clock)

    async def resolve(self, host: str, /) -> Sequence[str]:
        """See `Resolver`."""
        return self.names[host]

    def destinations(self) -> list[str]:
        """What decisions see."""
        return [endpoint.destination for endpoint in self.around.fleet.pools["main"].endpoints]


async def test_a_changed_configuration_is_in_the_next_snapshot() -> None:
    """Added endpoints are there and removed ones are gone as soon as `apply` returns; weights too."""
    bench = Bench(ONE)
    await bench.upkeep.apply(bench.settings)
    assert bench.destinations() == [ONE]
    await bench.upkeep.apply(config(pools={"main": {"endpoints": [TWO], "policy": "round_robin"}}))
    assert bench.destinations() == [TWO]
    assert bench.around.fleet.pools["main"].policy == "round_robin"


async def test_what_left_is_forgotten() -> None:
    """Profile, rate and state of a removed endpoint do not come back with it."""
    bench = Bench(ONE, TWO)
    await bench.store.put_states("main", {TWO: encode(EndpointState(destination=TWO, draining=True))})
    await bench.upkeep.apply(bench.settings)
    bench.around.knowledge["main"].decided("c", TWO, [1, 2])
    await bench.upkeep.apply(config(pools={"main": {"endpoints": [ONE]}}))
    assert bench.around.knowledge["main"].held(TWO) == 0
    bench.store.gone = True
    await bench.upkeep.apply(bench.settings)
    assert not any(endpoint.draining for endpoint in bench.around.fleet.pools["main"].endpoints)


async def test_without_a_store_the_last_states_stay() -> None:
    """An endpoint that was draining drains on while Redis is away."""
    bench = Bench(ONE)
    await bench.store.put_states("main", {ONE: encode(EndpointState(destination=ONE, draining=True))})
    await bench.upkeep.apply(bench.settings)
    bench.store.gone = True
    await bench.upkeep.refresh()
    assert bench.around.fleet.pools["main"].endpoints[0].draining


async def test_what_no_keeper_keeps_up_is_not_known_exactly() -> None:
    """Without news of an engine's state its exact profile does not count: what was evicted since would be believed.

    With the news it counts again, a little later: what was missed of the feed is told from its numbers.
    """
    bench = Bench(ONE)
    exact, chains = bench.around.knowledge["main"].caches.exact, {16: [1, 2]}
    exact.told(Exact(ONE, 0, 16), "keeper")
    exact.told(Cached(ONE, 0, 0, pack([1, 2])), "keeper")
    known = []
    for quarter in range(40):
        told_at = max(0, quarter - 27)
        await bench.store.put_states("main", {ONE: encode(EndpointState(destination=ONE, scraped_at=told_at))})
        await bench.upkeep.apply(bench.settings)
        known.append(exact.counts(ONE))
        assert list(exact.matches(chains, 100, (1.0, 1.0))) == ([ONE] if known[-1] else [])
        bench.clock.advance(0.25)
    # 5 s and three scrapes after the last news, until one second after the next.
    assert known == [True] * 24 + [False] * 8 + [True] * 8


async def test_a_worker_that_stood_still_does_not_believe_what_it_was_told_before() -> None:
    """It was stopped, or busy: neither before its next look, nor before it has read what came meanwhile."""
    bench = Bench(ONE)
    around, clock = bench.around, bench.clock
    exact = around.knowledge["main"].caches.exact
    exact.told(Exact(ONE, 0, 16), "keeper")

    async def look() -> None:
        state = EndpointState(destination=ONE, scraped_at=clock.monotonic())
        await bench.store.put_states("main", {ONE: encode(state)})
        await bench.upkeep.refresh()

    await bench.upkeep.apply(bench.settings)
    for _ in range(20):
        await look()
        assert exact.counts(ONE)
        assert around.believed_until > clock.monotonic()
        clock.advance(0.25)
    clock.advance(10.0)
    assert around.believed_until < clock.monotonic()
    await look()
    assert around.believed_until > clock.monotonic()
    assert not exact.counts(ONE)
    clock.advance(0.9)
    await look()
    assert not exact.counts(ONE)
    clock.advance(0.2)
    await look()
    assert exact.counts(ONE)


async def test_a_state_that_cannot_be_read_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Foreign bytes in the store harm their endpoint alone, and are said."""
    bench = Bench(ONE, TWO)
    good = encode(EndpointState(destination=TWO, scraped_at=1000.0, running=4))
    await bench.store.put_states("main", {ONE: b"\xff\xfe", TWO: good})
    await bench.upkeep.apply(bench.settings)
    assert [endpoint.running for endpoint in bench.around.fleet.pools["main"].endpoints] == [0, 4]
    assert "an endpoint's state is left out" in caplog.text
    said = len(caplog.records)
    await bench.upkeep.refresh()
    assert len(caplog.records) == said  # four times a second it would bury everything else


async def test_an_engine_that_started_anew_has_an_empty_profile() -> None:
    """A new start time in the published state empties what was believed cached."""
    bench = Bench(ONE)
    known = bench.around.knowledge["main"]
    for started_at, held in ((100.0, 2), (100.0, 2), (200.0, 0)):
        state = EndpointState(destination=ONE, started_at=started_at, kv_blocks=1000, block_tokens=16)
        await bench.store.put_states("main", {ONE: encode(state)})
        if held:
            known.decided("c", ONE, [1, 2])
        await bench.upkeep.apply(bench.settings)
        assert known.held(ONE) == held


@pytest.mark.parametrize(
    "state", [EndpointState(destination=ONE, prefix_caching=False), EndpointState(destination=ONE, asleep=True)]
)
async def test_an_engine_that_caches_nothing_has_no_profile(state: EndpointState) -> None:
    """Prefix caching off, or a sleep that emptied the cache: nothing is predicted cached there."""
    bench = Bench(ONE)
    known = bench.around.knowledge["main"]
    await bench.upkeep.apply(bench.settings)
    known.decided("c", ONE, [1, 2])
    await bench.store.put_states("main", {ONE: encode(state)})
    await bench.upkeep.refresh()
    assert known.matched_tokens([1, 2]) == {}


async def test_time_empties_profiles() -> None:
    """Blocks that nothing uses go after `profile_ttl_s`; an endpoint out of reach loses all after a minute."""
    bench = Bench(ONE, TWO)
    bench.settings = config(
        pools={"main": {"endpoints": [ONE, TWO]}}, redis={"lease_ms": 1000}, routing={"profile_ttl_s": 100.0}
    )
    known = bench.around.knowledge["main"]
    await bench.store.put_states("main", {TWO: encode(EndpointState(destination=TWO, reachable=False))})
    await bench.upkeep.apply(bench.settings)
    for name in (ONE, TWO):
        known.decided("c", name, [1, 2])
    held = []
    for _ in range(12):
        await bench.upkeep.refresh()
        held.append((known.held(ONE), known.held(TWO)))
        bench.clock.advance(10.0)
    assert held[5] == (2, 2)
    assert held[7] == (2, 0)
    assert held[11] == (0, 0)


async def test_a_refresh_that_overlaps_a_reload_does_not_bring_old_members_back() -> None:
    """A refresh was waiting for the store when the configuration changed: it ends with the new members."""
    bench = Bench(ONE)
    await bench.upkeep.apply(bench.settings)
    answer = bench.store.held_back = asyncio.Event()
    slow = asyncio.create_task(bench.upkeep.refresh())
    await until(lambda: bench.store.held_back is None)
    await bench.upkeep.apply(config(pools={"main": {"endpoints": [TWO]}}))
    answer.set()
    await slow
    assert bench.destinations() == [TWO]


async def test_run_follows_names_and_renews_the_lease_through_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    """The background tasks outlive a store that is gone; afterwards the lease is renewed again."""
    bench = Bench("engine:8000")
    await bench.upkeep.apply(bench.settings)
    running = asyncio.create_task(bench.upkeep.run())
    await until(lambda: bool(bench.store.heartbeats))
    bench.store.gone = True
    bench.names["engine"] = ["10.0.0.8"]
    await until(lambda: bench.destinations() == ["10.0.0.8:8000"])
    await until(lambda: "the lease is not renewed" in caplog.text)
    bench.store.gone = False
    before = len(bench.store.heartbeats)
    await until(lambda: len(bench.store.heartbeats) > before)
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


class Jumping(ManualClock):
    """A clock whose wall time can be set, as an operator or NTP sets a host's."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = 0.0

    def wall(self) -> float:
        """See `Clock.wall`."""
        return self.now + self.ahead


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
@pytest.mark.parametrize("whose", ["worker", "keeper"])
async def test_a_clock_that_jumps_changes_nothing(jump: float, whose: str) -> None:
    """Of the worker's host, or of the keeper's: loads stay believed, nobody is slowed, silent or taken for new."""
    bench = Bench(ONE, TWO)
    bench.clock = clock = Jumping()
    bench.upkeep = Upkeep(bench.around, bench.membership, clock)

    async def seen(at: float | None) -> list[tuple[int, float, float]]:
        if at is not None:
            read = {name: EndpointState(destination=name, scraped_at=at, running=3) for name in (ONE, TWO)}
            await bench.store.put_states("main", {name: encode(state) for name, state in read.items()})
        await bench.upkeep.apply(bench.settings)
        members = bench.around.fleet.pools["main"].endpoints
        return [(each.running, each.slowed, each.silent_ms) for each in members]

    assert await seen(clock.wall()) == [(3, 1.0, 0.0)] * 2
    clock.advance(0.25)
    keeper = clock.now
    if whose == "worker":
        clock.ahead = jump
    else:
        keeper += jump
    assert await seen(None) == [(3, 1.0, 0.0)] * 2
    assert await seen(keeper) == [(3, 1.0, 0.0)] * 2
    clock.advance(0.25)
    assert await seen(keeper + 0.25) == [(3, 1.0, 0.0)] * 2


async def test_one_that_nobody_reads_any_more_is_seen_beside_the_others() -> None:
    """Its state stands still while another's changes: slower after three readings, silent after a takeover's time."""
    bench = Bench(ONE, TWO)
    seen = []
    for number in range(12):
        fresh = {TWO: encode(EndpointState(destination=TWO, scraped_at=float(number), running=number))}
        old = {ONE: encode(EndpointState(destination=ONE, running=3))}
        await bench.store.put_states("main", fresh | old)
        await bench.upkeep.apply(bench.settings)
        one, two = bench.around.fleet.pools["main"].endpoints
        assert (two.running, two.slowed, two.silent_ms) == (number, 1.0, 0.0)
        seen.append((one.running, one.slowed, one.silent_ms))
        bench.clock.advance(1.0)
    assert seen[2] == (3, 1.0, 0.0)
    assert seen[3] == (0, 0.5, 0.0)
    assert seen[11] == (0, 0.5, 11_000.0)


async def test_what_the_ledger_does_not_have_is_somebody_else_s() -> None:
    """An engine that others use too: two readings in a row prove it, and decisions see its sequences."""
    bench = Bench(ONE)
    floors = []
    for number in range(3):
        state = EndpointState(destination=ONE, scraped_at=float(number), running=40, waiting=10)
        await bench.store.put_states("main", {ONE: encode(state)})
        await bench.upkeep.apply(bench.settings)
        floors.append(bench.around.fleet.pools["main"].endpoints[0].floor_running)
    assert floors == [0, 0, 50]


async def test_versions_follow_the_file_and_the_rollouts() -> None:
    """A changed weight is in use at once, and conversations stay; a rollout's share counts in its place."""
    bench = Bench(ONE)

    def weighed(old: float, new: float) -> Config:
        versions = {"old": {"pool": "main", "weight": old}, "new": {"pool": "other", "weight": new}}
        pools = {"main": {"endpoints": [ONE]}, "other": {"endpoints": [TWO]}}
        return config(models={"m": {"versions": versions, "aliases": ["gpt"]}}, pools=pools)

    bench.around.knowledge = {pool: PoolKnowledge(Priors()) for pool in ("main", "other")}
    await bench.upkeep.apply(weighed(1.0, 0.5))
    await bench.upkeep.apply(weighed(1.0, 1.0))
    await bench.upkeep.refresh()
    split = bench.around.fleet.splits["m"]
    assert (split.weights, split.earlier) == ({"old": 1.0, "new": 1.0}, ({"old": 1.0, "new": 0.5},))
    assert bench.around.fleet.aliases == {"gpt": "m"}
    bench.around.rollouts = rollout(0.25, 0.0, base={"old": 1.0, "new": 1.0})
    await bench.upkeep.refresh()
    split = bench.around.fleet.splits["m"]
    assert (split.weights, split.epoch) == ({"old": 0.75, "new": 0.25}, "r1-0")

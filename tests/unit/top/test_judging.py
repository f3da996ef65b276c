"""A worker's breakers: verdicts reach the store, and what it says reaches the fleet that decisions see."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from extproc.choose.filters import usable
from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.clock import ManualClock
from extproc.config import Config, Model
from extproc.config import Pool as PoolSettings
from extproc.config_breakers import Breakers
from extproc.envoy.contract import Attempt, Served
from extproc.errors import StoreError
from extproc.judging import BUSY_S, Judging
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from extproc.surroundings import Surroundings
from extproc.telemetry.breaker_metrics import BreakerMetrics
from extproc.telemetry.metrics import Metrics

NAMES = ("a", "b", "c", "d")
RULES = Breakers(strikes=3, open_s=5.0, slow_factor=8.0, slow_least_s=0.5)


class Replica:
    """One worker's judging, over a store that others share."""

    def __init__(self, store: MemoryStore, clock: ManualClock, rules: Breakers = RULES) -> None:
        endpoints = tuple(Endpoint(name, f"{name}:1", 10_000.0) for name in NAMES)
        fleet = Fleet({"main": Pool("main", "predicted_ttft", endpoints)}, {"m": "main"}, "main")
        config = Config(
            models={"m": Model(pool="main")}, pools={"main": PoolSettings(endpoints=["a:1"])}, breakers=rules
        )
        known = {"main": PoolKnowledge(Priors())}
        self.around = Surroundings(config, fleet, known, store, "r", str)
        self.metrics = Metrics()
        self.dead = set[str]()
        self.judging = Judging(self.around, BreakerMetrics(self.metrics.families), clock, self.is_dead)

    async def is_dead(self, destination: str) -> bool:
        """What the engine says of itself."""
        return destination in self.dead

    async def strikes(self, endpoint: str = "a", times: int = 3, flags: tuple[str, ...] = ("UF",)) -> None:
        """Attempts at an endpoint fail."""
        for _ in range(times):
            self.judging.attempt(Attempt("main", f"{endpoint}:1", 0, flags))
            await self.judging.idle()

    async def answers(self, endpoint: str = "a", status: int = 200, ttft_s: float = -1.0, work: float = -1.0) -> None:
        """A request is answered."""
        served = Served(charge_id="x", pool="main", destination=f"{endpoint}:1", status=status, ttft_s=ttft_s)
        self.judging.answered(self.around.fleet.pools["main"], work, served, endpoint)
        await self.judging.idle()

    def endpoint(self, name: str = "a") -> Endpoint:
        """An endpoint as decisions see it."""
        return next(each for each in self.around.fleet.pools["main"].endpoints if each.id == name)

    def served_by(self) -> list[str]:
        """Endpoints that decisions may use."""
        return [each.id for each in usable(self.around.fleet.pools["main"].endpoints)]


@pytest.fixture
def clock() -> ManualClock:
    """Time of store and workers."""
    return ManualClock()


@pytest.fixture
def replica(clock: ManualClock) -> Callable[..., Replica]:
    """Makes workers that share a store."""
    store = MemoryStore(clock)
    return lambda rules=RULES: Replica(store, clock, rules)


async def test_strikes_that_different_replicas_saw_count_together(replica: Callable[..., Replica]) -> None:
    """Two here and one there open the breaker; who saw the last one knows at once, the other at its next look."""
    one, other = replica(), replica()
    await one.strikes(times=2)
    assert one.served_by() == list(NAMES)
    await other.strikes(times=1)
    assert other.served_by() == ["b", "c", "d"]
    await one.judging.refresh()
    assert one.served_by() == ["b", "c", "d"]


async def test_an_engine_that_says_it_is_dead_leaves_at_once(replica: Callable[..., Replica]) -> None:
    """The first failure asks for its health: one that is dead needs no further strikes, one that lives does."""
    one = replica()
    one.dead.add("a:1")
    await one.strikes("a", times=1)
    await one.strikes("b", times=1)
    assert one.served_by() == ["b", "c", "d"]


async def test_refusals_full_queues_and_leavers_open_nothing(replica: Callable[..., Replica]) -> None:
    """A hundred bad prompts, full queues and clients that left leave the breaker closed."""
    one = replica()
    for status in (400, 404, 422, 429, 503):
        for _ in range(100):
            one.judging.attempt(Attempt("main", "a:1", status))
        await one.judging.idle()
    for _ in range(100):
        one.judging.attempt(Attempt("main", "a:1", 200, ("DC",)))
    await one.judging.idle()
    await one.judging.refresh()
    assert one.served_by() == list(NAMES)


async def test_an_endpoint_without_room_is_dearer_for_a_moment(
    replica: Callable[..., Replica], clock: ManualClock
) -> None:
    """After a 429 it costs more, and no more a second later."""
    one = replica()
    one.judging.attempt(Attempt("main", "a:1", 429))
    assert one.endpoint().busy_ms == RULES.busy_ms
    assert one.endpoint("b").busy_ms == 0.0
    clock.advance(BUSY_S + 0.1)
    await one.judging.refresh()
    assert one.endpoint().busy_ms == 0.0


async def test_one_replica_tries_it_with_one_request(replica: Callable[..., Replica], clock: ManualClock) -> None:
    """Half open, one worker may pick it, once; the others leave it alone until the verdict."""
    one, other = replica(), replica()
    await one.strikes()
    clock.advance(5.1)
    await one.judging.refresh()
    await other.judging.refresh()
    assert (one.endpoint().breaker, other.endpoint().breaker) == ("probe", "half_open")
    assert "a" in one.served_by()
    one.judging.picked("main", one.endpoint())
    assert one.endpoint().breaker == "half_open"
    assert "a" not in one.served_by()
    await one.answers(status=200)
    assert one.endpoint().breaker == "closed"
    await other.judging.refresh()
    assert other.served_by() == list(NAMES)


async def test_a_refused_probe_lets_the_next_one_go(replica: Callable[..., Replica], clock: ManualClock) -> None:
    """A 400 says nothing: it stays half open, and is tried again at once."""
    one = replica()
    await one.strikes()
    clock.advance(5.1)
    await one.judging.refresh()
    one.judging.picked("main", one.endpoint())
    await one.answers(status=400)
    assert one.endpoint().breaker == "half_open"
    await one.judging.refresh()
    assert one.endpoint().breaker == "probe"


async def test_a_probe_that_fails_opens_it_for_longer(replica: Callable[..., Replica], clock: ManualClock) -> None:
    """Five seconds, then ten."""
    one = replica()
    await one.strikes()
    clock.advance(5.1)
    await one.judging.refresh()
    one.judging.picked("main", one.endpoint())
    await one.strikes(times=1)
    clock.advance(6.0)
    await one.judging.refresh()
    assert one.endpoint().breaker == "open"
    clock.advance(4.1)
    await one.judging.refresh()
    assert one.endpoint().breaker == "probe"


async def test_at_most_half_of_a_pool_is_left_alone(replica: Callable[..., Replica], clock: ManualClock) -> None:
    """Three of four fail: the one that is due first stays in use, on every replica."""
    one, other = replica(), replica()
    for name in ("a", "b", "c"):
        await one.strikes(name)
        clock.advance(0.1)
    await one.judging.refresh()
    await other.judging.refresh()
    assert one.served_by() == other.served_by() == ["a", "d"]


async def test_an_answer_far_later_than_its_peers_is_a_strike(replica: Callable[..., Replica]) -> None:
    """Three first tokens in a row that took ten times what the others need open it; the others stay."""
    one = replica()
    for _ in range(5):
        for name in ("b", "c", "d"):
            await one.answers(name, ttft_s=0.2, work=2000.0)
    for _ in range(3):
        await one.answers("a", ttft_s=2.0, work=2000.0)
    assert one.endpoint().breaker == "open"
    assert one.served_by() == ["b", "c", "d"]


async def test_late_answers_of_the_whole_pool_open_nothing(replica: Callable[..., Replica]) -> None:
    """Overload is no illness of one endpoint."""
    one = replica()
    for _ in range(20):
        for name in NAMES:
            await one.answers(name, ttft_s=5.0, work=2000.0)
    assert one.served_by() == list(NAMES)


async def test_answers_within_the_least_time_are_never_late(replica: Callable[..., Replica]) -> None:
    """What came within half a second harms nobody, however fast the others are."""
    one = replica()
    for _ in range(5):
        for name in ("b", "c", "d"):
            await one.answers(name, ttft_s=0.01, work=100.0)
    for _ in range(9):
        await one.answers("a", ttft_s=0.4, work=100.0)
    assert one.served_by() == list(NAMES)


async def test_a_time_limit_is_a_strike(replica: Callable[..., Replica]) -> None:
    """Requests that were ended for want of progress count against their endpoint."""
    one = replica()
    for _ in range(3):
        one.judging.timed_out("main", "a")
        await one.judging.idle()
    assert one.endpoint().breaker == "open"


async def test_switched_off_it_judges_nobody(replica: Callable[..., Replica]) -> None:
    """With no strikes configured, nothing opens."""
    one = replica(msgspec.structs.replace(RULES, strikes=0))
    await one.strikes(times=50)
    await one.judging.refresh()
    assert one.served_by() == list(NAMES)


async def test_a_healthy_pool_costs_no_call(clock: ManualClock) -> None:
    """Good answers of endpoints without strikes are not told."""

    class Counting(MemoryStore):
        calls = 0

        async def judge(self, *args: object) -> object:  # type: ignore[override]
            self.calls += 1
            return await super().judge(*args)  # type: ignore[arg-type]

    store = Counting(clock)
    one = Replica(store, clock)
    for _ in range(50):
        await one.answers("a")
    assert store.calls == 0
    await one.strikes(times=1)
    await one.answers("a")
    assert store.calls == 2


async def test_without_a_store_nothing_is_raised_and_what_was_known_stays(clock: ManualClock) -> None:
    """Verdicts are lost then; the fleet keeps its marks."""

    class Gone(MemoryStore):
        gone = False

        async def judge(self, *args: object) -> object:  # type: ignore[override]
            if self.gone:
                raise StoreError("gone")
            return await super().judge(*args)  # type: ignore[arg-type]

        async def breakers(self, pool: str) -> object:  # type: ignore[override]
            if self.gone:
                raise StoreError("gone")
            return await super().breakers(pool)

    store = Gone(clock)
    one = Replica(store, clock)
    await one.strikes()
    store.gone = True
    await one.strikes("b")
    await one.judging.refresh()
    assert one.served_by() == ["b", "c", "d"]


async def test_strangers_are_not_judged(replica: Callable[..., Replica]) -> None:
    """Attempts at addresses and pools that are not in the fleet change nothing."""
    one = replica()
    before = one.around.fleet
    one.judging.attempt(Attempt("main", "z:1", 0, ("UF",)))
    one.judging.attempt(Attempt("other", "a:1", 0, ("UF",)))
    one.judging.attempt(Attempt("main", "", 0, ("UF",)))
    await asyncio.sleep(0)
    await one.judging.idle()
    assert one.around.fleet is before


async def test_an_engine_that_restarted_is_not_judged_by_its_other_life(replica: Callable[..., Replica]) -> None:
    """It gets requests again as soon as its restart is seen, on every replica."""
    one, other = replica(), replica()
    await one.strikes()
    await other.judging.refresh()
    assert other.served_by() == ["b", "c", "d"]
    await one.judging.refresh({"main": {"a"}})
    await other.judging.refresh()
    assert one.served_by() == other.served_by() == list(NAMES)


async def test_a_replica_drops_no_breaker_of_an_endpoint_that_it_never_had(replica: Callable[..., Replica]) -> None:
    """While `endpoints` changes, the others may have more of them already: their strikes stay."""
    one, other = replica(), replica()
    pool = other.around.fleet.pools["main"]
    fewer = msgspec.structs.replace(pool, endpoints=pool.endpoints[1:])
    other.around.fleet = Fleet({"main": fewer}, {"m": "main"}, "main")
    await one.strikes("a")
    await other.judging.refresh()
    await one.judging.refresh()
    assert one.served_by() == ["b", "c", "d"]


async def test_switched_off_while_one_is_open_all_are_closed(replica: Callable[..., Replica]) -> None:
    """A changed file is taken: the endpoint is used, and its gauge says so."""
    one = replica()
    await one.strikes()
    config = one.around.config
    one.around.config = msgspec.structs.replace(config, breakers=msgspec.structs.replace(RULES, strikes=0))
    await one.judging.refresh()
    assert one.served_by() == list(NAMES)
    assert 'warmpath_breaker_open{endpoint="a",pool="main"} 0.0' in one.metrics.page().decode()


async def test_an_endpoint_that_left_is_forgotten(replica: Callable[..., Replica]) -> None:
    """Its gauge goes too, or its alert would never end; who comes to its name later begins with a closed breaker."""
    one = replica()
    gauge = 'warmpath_breaker_open{endpoint="a",pool="main"}'
    await one.strikes()
    assert f"{gauge} 1.0" in one.metrics.page().decode()
    pool = one.around.fleet.pools["main"]
    rest = msgspec.structs.replace(pool, endpoints=pool.endpoints[1:])
    one.around.fleet = Fleet({"main": rest}, {"m": "main"}, "main")
    await one.judging.refresh()
    assert gauge not in one.metrics.page().decode()
    one.around.fleet = Fleet({"main": pool}, {"m": "main"}, "main")
    await one.judging.refresh()
    assert one.served_by() == list(NAMES)

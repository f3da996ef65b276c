"""One keeper's reading of KV events: whose endpoints, which pools, what is taken out once, what ends."""

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import count

import aiohttp
import msgspec
import pytest

from extproc.config import Config, Model, Pool, ProfileMode
from extproc.engines.kv_trtllm import Drained
from extproc.engines.kv_values import EventBatch
from extproc.fleet.asking import new_session
from extproc.fleet.holding import Holding
from extproc.fleet.kv_drain import verdict
from extproc.fleet.kv_reader import WORK, KvReader
from extproc.outbox import Outbox
from extproc.state.deltas import Exact
from extproc.state.endpoint import EndpointState, Source
from extproc.telemetry.metrics import Metrics
from tests.kv_events import BLOCK, Drainable, Worker, ours
from tests.ports import free_port
from tests.unit.fleet.parts import Shelf, SkewedClock

DRAIN = Source(way="drain", endpoint="/kv_cache_events")


class Keeper:
    """A reader with its surroundings; several may share a shelf, its clock and an engine."""

    def __init__(self, name: str, shelf: Shelf, clock: SkewedClock, states: dict[str, EndpointState]) -> None:
        self.metrics = Metrics()
        self.states = states
        numbers = count()
        self.reader = KvReader(
            lambda: {"main": self.states},
            shelf,
            Holding(shelf, WORK, name, clock),
            lambda: Outbox(f"{name}-kv-{next(numbers)}"),
            self.metrics.kv,
            clock,
        )
        self.clock = clock
        self.session: aiohttp.ClientSession | None = None

    def configure(self, mode: ProfileMode) -> None:
        """Take a configuration with one pool of this mode."""
        self.reader.apply(
            Config(models={"m": Model(pool="main")}, pools={"main": Pool(endpoints=["e:1"], profiles=mode)})
        )

    async def rounds(self, number: int = 8, step_s: float = 0.25) -> None:
        """So many rounds, with time between them, in which answers come."""
        self.session = self.session or new_session("test")
        for _ in range(number):
            await self.reader.round(self.session)
            await asyncio.sleep(0.01)
            self.clock.advance(step_s)

    async def rounds_until(self, done: Callable[[], bool]) -> None:
        """Rounds until something is so; fails after very many."""
        for _ in range(3000):
            if done():
                return
            await self.rounds(1, 0.05)
        pytest.fail("it never came to be")

    def is_behind(self, endpoint: str) -> bool:
        """Whether the endpoint has told more than was taken in."""
        return self.reader.is_behind("main", endpoint)

    async def close(self) -> None:
        """Leave."""
        await self.reader.close()
        if self.session is not None:
            await self.session.close()


class Scene:
    """One engine, a shelf, and keepers."""

    def __init__(self, engine: Drainable) -> None:
        self.engine = engine
        self.clock = SkewedClock()
        self.shelf = Shelf(self.clock)
        self.worker = Worker(engine.address)
        self.keepers: list[Keeper] = []

    def keeper(self, mode: ProfileMode = "precise", *sources: Source) -> Keeper:
        """One more keeper."""
        state = EndpointState(self.engine.address, started_at=1.0, block_tokens=BLOCK, sources=sources or (DRAIN,))
        made = Keeper(f"k{len(self.keepers)}", self.shelf, self.clock, {self.engine.address: state})
        made.configure(mode)
        self.keepers.append(made)
        return made

    async def known(self) -> set[int]:
        """Blocks that workers know by the exact profile; empty when there is none."""
        await self.worker.follow(self.shelf, "main")
        return self.worker.blocks if self.worker.block_tokens else set()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """An engine and a store."""
    engine = Drainable()
    await engine.start()
    made = Scene(engine)
    yield made
    for keeper in made.keepers:
        await keeper.close()
    await engine.stop()


async def test_events_that_are_taken_out_reach_the_workers(scene: Scene) -> None:
    """From the engine's first event on; idle, it is called less often."""
    keeper = scene.keeper()
    scene.engine.store(1)
    scene.engine.store(2)
    await keeper.rounds()
    assert await scene.known() == ours(1, 2) | ours(2, 2)
    scene.engine.remove(1)
    await keeper.rounds()
    assert await scene.known() == ours(2, 2)
    before = scene.engine.calls
    await keeper.rounds(10, 0.1)
    assert scene.engine.calls - before <= 3


async def test_an_engine_that_tells_very_much_does_not_hold_up_the_others(scene: Scene) -> None:
    """Each endpoint has its turn: what one tells reaches the workers while another's events are taken in yet."""
    keeper, flood = scene.keeper(), Drainable()
    await flood.start()
    try:
        keeper.states = {flood.address: msgspec.structs.replace(keeper.states[scene.engine.address]), **keeper.states}
        keeper.states[flood.address] = msgspec.structs.replace(keeper.states[flood.address], destination=flood.address)
        for number in range(60_000):
            flood.tell({"type": "removed", "block_hashes": [number]})
        await keeper.rounds_until(lambda: keeper.is_behind(flood.address))
        scene.engine.store(1)
        for _ in range(20):
            await keeper.rounds(1)
            if await scene.known():
                break
        assert await scene.known() == ours(1, 2)
        assert keeper.is_behind(flood.address)
        await keeper.rounds_until(lambda: not keeper.is_behind(flood.address))
    finally:
        await flood.stop()


def said_of_events(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Endpoints that the reader has written a line about."""
    return [record.__dict__["endpoint"] for record in caplog.records if record.name == KvReader.__module__]


async def test_an_engine_without_events_is_said_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Who asked for precise profiles should not have to wonder; one that was not looked at closely yet is no such."""
    keeper = scene.keeper()
    state = keeper.states[scene.engine.address]
    keeper.states["10.0.0.9:1"] = msgspec.structs.replace(state, sources=(), models=())
    await keeper.rounds(2)
    assert not said_of_events(caplog)
    keeper.states["10.0.0.9:1"] = msgspec.structs.replace(state, sources=(), models=("m",))
    await keeper.rounds(4)
    assert said_of_events(caplog) == ["10.0.0.9:1"]


async def test_a_source_of_a_way_that_only_newer_keepers_know_is_left_out(scene: Scene) -> None:
    """The endpoint's other sources are read all the same."""
    keeper = scene.keeper("precise", Source(way="grpc", endpoint="x"), DRAIN)
    scene.engine.store(1)
    await keeper.rounds()
    assert await scene.known() == ours(1, 2)


async def test_a_pool_of_estimated_profiles_is_not_read(scene: Scene) -> None:
    """Nobody calls its engines, and nothing is told."""
    keeper = scene.keeper("estimated")
    scene.engine.store(1)
    await keeper.rounds()
    assert scene.engine.calls == 0
    assert await scene.known() == set()


async def test_one_keeper_of_the_fleet_calls_an_engine(scene: Scene) -> None:
    """What one takes out, no other can have: the second keeper does not call while the first has the lease."""
    first, second = scene.keeper(), scene.keeper()
    await first.rounds(2, 0.1)
    for prompt in range(1, 6):
        scene.engine.store(prompt)
        await second.rounds(1, 0.05)
        await first.rounds(1, 0.05)
    await first.rounds(4, 0.05)
    assert await scene.known() == set().union(*(ours(prompt, 2) for prompt in range(1, 6)))
    assert scene.worker.begun == 1


async def test_a_keeper_that_takes_over_begins_anew(scene: Scene) -> None:
    """It does not know what was taken out before; in a precise pool it goes on with what it sees."""
    first, second = scene.keeper(), scene.keeper()
    scene.engine.store(1)
    await first.rounds()
    assert await scene.known() == ours(1, 2)
    await first.close()
    scene.engine.store(2)
    await second.rounds(20)
    assert await scene.known() == ours(2, 2)
    second.reader._show()
    assert 'warmpath_kv_profile_partial{endpoint="' + scene.engine.address + '",pool="main"} 1.0' in (
        second.metrics.page().decode()
    )


async def test_events_that_were_lost_begin_the_profile_anew(scene: Scene) -> None:
    """A number that is missing shows it: what may have been removed is forgotten."""
    keeper = scene.keeper()
    scene.engine.store(1)
    await keeper.rounds()
    scene.engine.number += 3
    scene.engine.store(2)
    await keeper.rounds()
    assert await scene.known() == ours(2, 2)
    assert scene.worker.begun == 2


async def test_an_engine_whose_numbers_jump_for_ever_has_no_precise_profile(scene: Scene) -> None:
    """Each jump empties the profile: workers are not made to change to and fro, and it is counted."""
    keeper = scene.keeper()
    for number in range(60):
        scene.engine.number = 1000 * (number % 3)
        scene.engine.store(number)
        await keeper.rounds(1, 0.2)
    assert await scene.known() == set()
    assert 'kv_event_faults_total{kind="senseless",pool="main"} 0.0' not in keeper.metrics.page().decode()
    assert scene.worker.begun <= 6


async def test_a_keeper_that_stood_still_puts_its_profiles_aside(scene: Scene) -> None:
    """Blocks may be gone that it did not hear of: workers are told so before anything else, and again when it knows."""
    keeper = scene.keeper()
    scene.engine.store(1)
    scene.engine.store(2)
    await keeper.rounds()
    assert await scene.known() == ours(1, 2) | ours(2, 2)
    scene.engine.remove(1)
    scene.clock.advance(4.0)
    await keeper.rounds(1)
    assert await scene.known() != set()
    scene.clock.advance(6.0)
    scene.engine.remove(2)
    scene.engine.store(3)
    await keeper.rounds(1)
    assert await scene.known() == set()
    assert not scene.worker.block_tokens
    await keeper.rounds()
    assert await scene.known() == ours(3, 2)


async def test_an_answer_with_a_hole_is_left_out(scene: Scene) -> None:
    """What it tells of before the hole may have been removed in it; the profile begins with the answer after."""
    keeper = scene.keeper()
    scene.engine.store(1)
    await keeper.rounds()
    scene.engine.store(2)
    scene.engine.number += 3
    scene.engine.store(3)
    await keeper.rounds()
    scene.engine.store(4)
    await keeper.rounds()
    assert await scene.known() == ours(4, 2)


async def test_an_auto_pool_goes_back_to_estimated_profiles(scene: Scene) -> None:
    """After a loss nothing precise is told until it is complete again."""
    keeper = scene.keeper("auto")
    scene.engine.store(1)
    await keeper.rounds()
    assert await scene.known() == ours(1, 2)
    scene.engine.number += 3
    scene.engine.store(2)
    await keeper.rounds()
    await scene.known()
    assert scene.worker.block_tokens == 0


async def test_a_store_that_is_away_keeps_engines_from_being_called(scene: Scene) -> None:
    """Another keeper may have the work by then: no lease, no call. What is told afterwards is all of it."""
    keeper = scene.keeper()
    scene.engine.store(1)
    await keeper.rounds()
    scene.shelf.down = True
    await keeper.rounds(16)
    before = scene.engine.calls
    scene.engine.store(2)
    await keeper.rounds(8)
    assert scene.engine.calls == before
    scene.shelf.down = False
    await keeper.rounds(16)
    assert await scene.known() == ours(1, 2) | ours(2, 2)
    assert scene.worker.begun == 2


async def test_an_endpoint_that_has_no_events_any_more_is_estimated_again(scene: Scene) -> None:
    """It was started with other flags: the workers are told that the profile has ended."""
    keeper = scene.keeper()
    scene.engine.store(1)
    await keeper.rounds()
    assert await scene.known() == ours(1, 2)
    ((name, state),) = keeper.states.items()
    keeper.states = {name: msgspec.structs.replace(state, sources=())}
    await keeper.rounds()
    await scene.known()
    assert scene.worker.block_tokens == 0


async def test_a_rank_that_is_no_more_is_empty(scene: Scene) -> None:
    """The engine was started with fewer ranks: those that are left stay precise, and so does the endpoint."""
    other = Source(rank=1, endpoint=f"tcp://*:{free_port()}")
    keeper = scene.keeper("precise", DRAIN, other)
    gone = Worker(scene.engine.address, 1)
    await keeper.rounds(24)
    await gone.follow(scene.shelf, "main")
    assert [each.block_tokens for each in gone.told if isinstance(each, Exact)] == [0]
    ((name, state),) = keeper.states.items()
    keeper.states = {name: msgspec.structs.replace(state, sources=(DRAIN,))}
    await keeper.rounds()
    await gone.follow(scene.shelf, "main")
    assert gone.block_tokens == BLOCK
    assert gone.blocks == set()


async def test_a_source_that_cannot_be_read_leaves_the_profile_estimated(scene: Scene) -> None:
    """Also in place of what another keeper told; the log says what to do."""
    first = scene.keeper()
    scene.engine.store(1)
    await first.rounds()
    assert await scene.known() == ours(1, 2)
    await first.close()
    second = scene.keeper("precise", Source(endpoint="inproc://kv"))
    await second.rounds(20)
    await scene.known()
    assert scene.worker.block_tokens == 0


async def test_an_engine_that_fails_is_called_again_later(scene: Scene) -> None:
    """Its answers are not taken for events; nothing else stops."""
    keeper = scene.keeper()
    scene.engine.status = 500
    await keeper.rounds(4, 0.1)
    assert scene.engine.calls == 1
    scene.engine.status = 200
    scene.engine.number = 0
    scene.engine.tell({"type": "created", "num_blocks_per_cache_level": [100, 0]})
    scene.engine.store(4)
    await keeper.rounds(20)
    assert await scene.known() == ours(4, 2)


async def test_gauges_of_endpoints_that_left_are_dropped(scene: Scene) -> None:
    """A page shows what this keeper reads now."""
    keeper = scene.keeper()
    await keeper.rounds()
    assert f'warmpath_kv_events_in_step{{endpoint="{scene.engine.address}",pool="main"}} 1.0' in (
        keeper.metrics.page().decode()
    )
    keeper.states = {}
    await keeper.rounds()
    assert scene.engine.address not in keeper.metrics.page().decode()


@pytest.mark.parametrize(
    ("last", "first", "missing", "expected"),
    [
        (None, 7, 0, "first"),
        (6, 7, 0, "next"),
        (6, 8, 0, "gap"),
        (6, 7, 1, "gap"),
        (6, 0, 0, "restart"),
        (6, 6, 0, "restart"),
        (6, 0, 2, "restart"),
    ],
)
def test_an_answer_is_judged_by_its_numbers(last: int | None, first: int, missing: int, expected: str) -> None:
    """It goes on, lacks something, or is of another life."""
    assert verdict(last, Drained(EventBatch(0.0, 0, ()), first, first + 2, missing)) == expected

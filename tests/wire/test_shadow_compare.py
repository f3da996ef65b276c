"""Shadows of mode `compare` on a real Envoy, with two workers: results come, and nothing of it reaches a client."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.clock import SystemClock
from extproc.config import Config
from extproc.config_gateway import BodyMode
from extproc.envoy.contract import MODEL, VERSION, Decider
from extproc.envoy.copies import Copies
from extproc.govern.saturation import UNKNOWN
from extproc.shadow.results import Results, read
from extproc.shadow.scoring import Scorer
from extproc.shadow.sender import Sender
from extproc.shadow_jobs import Jobs
from extproc.shadowing import Shadowing
from extproc.state.memory import MemoryStore
from extproc.surroundings import Surroundings
from extproc.telemetry.families import Families
from extproc.telemetry.shadow_metrics import ShadowMetrics
from tests.waiting import until
from tests.wire.shadow_parts import Desk, Stand, events, running_stand

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOLD: dict[str, str | float] = {MODEL: "m", VERSION: "old", "kind": "chat", "streamed": 1.0, "prompt_tokens": 3.0}
BODY = b'{"model":"m","stream":true,"user":"alice","messages":[{"role":"user","content":"hello"}]}'


@dataclass
class Comparing:
    """What the workers share, and what they counted."""

    store: MemoryStore = field(default_factory=lambda: MemoryStore(SystemClock()))
    registries: list[CollectorRegistry] = field(default_factory=list)
    jobs: list[Jobs] = field(default_factory=list)
    shadowings: list[Shadowing] = field(default_factory=list)

    def wrap(self, desk: Desk, copies: Copies, config: Config) -> Decider:
        """A worker's shadows around its desk."""
        desk.metadata = dict(TOLD)
        pools = {
            name: Pool(name, "round_robin", (Endpoint(name, each.endpoints[0], 1000.0),))
            for name, each in config.pools.items()
        }
        around = Surroundings(config, Fleet(pools, {"m": "old"}, "old"), {}, self.store, desk.replica, lambda: "c")
        self.registries.append(CollectorRegistry())
        metrics, clock, scorer = ShadowMetrics(Families(self.registries[-1])), SystemClock(), Scorer()
        results = Results(self.store, "w", scorer.executor)
        self.jobs.append(Jobs(around, Sender(clock.monotonic), scorer, results, metrics, clock))
        shadowing = Shadowing(desk, around, self.jobs[-1], copies, metrics, clock, lambda _: (UNKNOWN, 0))
        self.shadowings.append(shadowing)
        return shadowing

    def outcomes(self) -> dict[str, int]:
        """Requests that were drawn, by what became of them, at all workers."""
        found: dict[str, int] = {}
        for registry in self.registries:
            for family in registry.collect():
                for sample in family.samples:
                    if sample.name == "warmpath_shadow_requests_total" and sample.value:
                        outcome = sample.labels["outcome"]
                        found[outcome] = found.get(outcome, 0) + int(sample.value)
        return found

    async def idle(self) -> None:
        """Return once nothing is under way anywhere."""
        for jobs in self.jobs:
            await jobs.idle()

    def since(self, before: dict[str, int]) -> dict[str, int]:
        """What was counted since."""
        now = self.outcomes()
        return {name: count - before.get(name, 0) for name, count in now.items() if count != before.get(name, 0)}


@dataclass
class World:
    """Gateway and comparisons."""

    stand: Stand
    comparing: Comparing

    async def ask(self) -> bytes:
        """One request; its answer must be that of the old version, byte by byte."""
        status, body, _ = await self.stand.ask("gap=0.01", body=BODY, headers={"authorization": "Bearer secret"})
        assert status == 200
        assert body == b"".join(events(self.stand.old.words))
        return body


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["buffered", "duplex"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Two workers: half of all copies come to another one than decided."""
    comparing = Comparing()
    mode: BodyMode = request.param
    async with running_stand("compare", mode, most=4, workers=2, wrap=comparing.wrap) as stand:
        await comparing.idle()
        yield World(stand, comparing)
    for shadowing in comparing.shadowings:
        await shadowing.close()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def fresh(world: World) -> None:
    """Engines as they were at first."""
    await world.comparing.idle()
    for engine in (world.stand.old, world.stand.new):
        engine.got.clear()
        engine.wait_s, engine.deaf, engine.cut = 0.0, False, False
        engine.words = ["The", " sky", " is", " blue."]


async def test_both_answers_are_compared(world: World) -> None:
    """Ten requests, whichever worker has them and whichever gets their copies: ten results."""
    before = world.comparing.outcomes()
    world.stand.new.words = ["The", " sea", " is", " blue."]
    for _ in range(10):
        await world.ask()
    await world.comparing.idle()
    assert world.comparing.since(before) == {"compared": 10}
    found = await read(world.comparing.store, "m", 0.0, 10)
    assert len(found.results) == 10
    for each in found.results:
        assert (each.primary, each.shadow, each.api, each.streamed) == ("old", "new", "chat", True)
        assert each.compared.outcome == "compared"
        assert each.answers == ("The sky is blue.", "The sea is blue.")
        assert (each.compared.primary.tokens, each.compared.shadow.tokens) == (4, 4)
        assert each.prompt is None
    # Both workers had some; with two of them, ten requests that all went to one would be 1 chance in 512.
    assert all(worker.desk.decided > 0 for worker in world.stand.workers)


async def test_the_shadow_gets_nothing_that_names_the_client(world: World) -> None:
    """No key, no user, no id of the request."""
    await world.ask()
    await world.comparing.idle()
    [got] = world.stand.new.got
    assert b"alice" not in got.body
    assert b'"content":"hello"' in got.body
    assert not {"authorization", "x-request-id", "x-warmpath-capture"} & got.headers.keys()
    [client] = world.stand.old.got
    assert b"alice" in client.body
    assert "x-warmpath-capture" not in client.headers


async def test_a_dead_shadow_is_a_result_and_nobody_notices(world: World) -> None:
    """Nothing listens there."""
    before = world.comparing.outcomes()
    await world.stand.new.stop()
    try:
        await world.ask()
        await world.comparing.idle()
    finally:
        await world.stand.new.start()
    assert world.comparing.since(before) == {"shadow_failed": 1}


async def test_a_slow_shadow_is_waited_for_by_nobody_and_has_a_cap(world: World) -> None:
    """Four at once at each worker; who comes beyond that has no shadow."""
    before = world.comparing.outcomes()
    world.stand.new.wait_s = 1.0
    async with asyncio.timeout(0.9):
        await asyncio.gather(*(world.ask() for _ in range(16)))
    assert sum(jobs.under_way("m") for jobs in world.comparing.jobs) <= 8
    await world.comparing.idle()
    counted = world.comparing.since(before)
    assert counted["compared"] + counted["over_cap"] == 16
    assert counted["over_cap"] >= 8


async def test_a_client_that_leaves_drops_its_comparison(world: World) -> None:
    """The shadow is not asked any longer either."""
    before = world.comparing.outcomes()
    world.stand.old.words = ["word"] * 200
    world.stand.new.wait_s = 4.0
    async with world.stand.http.post(f"{world.stand.envoy.url}/v1/chat/completions?gap=0.05", data=BODY) as answer:
        await answer.content.readany()
        answer.close()
    await world.comparing.idle()
    counted = world.comparing.since(before)
    assert counted in ({"cut": 1}, {"no_copy": 1})


async def test_an_error_of_the_client_s_engine_is_a_result(world: World) -> None:
    """The client's 503 is compared with what the shadow answered."""
    before = world.comparing.outcomes()
    await world.stand.old.stop()
    try:
        status, _, _ = await world.stand.ask(body=BODY)
        await world.comparing.idle()
    finally:
        await world.stand.old.start()
    assert status == 503
    assert world.comparing.since(before) == {"primary_failed": 1}


async def test_what_is_under_way_is_given_up_at_the_end(world: World) -> None:
    """A worker that stops waits for no shadow."""
    world.stand.new.wait_s = 60.0
    await world.ask()
    await until(lambda: bool(world.stand.new.got))
    async with asyncio.timeout(3.0):
        for shadowing in world.comparing.shadowings:
            await shadowing.close()
    assert all(jobs.under_way("m") == 0 for jobs in world.comparing.jobs)

"""A replay decides as a worker does: same requests, same history, same picks."""

import itertools
import json
import random
from collections.abc import Mapping
from typing import Any, get_args

import pytest

from extproc import snapshot
from extproc.choose.fleet import Fleet
from extproc.choose.policies import POLICIES
from extproc.clock import ManualClock
from extproc.config import Config, PolicyName
from extproc.deciding import Outcome
from extproc.envoy.contract import Call, Decision, Served
from extproc.gossip import Gossip
from extproc.learner import Learner
from extproc.replay.compare import Compared, config_of
from extproc.replay.routed import MODEL, POOL, Routed, finished
from extproc.replay.rows import Row
from extproc.replay.world import Ended, Picked
from extproc.request.blocks import chain
from extproc.request.shapes import parse
from extproc.router import Router, Surroundings
from extproc.sightings import Sightings
from extproc.sim.sequence import Sequence as Job
from extproc.sim.settings import EngineSettings
from extproc.sim.virtual import VirtualEngine
from extproc.state.endpoint import EndpointState, encode
from extproc.state.feed import Delta
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from extproc.telemetry.metrics import Metrics

PATH = "/v1/chat/completions"
BLOCK = 64
ENGINES = 4
ENGINE = EngineSettings(block_size=BLOCK, blocks=200)
NAMES = [f"e{at}:1" for at in range(ENGINES)]


class Worker:
    """Router, store, knowledge and learner of a worker, on a clock of the test's, put together as the worker does."""

    def __init__(self, config: Config) -> None:
        self.clock = ManualClock(0.0)
        self.known = PoolKnowledge(Priors(bytes_per_token=1.0, block_bytes=BLOCK))
        numbers = itertools.count()
        self.sightings = Sightings()
        self.around = Surroundings(
            config=config,
            fleet=Fleet({}, {}, POOL),
            knowledge={POOL: self.known},
            store=MemoryStore(self.clock),
            replica="worker",
            new_charge_id=lambda: f"w{next(numbers)}",
        )
        self.router = Router(self.around, Unheard(), Unheard(), self.clock)
        self.learner = Learner(self.around, Gossip(self.around.store, self.around.knowledge, "worker", 1000), Metrics())

    def scrape(self, engines: list[VirtualEngine], now: float) -> None:
        """What keeper and worker do when engines were read."""
        states = {}
        for name, engine in zip(NAMES, engines, strict=True):
            self.known.engine_seen(name, ENGINE.capacity_tokens, 1.0, BLOCK)
            states[name] = EndpointState(
                destination=name,
                scraped_at=now,
                running=engine.running,
                waiting=engine.waiting,
                kv_usage=engine.cache_usage,
                block_tokens=BLOCK,
            )
        self.known.age(now)
        loads = finished(self.around.store.loads(POOL))
        self.sightings.saw({name: encode(state) for name, state in states.items()}, states, loads, now)
        members = {POOL: {name: name for name in NAMES}}
        self.around.fleet = snapshot.build(
            self.around.config, members, {POOL: self.sightings.all}, self.around.knowledge, now
        )


class Unheard:
    """Hears what a router tells, and keeps nothing."""

    def publish(self, pool: str, delta: Delta) -> None:
        """See `router.Publisher`."""

    def decided(self, outcome: Outcome) -> None:
        """See `router.Recorder`."""

    def settled(self, pool: str) -> None:
        """See `router.Recorder`."""


def traffic(seed: int) -> list[dict[str, Any]]:
    """Chat bodies: conversations that go on, shared system prompts, short and long questions, several answers."""
    rng = random.Random(seed)
    systems = ["You help with rivers. " * 20, "You help with roads. " * 30]
    talks: list[list[dict[str, str]]] = []
    bodies: list[dict[str, Any]] = []
    for number in range(60):
        if talks and rng.random() < 0.6:
            talk = rng.choice(talks)
            talk.append({"role": "assistant", "content": f"answer {number}"})
        else:
            talks.append(talk := [{"role": "system", "content": rng.choice(systems)}])
        talk.append({"role": "user", "content": f"question {number} " + "why? " * rng.randint(1, 200)})
        bodies.append(
            {
                "model": MODEL,
                "messages": list(talk),
                "max_tokens": rng.choice([16, 64]),
                "n": rng.choice([1, 1, 1, 2]),
                "stream": rng.random() < 0.8,
            }
        )
    return bodies


def as_row(call: Call, at_s: float) -> Row:
    """The row that a trace would have for a call, one byte a token."""
    request = parse(call.path, call.headers, call.body)
    return Row(
        at_s,
        -1,
        request.prompt_bytes,
        8,
        chain(request.segments, request.salt, BLOCK),
        session=request.session,
        turn=request.turn,
        follows=request.follows,
        max_tokens=request.max_tokens,
        n=request.n,
        stream=request.stream,
    )


def served(decision: Decision, row: Row, jobs: list[Job], at_s: float) -> Served:
    """The access-log entry of an answer."""
    metadata: Mapping[str, str | float] = decision.metadata
    return Served(
        charge_id=decision.charge_id,
        pool=POOL,
        destination=str(metadata["endpoint"]),
        status=200,
        ttft_s=min(job.first_token_at for job in jobs) - at_s,
        duration_s=max(job.finished_at for job in jobs) - at_s,
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens * row.n,
        cached_tokens=jobs[0].cached_tokens,
        metadata=metadata,
    )


@pytest.mark.parametrize("policy", get_args(PolicyName))
async def test_a_replay_decides_as_the_worker_does_on_the_same_requests(policy: str) -> None:
    """Bodies through `Router.decide` and their rows through a replay: equal picks, predictions and charges throughout.

    Answers overlap with the next two requests, so backlogs, what is in flight, learnt rates, profiles and pins all
    have a part in it.
    """
    config = config_of(policy, Compared(policies=(), engines=ENGINES))
    engines = [VirtualEngine(ENGINE) for _ in range(ENGINES)]
    worker, routed = Worker(config), Routed(config, engines, BLOCK)
    open_: list[tuple[Decision, Picked, Row, list[Job], float]] = []
    picks = []
    for number, body in enumerate(traffic(3)):
        now = number * 0.03
        worker.clock.now = now
        for engine in engines:
            engine.advance(now)
        if number % 4 == 0:
            worker.scrape(engines, now)
            routed.scrape(engines, now)
        headers = {"x-session-id": f"s{number % 5}"} if number % 7 == 0 else {}
        call = Call("POST", PATH, headers, json.dumps(body).encode())
        row = as_row(call, now)
        decision, picked = await worker.router.decide(call), routed.choose(row, now)
        assert decision.destinations[0] == NAMES[picked.engine]
        # The worker reads no further than its policy needs, and so may not know what was in a prompt.
        if POLICIES[policy].prefix:
            assert decided(decision) == decided(picked.token)
        picks.append(picked.engine)
        jobs = [Job(row.prompt_tokens, row.output_tokens, row.blocks) for _ in range(row.n)]
        engines[picked.engine].submit(jobs, now)
        open_.append((decision, picked, row, jobs, now))
        while open_ and all(job.finished for job in open_[0][3]):
            ours, theirs, answered, done, began = open_.pop(0)
            await worker.router.settle(ours)
            worker.learner.observe(served(ours, answered, done, began))
            routed.settled(theirs, now)
            routed.learn(Ended(answered, theirs, done, began, None), now)
    assert len(set(picks)) > 1
    assert len(open_) < 20


def decided(decision: object) -> dict[str, object]:
    """What a decision decided: its destinations and all that it wrote down, without the name of its charge."""
    assert isinstance(decision, Decision)
    return {**decision.metadata, "destinations": decision.destinations, "pool": decision.pool}


def test_a_pick_carries_what_was_predicted() -> None:
    """Cached tokens and TTFT of the pick, against which the answer is held."""
    config = config_of("predicted_ttft", Compared(policies=(), engines=2))
    engines = [VirtualEngine(ENGINE) for _ in range(2)]
    routed = Routed(config, engines, BLOCK)
    routed.scrape(engines, 0.0)
    row = Row(0.0, -1, 1000, 5, list(range(1, 16)))
    first, again = routed.choose(row, 0.0), routed.choose(row, 5.0)
    assert (first.engine, first.cached_tokens) == (again.engine, 0.0)
    assert again.cached_tokens == 15 * BLOCK
    prior = PoolKnowledge(Priors()).rate("any")
    assert first.ttft_ms == pytest.approx(1000 * 1000 / prior, rel=0.01)
    assert again.ttft_ms == pytest.approx(1000 * 40 / prior, rel=0.01)


def test_a_session_that_leaves_its_engine_is_a_move() -> None:
    """It stays while its engine is not much dearer than the best; the request that goes elsewhere says so, once."""
    config = config_of("predicted_ttft", Compared(policies=(), engines=2))
    engines = [VirtualEngine(ENGINE) for _ in range(2)]
    routed = Routed(config, engines, BLOCK)
    routed.scrape(engines, 0.0)
    rows = [Row(0.0, -1, 6000, 5, list(range(100 * n, 100 * n + 93)), session="one") for n in range(4)]
    picks = [routed.choose(row, 0.0) for row in rows]
    first = next(at for at, pick in enumerate(picks) if pick.moved)
    assert first > 0
    assert {pick.engine for pick in picks[:first]} == {1 - picks[first].engine}


def test_a_decision_that_waits_is_refused() -> None:
    """A replay has no event loop: whatever would wait for one is a mistake, and is told."""

    class Never:
        def __await__(self) -> Any:
            yield None

    async def waits() -> None:
        await Never()

    with pytest.raises(RuntimeError, match="waited for something outside the replay"):
        finished(waits())

"""One version for each conversation: four workers on a store that goes away, and comes back with its data or empty."""

import asyncio
import itertools
import json
import random
from collections import Counter
from typing import Literal

import pytest

from extproc import versions
from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.clock import ManualClock
from extproc.config import Config
from extproc.deciding import Outcome
from extproc.envoy.contract import VERSION, Call, Decision
from extproc.errors import StoreError
from extproc.keeping import FRESH_S, Keeping
from extproc.rollout.state import Phase, Rollout
from extproc.router import Router, Surroundings
from extproc.splits import fleet_of, splits_of, with_splits
from extproc.state import feed
from extproc.state.feed import Answered, Delta, Kept
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from extproc.state.resilient import ResilientStore
from tests.unit.state.unsteady import PROBE_S, Unsteady
from tests.unit.top.parts import config
from tests.unit.top.test_splits import PLAN
from tests.waiting import until

WORKERS = 4
POOLS = ("old", "new")
Kind = Literal["whole", "text", "nameless"]
"""How clients talk: a named session that sends all that was said, one that sends new text alone, or no name at all."""
KINDS: tuple[Kind, ...] = ("whole", "text", "nameless")
LIFE_S = 1800.0


def settings() -> Config:
    """Model `m` with all of its traffic on `old`, and `new` beside it."""
    made = {name: {"pool": name, "weight": 1.0 if name == "old" else 0.0} for name in POOLS}
    return config(
        models={"m": {"versions": made}},
        pools={name: {"endpoints": ["10.0.0.1:80"], "policy": "predicted_ttft"} for name in POOLS},
        routing={"session": {"ttl_s": LIFE_S}},
        rollouts={"testers": ["tester"]},
    )


def fleet(settings: Config) -> Fleet:
    """Two engines of each version."""
    pools = {
        name: Pool(
            name,
            "predicted_ttft",
            tuple(Endpoint(f"{name}-{at}", f"10.0.{n}.{at}:80", 10_000.0) for at in range(1, 3)),
        )
        for n, name in enumerate(POOLS)
    }
    return fleet_of(pools, settings, splits_of(settings, {}))


def rollout(share: float, *earlier: float, phase: Phase = "running") -> dict[str, Rollout]:
    """A rollout of `new` at this share, after these, the newest first."""
    base = {"old": 1.0, "new": 0.0}
    made = Rollout(id="r", model="m", canary="new", base=base, plan=PLAN, phase=phase, share=share, earlier=earlier)
    return {"m": made}


class Worker:
    """One worker, with its own line to the store. What it tells the others waits in `told`."""

    def __init__(self, shared: Unsteady, name: str, settings: Config, clock: ManualClock) -> None:
        numbers = itertools.count()
        self.shared = shared
        self.read = 0
        self.knowledge = {pool: PoolKnowledge(Priors()) for pool in POOLS}
        self.told: list[tuple[str, Delta]] = []
        local = MemoryStore(clock)
        self.store = ResilientStore(shared, local, PROBE_S, clock=clock, chance=random.Random(name))
        self.around = Surroundings(
            settings, fleet(settings), self.knowledge, self.store, name, lambda: f"{name}-{next(numbers)}"
        )
        self.router = Router(self.around, self, self, clock)
        self.keeping = Keeping(self.around, self, clock)

    async def follow(self, found: dict[str, Rollout]) -> None:
        """Go by this rollout, and tell of the conversations here."""
        around = self.around
        around.rollouts = found
        around.fleet = with_splits(around.fleet, around.config, found)
        await self.keeping.look()

    def publish(self, pool: str, delta: Delta) -> None:
        """See `router.Publisher`."""
        self.told.append((pool, delta))

    def decided(self, outcome: Outcome) -> None:
        """See `router.Recorder`."""

    def settled(self, pool: str) -> None:
        """See `router.Recorder`."""

    async def answer(self, call: Call) -> str:
        """Decide, and learn what an answer teaches; returns the version."""
        decision: Decision = await self.router.decide(call)
        told = Answered(
            decision.charge_id,
            str(decision.metadata["endpoint"]),
            -1.0,
            -1.0,
            prompt_bytes=400.0,
            prompt_tokens=100.0,
            output_tokens=10.0,
        )
        for delta in self.knowledge[decision.pool].apply(told):
            self.publish(decision.pool, delta)
        await self.router.settle(decision)
        return str(decision.metadata[VERSION])


class Talk:
    """One conversation."""

    def __init__(self, name: str, kind: Kind) -> None:
        self.name, self.kind = name, kind
        self.said: list[dict[str, str]] = []
        self.versions: list[str] = []

    def call(self, **headers: str) -> Call:
        """Its next request."""
        question = {"role": "user", "content": f"{self.name} asks {len(self.versions)}"}
        self.said.append(question)
        body = {"model": "m", "messages": [question] if self.kind == "text" else self.said}
        if self.kind != "nameless":
            headers = {"x-session-id": self.name, **headers}
        return Call("POST", "/v1/chat/completions", headers, json.dumps(body).encode())

    async def go_on(self, worker: Worker, **headers: str) -> str:
        """Say something to this worker; returns the version that answers."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        version = await worker.answer(self.call(**names))
        self.versions.append(version)
        self.said.append({"role": "assistant", "content": f"answer {len(self.versions)} to {self.name}"})
        return version


class Site:
    """Four workers on one store, their conversations, and the rollout of the model."""

    def __init__(self, seed: int = 1) -> None:
        self.clock = ManualClock()
        self.settings = settings()
        self.rng = random.Random(seed)
        lines = [Unsteady(self.clock) for _ in range(WORKERS)]
        for line in lines:
            line._pools = lines[0]._pools
        self.workers = [Worker(line, f"w{at}", self.settings, self.clock) for at, line in enumerate(lines)]
        self.feed: list[tuple[str, str, bytes]] = []
        self.shares: list[float] = [0.0]
        self.talks: list[Talk] = []

    def lose(self, *workers: Worker) -> None:
        """The store goes away, for all or these."""
        for worker in workers or self.workers:
            worker.shared.fault = StoreError("gone")

    def back(self) -> None:
        """It answers again, with what it had."""
        for worker in self.workers:
            worker.shared.fault = None

    def empty(self) -> None:
        """It loses all it has, with what was not read of its feeds."""
        self.workers[0].shared._pools.clear()
        self.feed.clear()
        for worker in self.workers:
            worker.read = 0

    def spread(self) -> None:
        """Those that reach the store tell what they have to tell, and hear what there is."""
        there = [worker for worker in self.workers if worker.shared.fault is None]
        for worker in there:
            told, worker.told = worker.told, []
            self.feed += [(worker.around.replica, pool, feed.encode("", [delta])) for pool, delta in told]
        for worker in there:
            for origin, pool, entry in self.feed[worker.read :]:
                if origin != worker.around.replica:
                    worker.knowledge[pool].apply(feed.decode(entry).deltas[0], self.clock.monotonic(), origin=origin)
            worker.read = len(self.feed)

    async def follow(self, found: dict[str, Rollout]) -> None:
        """All workers go by this rollout from now on, and it is long ago that the first saw it."""
        for worker in self.workers:
            await worker.follow(found)
        self.clock.advance(FRESH_S)
        for worker in self.workers:
            await worker.keeping.look()

    def step(self, share: float) -> dict[str, Rollout]:
        """The next step of the rollout."""
        found = rollout(share, *reversed(self.shares))
        self.shares.append(share)
        return found

    def begin(self, kind: Kind) -> Talk:
        """A new conversation."""
        self.talks.append(talk := Talk(f"talk {len(self.talks)}", kind))
        return talk

    async def turn(self, talk: Talk) -> str:
        """One of the workers answers."""
        return await talk.go_on(self.rng.choice(self.workers))

    async def whole(self) -> None:
        """Wait until the store was told everything."""
        await until(lambda: all(worker.store.settled for worker in self.workers))

    async def close(self) -> None:
        """End."""
        for worker in self.workers:
            await worker.store.close()

    def flipped(self) -> list[tuple[str, list[str]]]:
        """Conversations of more than one version."""
        return [(talk.kind, talk.versions) for talk in self.talks if len(set(talk.versions)) > 1]


async def live(site: Site, turns: int) -> None:
    """So many turns of conversations that begin and end; the store goes and comes; the share goes up in between."""
    rng, running, steps = site.rng, list[tuple[Talk, int]](), [0.01, 0.05, 0.25, 1.0]
    following: list[Worker] = []
    found: dict[str, Rollout] = {}
    for at in range(turns):
        if len(running) < 60:
            running.append((site.begin(rng.choice(KINDS)), rng.randint(2, 20)))
        place = rng.randrange(len(running))
        talk, most = running[place]
        await site.turn(talk)
        if len(talk.versions) >= most:
            del running[place]
        if following:
            # A step is seen by one worker after the other, within a second.
            site.clock.advance(0.02)
            if rng.random() < 0.3:
                await following.pop().follow(found)
                site.spread()
            continue
        site.clock.advance(rng.random())
        for worker in site.workers:
            await worker.keeping.look()
        disturb(site)
        if rng.random() < 0.2:
            # Some workers find the store again, and tell it what they pinned; others not yet.
            await asyncio.sleep(rng.random() * 2 * PROBE_S)
        if at % (turns // 5) == turns // 10 and steps:
            site.back()
            await site.whole()
            found, following = site.step(steps.pop(0)), rng.sample(site.workers, WORKERS)


def disturb(site: Site) -> None:
    """Let the store go or come, for all workers or some, or lose all that it has."""
    rng, chance = site.rng, site.rng.random()
    away = any(worker.shared.fault is not None for worker in site.workers)
    if chance < 0.02 and not away:
        site.lose(*rng.sample(site.workers, rng.choice([1, 2, 4])))
    elif chance < 0.08 and away:
        site.back()
        if rng.random() < 0.5:
            site.empty()
    elif chance > 0.98:
        site.empty()
    if rng.random() < 0.5:
        site.spread()


@pytest.mark.parametrize("seed", range(2))
async def test_every_conversation_has_one_version_whatever_becomes_of_the_store(seed: int) -> None:
    """Sessions with and without their history, and conversations nobody names, at all of four workers in turn."""
    site = Site(seed)
    try:
        await live(site, 1500)
    finally:
        await site.close()
    assert not site.flipped()
    begun = Counter(talk.versions[0] for talk in site.talks if talk.versions)
    assert begun["new"] > 10
    assert begun["old"] > 10


async def test_conversations_that_begin_in_an_outage_get_the_share_and_keep_their_version() -> None:
    """A tenth and a quarter of them or so; found again after the return, before any pin is merged, and by all."""
    site = Site()
    try:
        await site.follow(site.step(0.25))
        site.lose()
        talks = [site.begin(kind) for kind in KINDS for _ in range(200)]
        for talk in talks:
            await site.turn(talk)
        assert 0.17 < sum(talk.versions[0] == "new" for talk in talks) / len(talks) < 0.33
        site.back()
        site.empty()
        for talk in talks:
            for worker in site.workers:
                await talk.go_on(worker)
        await site.whole()
        for talk in talks:
            await site.turn(talk)
    finally:
        await site.close()
    assert not site.flipped()


@pytest.mark.parametrize("down", [False, True], ids=["with the store", "without it"])
async def test_a_step_that_only_some_workers_saw_holds_for_none(down: bool) -> None:
    """What begins meanwhile goes by the weights before, at all workers, and stays there; later ones get the share."""
    site = Site()
    try:
        await site.follow(site.step(0.3))
        found = site.step(0.7)
        for worker in site.workers[:2]:
            await worker.follow(found)
        if down:
            site.lose()
        talks = [site.begin(kind) for kind in KINDS for _ in range(50)]
        for _ in range(4):
            site.clock.advance(10.0 if down else FRESH_S / 5)
            for worker in site.workers:
                await worker.keeping.look()
            for talk in talks:
                await site.turn(talk)
        assert 0.2 < sum(talk.versions[0] == "new" for talk in talks) / len(talks) < 0.4
        site.back()
        await site.whole()
        for worker in site.workers:
            await worker.follow(found)
        site.spread()
        site.clock.advance(FRESH_S)
        for worker in site.workers:
            await worker.keeping.look()
        for talk in talks:
            await site.turn(talk)
        later = [await site.turn(site.begin(kind)) for kind in KINDS for _ in range(50)]
        assert 0.6 < later.count("new") / len(later) < 0.8
    finally:
        await site.close()
    assert not site.flipped()


async def test_who_sees_a_step_late_finds_what_began_by_it() -> None:
    """The first worker sends what begins to the canary already; the last would not do so yet, and goes along."""
    site = Site()
    first, last = site.workers[0], site.workers[-1]
    try:
        found = site.step(0.5)
        await first.follow(found)
        site.clock.advance(FRESH_S * 0.9)
        await last.follow(found)
        site.clock.advance(FRESH_S * 0.2)
        await first.keeping.look()
        talks = [site.begin(kind) for kind in KINDS for _ in range(30)]
        assert {await talk.go_on(first) for talk in talks} == {"old", "new"}
        for talk in talks:
            await talk.go_on(last)
        assert {await talk.go_on(last) for talk in [site.begin(kind) for kind in KINDS for _ in range(30)]} == {"old"}
    finally:
        await site.close()
    assert not site.flipped()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_conversation_on_the_old_version_stays_when_its_pin_is_lost(kind: Kind) -> None:
    """Redis is emptied after the raise; no worker but one ever answered it, and none asked in between."""
    site = Site()
    try:
        talks = [site.begin(kind) for _ in range(100)]
        for talk in talks:
            await talk.go_on(site.workers[0])
        await site.follow(site.step(0.5))
        site.spread()
        site.empty()
        for talk in talks:
            await talk.go_on(site.workers[1])
    finally:
        await site.close()
    assert not site.flipped()


@pytest.mark.parametrize("down", [False, True], ids=["with the store", "without it"])
async def test_nobody_stays_on_a_canary_that_was_rolled_back(down: bool) -> None:
    """All leave it at once, also those that workers remember; and a later rollout of it begins with none of them."""
    site = Site()
    try:
        talks = [site.begin(kind) for kind in KINDS for _ in range(50)]
        await site.follow(site.step(0.5))
        for talk in talks:
            await site.turn(talk)
        moved = [talk for talk in talks if talk.versions == ["new"]]
        assert len(moved) > 30
        await site.follow(site.step(0.6))
        if down:
            site.lose()
        await site.follow(rollout(0.0, phase="rolled_back"))
        assert {await site.turn(talk) for talk in talks} == {"old"}
        assert all(len(worker.knowledge["new"].conversations) == 0 for worker in site.workers)
        site.back()
        await site.whole()
        site.spread()
        await site.follow(rollout(0.6, 0.0))
        site.spread()
        assert {await site.turn(talk) for talk in talks} == {"old"}
    finally:
        await site.close()


async def test_nobody_stays_on_a_version_that_was_retired() -> None:
    """Conversations of before go on there while the canary is promoted, and leave with the end."""
    site = Site()
    try:
        talks = [site.begin(kind) for kind in KINDS for _ in range(10)]
        for talk in talks:
            await site.turn(talk)
        await site.follow(rollout(1.0, 0.5, 0.0, phase="promoted"))
        site.spread()
        site.lose()
        assert {await site.turn(talk) for talk in talks} == {"old"}
        assert {await site.turn(site.begin(kind)) for kind in KINDS} == {"new"}
        await site.follow(rollout(1.0, phase="retired"))
        assert {await site.turn(talk) for talk in talks} == {"new"}
    finally:
        await site.close()


async def test_only_what_would_move_is_told_and_the_store_is_asked_for_what_nobody_knows() -> None:
    """Nothing before weights change; then the conversations that would go elsewhere, once, in few deltas."""
    site = Site()
    first = site.workers[0]
    try:
        talks = [site.begin("text") for _ in range(1000)]
        for talk in talks:
            await talk.go_on(first)
        assert not any(isinstance(delta, Kept) for _, delta in first.told)
        site.workers[1].shared.calls.clear()
        await site.follow(site.step(0.25))
        kept = [(pool, delta) for pool, delta in first.told if isinstance(delta, Kept)]
        assert {pool for pool, _ in kept} == {"old"}
        told = sum(len(delta.conversations) // 16 for _, delta in kept)
        assert 190 < told < 310
        assert len(kept) == 1
        site.spread()
        for talk in talks:
            await talk.go_on(site.workers[1])
        assert "pinned" not in site.workers[1].shared.calls
        assert not any(isinstance(delta, Kept) for worker in site.workers for _, delta in worker.told)
        await site.follow(dict(first.around.rollouts))
        assert not first.told
    finally:
        await site.close()
    assert not site.flipped()


async def test_a_conversation_that_goes_on_is_told_again_and_one_that_ended_is_forgotten() -> None:
    """Others know it for as long as its pin lives; after that it begins anew, by the weights of then."""
    site = Site()
    first, second = site.workers[:2]
    try:
        talks = [site.begin("text") for _ in range(100)]
        for talk in talks:
            await talk.go_on(first)
        await site.follow(site.step(0.5))
        site.spread()
        for _ in range(8):
            site.clock.advance(LIFE_S * 0.3)
            for talk in talks:
                await talk.go_on(first)
            site.spread()
        site.lose()
        site.clock.advance(LIFE_S * 0.9)
        for talk in talks:
            await talk.go_on(second)
        assert not site.flipped()
        site.clock.advance(LIFE_S * 2)
        assert {await talk.go_on(second) for talk in talks} == {"old", "new"}
    finally:
        await site.close()


async def test_what_a_tester_asks_for_moves_no_conversation() -> None:
    """The header is for one request; the next one without it goes where the conversation runs."""
    site = Site()
    tenant = {"x_warmpath_tenant": "tester"}
    asked = {"x-warmpath-tenant": "tester", "x-warmpath-version": "new"}
    try:
        talks = [site.begin("text") for _ in range(50)]
        for talk in talks:
            await talk.go_on(site.workers[0], **tenant)
        await site.follow(site.step(0.5))
        site.spread()
        for talk in talks:
            for worker in site.workers:
                await worker.answer(Talk(talk.name, "text").call(**asked))
                await talk.go_on(worker, **tenant)
    finally:
        await site.close()
    assert not site.flipped()


def test_a_conversation_is_remembered_a_little_longer_than_its_pin() -> None:
    """By a quarter of a life, which is how seldom it is told again."""
    assert versions.life_s(settings()) == 1.25 * LIFE_S

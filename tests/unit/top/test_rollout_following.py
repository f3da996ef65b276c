"""A worker follows rollouts, whatever the store tells or does not tell, and says what it measured of their steps."""

import asyncio
import logging
import random
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.config import Config
from extproc.envoy.contract import EPOCH, MODEL, UNIT, VERSION, Served
from extproc.fleet.membership import Membership
from extproc.rollout import advance
from extproc.rollout.evidence import merge
from extproc.rollout.state import GROUP, Rollout, encode, evidence_name
from extproc.rollout_following import AGAIN_S, PUT_BACK_S, Following
from extproc.router import Surroundings
from extproc.state.document_store import Document
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.telemetry.families import Families
from extproc.telemetry.rollout_metrics import VersionMetrics
from extproc.upkeep import Upkeep
from tests.unit.fleet.parts import SkewedClock
from tests.unit.fleet.rollout_parts import Keeper, Shelf, configured, started
from tests.waiting import until


class OwnOrigin:
    """A host's own clock: it goes as that of all others, from another origin and with another wall time."""

    def __init__(self, clock: SkewedClock) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return self._clock.monotonic() - 900.0

    def wall(self) -> float:
        """See `Clock.wall`."""
        return self._clock.wall() + 1e6


class Worker:
    """One worker's part, over a store that several may share."""

    def __init__(self, shelf: Shelf, name: str = "w1", config: Config | None = None) -> None:
        self.shelf = shelf
        self.around = Surroundings(
            config=config or configured(),
            fleet=Fleet({}, {}, ""),
            knowledge={pool: PoolKnowledge(Priors()) for pool in ("p1", "p2")},
            store=shelf,
            replica=name,
            new_charge_id=lambda: "c",
        )
        self.clock = OwnOrigin(shelf.clock)
        self.upkeep = Upkeep(self.around, Membership(), self.clock)
        self.registry = CollectorRegistry()
        metrics = VersionMetrics(Families(self.registry))
        self.following = Following(self.around, metrics, self.clock, random.Random(1))

    async def start(self) -> None:
        """What a worker does before it is ready."""
        await self.upkeep.apply(self.around.config)
        await self.following.look()

    @property
    def weights(self) -> Mapping[str, float]:
        """Who gets what, as decisions see it."""
        return self.around.fleet.splits["m"].weights

    def page(self) -> list[str]:
        """Lines of its metrics page."""
        return generate_latest(self.registry).decode().splitlines()


@pytest.fixture
def shelf() -> Shelf:
    """The store of all."""
    return Shelf(SkewedClock())


def moved(rollout: Rollout, step: int, **changes: Any) -> Rollout:
    """The same rollout at another step."""
    return msgspec.structs.replace(rollout, step=step, share=rollout.plan.steps[step], **changes)


FILE = {"one": 1.0, "two": 0.0}


async def test_a_rollout_that_runs_holds_from_the_first_look_on(shelf: Shelf) -> None:
    """The file's weights are those before it."""
    await shelf.put(started(shelf.clock.now))
    worker = Worker(shelf)
    await worker.upkeep.apply(worker.around.config)
    assert worker.weights == FILE
    await worker.following.look()
    assert worker.weights == {"one": 0.95, "two": 0.05}
    assert worker.around.fleet.splits["m"].epoch == "r1-0"
    assert worker.around.rollouts["m"].id == "r1"


async def test_steps_and_a_rollback_hold_from_the_next_look_on(shelf: Shelf) -> None:
    """Without waiting for a scrape; and no conversation stays after a rollback."""
    rollout = started(shelf.clock.now)
    await shelf.put(rollout)
    worker = Worker(shelf)
    await worker.start()
    await shelf.put(moved(rollout, 1, earlier=(0.05, 0.0)))
    await worker.following.look()
    split = worker.around.fleet.splits["m"]
    assert (split.weights["two"], split.epoch) == (0.25, "r1-1")
    assert [each.get("two") for each in split.earlier] == [0.05, 0.0]
    aborted, _ = advance.abort(await shelf.rollout(), shelf.clock.now, "eve")
    await shelf.put(aborted)
    await worker.following.look()
    split = worker.around.fleet.splits["m"]
    assert (split.weights["two"], split.earlier, split.epoch) == (0.0, (), "")


async def test_whoever_builds_the_fleet_anew_goes_by_what_is_known(shelf: Shelf) -> None:
    """A scrape between two looks, and one that overlaps a look, lose nothing."""
    await shelf.put(started(shelf.clock.now))
    worker = Worker(shelf)
    await worker.start()
    await worker.upkeep.refresh()
    assert worker.weights["two"] == 0.05
    await shelf.put(moved(started(shelf.clock.now), 1))
    await asyncio.gather(worker.upkeep.refresh(), worker.following.look(), worker.upkeep.refresh())
    assert worker.weights["two"] == 0.25
    assert set(worker.around.fleet.pools) == {"p1", "p2"}


async def test_what_the_others_changed_of_the_fleet_stays(shelf: Shelf) -> None:
    """A breaker that opened is not closed by a look."""
    await shelf.put(started(shelf.clock.now))
    worker = Worker(shelf)
    await worker.upkeep.apply(worker.around.config)
    marked = Pool("p1", "predicted_ttft", (Endpoint("a", "10.0.0.1:80", 1.0, breaker="open"),))
    fleet = worker.around.fleet
    worker.around.fleet = msgspec.structs.replace(fleet, pools={**fleet.pools, "p1": marked})
    await worker.following.look()
    assert worker.around.fleet.pools["p1"] is marked


async def test_what_no_keeper_knows_any_more_a_worker_puts_back(shelf: Shelf) -> None:
    """After a flush keepers have their time first; from then on a new keeper finds the rollout, to judge and abort."""
    await shelf.put(started(shelf.clock.now))
    worker = Worker(shelf)
    await worker.start()
    before = (await shelf.documents(GROUP)).found
    shelf.flush()
    await worker.following.look()
    shelf.clock.now += PUT_BACK_S - 0.5
    await worker.following.look()
    assert (await shelf.documents(GROUP)).found == {}
    shelf.clock.now += 0.5
    await worker.following.look()
    assert (await shelf.documents(GROUP)).found == before
    keeper = Keeper(shelf, "k9")
    await keeper.controller.round()
    assert keeper.controller.known()["m"].rollout.id == "r1"


async def test_what_is_to_be_forgotten_is_not_put_back(shelf: Shelf) -> None:
    """The file's weights hold from the next look on, and nobody brings it back when it is dropped."""
    rollout = started(shelf.clock.now)
    await shelf.put(rollout)
    worker = Worker(shelf)
    await worker.start()
    assert worker.weights["two"] > 0.0
    forgotten, _ = advance.forget(rollout, shelf.clock.now, "bob")
    await shelf.put(forgotten)
    await worker.following.look()
    assert dict(worker.weights) == {"one": 1.0, "two": 0.0}
    await shelf.drop_document(GROUP, "m")
    for _ in range(3):
        shelf.clock.now += PUT_BACK_S
        await worker.following.look()
    assert (await shelf.documents(GROUP)).found == {}
    await shelf.put(started(shelf.clock.now, "r2"))
    await worker.following.look()
    assert worker.around.rollouts["m"].id == "r2"


async def test_a_store_that_is_away_is_not_written_to(shelf: Shelf) -> None:
    """Silence says nothing of what the store has; nor is a rollout put back that the configuration knows no more."""
    await shelf.put(started(shelf.clock.now))
    worker = Worker(shelf)
    await worker.start()
    shelf.down = True
    await worker.following.look()
    shelf.clock.now += 10 * PUT_BACK_S
    shelf.down = False
    shelf.flush()
    await worker.following.look()
    assert (await shelf.documents(GROUP)).found == {}
    versions = {"one": {"pool": "p1", "weight": 1}, "three": {"pool": "p2"}}
    await worker.upkeep.apply(configured(models={"m": {"versions": versions}}))
    shelf.clock.now += 10 * PUT_BACK_S
    await worker.following.look()
    assert (await shelf.documents(GROUP)).found == {}


async def test_a_change_of_one_rollout_leaves_the_others(shelf: Shelf) -> None:
    """Of two models, one goes a step further."""
    models = {
        "m": {"versions": {"one": {"pool": "p1", "weight": 1}, "two": {"pool": "p2"}}},
        "n": {"versions": {"one": {"pool": "p1", "weight": 1}, "two": {"pool": "p2"}}},
    }
    worker, rollout = Worker(shelf, config=configured(models=models)), started(shelf.clock.now)
    await shelf.put(rollout)
    await shelf.put(msgspec.structs.replace(rollout, model="n"))
    await worker.start()
    await shelf.put(moved(rollout, 1))
    await worker.following.look()
    splits = worker.around.fleet.splits
    assert (splits["m"].weights["two"], splits["n"].weights["two"]) == (0.25, 0.05)


async def lost(shelf: Shelf) -> None:
    """Everything is gone."""
    shelf.flush()


async def silent(shelf: Shelf) -> None:
    """Nobody answers."""
    shelf.down = True


async def failed_over(shelf: Shelf) -> None:
    """The document before the last is told again."""
    shelf.flush()
    await shelf.put_document(GROUP, "m", Document(1, encode(started(shelf.clock.now))))


async def damaged(shelf: Shelf) -> None:
    """The document is garbage."""
    shelf.flush()
    await shelf.put_document(GROUP, "m", Document(3, b'{"id":"r1","mod'))


async def misplaced(shelf: Shelf) -> None:
    """The document is another model's."""
    shelf.flush()
    other = msgspec.structs.replace(started(shelf.clock.now), model="n")
    await shelf.put_document(GROUP, "m", Document(3, encode(other)))


async def absurd(shelf: Shelf) -> None:
    """The document gives more than there is."""
    shelf.flush()
    over = msgspec.structs.replace(started(shelf.clock.now), share=7.0)
    await shelf.put_document(GROUP, "m", Document(3, encode(over)))


@pytest.mark.parametrize("happens", [lost, silent, failed_over, damaged, misplaced, absurd])
async def test_traffic_moves_only_because_somebody_said_so(shelf: Shelf, happens: Any) -> None:
    """What was known stays known, and what comes next is taken."""
    rollout = started(shelf.clock.now)
    await shelf.put(rollout)
    await shelf.put(moved(rollout, 1))
    worker = Worker(shelf)
    await worker.start()
    await happens(shelf)
    for _ in range(3):
        await worker.following.look()
        await worker.upkeep.refresh()
    assert worker.weights["two"] == 0.25
    shelf.flush()
    shelf.down = False
    await shelf.put_document(GROUP, "m", Document(4, encode(moved(rollout, 2))))
    await worker.following.look()
    assert worker.weights == {"two": 1.0}


async def test_a_document_that_cannot_be_read_is_said_once(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    """Not at each look; and again when there is another one."""
    worker = Worker(shelf)
    await worker.upkeep.apply(worker.around.config)
    with caplog.at_level(logging.WARNING):
        for revision in (1, 2):
            await shelf.put_document(GROUP, "m", Document(revision, b"?"))
            for _ in range(3):
                await worker.following.look()
    assert len([line for line in caplog.records if line.message == "a rollout is left as it was"]) == 2
    assert worker.weights == FILE


async def test_a_store_that_is_gone_is_said_once(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    """Four looks a second would fill the log, and so would each that comes late now and then."""
    worker = Worker(shelf)
    await worker.upkeep.apply(worker.around.config)
    with caplog.at_level(logging.WARNING):
        for look in range(20):
            shelf.down = look % 3 != 0
            await worker.following.look()
            shelf.clock.advance(0.25)
        assert not caplog.records
        shelf.down = True
        for _ in range(40):
            await worker.following.look()
            shelf.clock.advance(0.25)
    assert len(caplog.records) == 1


async def test_a_worker_waits_for_its_first_look(shelf: Shelf) -> None:
    """Until the store tells, and no longer than it is told to; looks go on meanwhile."""
    await shelf.put(started(shelf.clock.now))
    worker = Worker(shelf)
    await worker.upkeep.apply(worker.around.config)
    shelf.down = True
    task = asyncio.create_task(worker.following.run())
    try:
        assert not await worker.following.caught_up(0.05)
        assert worker.weights == FILE
        shelf.down = False
        assert await worker.following.caught_up(60.0)
        assert worker.weights["two"] == 0.05
        await shelf.put(moved(started(shelf.clock.now), 1))
        await until(lambda: worker.weights["two"] == 0.25)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_without_versions_the_store_is_not_asked(shelf: Shelf) -> None:
    """And nobody waits."""
    worker = Worker(shelf, config=configured(models={"m": {"pool": "p1"}}))
    await worker.start()
    assert shelf.asked == 0
    assert await worker.following.caught_up(0.0)


def served(unit: float = 0.5, version: str = "one", epoch: str = "r1-0", **changes: Any) -> Served:
    """A whole streamed answer."""
    metadata = {
        "endpoint": "e",
        "kind": "chat",
        "streamed": 1.0,
        "uncached_tokens": 100.0,
        MODEL: "m",
        VERSION: version,
        UNIT: unit,
        EPOCH: epoch,
    }
    fields: dict[str, Any] = {
        "charge_id": "c",
        "pool": {"one": "p1", "two": "p2"}[version],
        "destination": "10.0.0.1:80",
        "status": 200,
        "ttft_s": 0.1,
        "duration_s": 0.0,
        "response_bytes": 1000,
        "output_tokens": 10,
        "prompt_tokens": 100,
        "metadata": metadata,
    }
    return Served(**(fields | changes))


async def answers(shelf: Shelf, epoch: str = "r1-0") -> tuple[int, int]:
    """Answers of the canary and of the baseline that workers have told of."""
    evidence = merge((await shelf.parts(GROUP, epoch)).values())
    return evidence.answers[0], evidence.answers[1]


async def test_what_was_measured_is_told(shelf: Shelf) -> None:
    """Of both versions, by every worker for itself; evidence of all of them adds up."""
    await shelf.put(started(shelf.clock.now))
    workers = [Worker(shelf, "w1"), Worker(shelf, "w2")]
    for worker in workers:
        await worker.start()
        worker.following.observe(served(0.9), "e", -1.0)
        worker.following.observe(served(0.01, "two"), "e", -1.0)
        worker.following.observe(served(0.02, "two", status=500, output_tokens=-1), "e", -1.0)
        await worker.following.tell()
    assert await answers(shelf) == (4, 2)
    assert set(await shelf.parts(GROUP, evidence_name(started(0.0)))) == {"w1", "w2"}


async def test_what_did_not_change_is_not_told_again_at_once(shelf: Shelf) -> None:
    """But after a while, because a flush may have lost it."""
    await shelf.put(started(shelf.clock.now))
    worker = Worker(shelf)
    await worker.start()
    await worker.following.tell()
    assert shelf.puts == []
    worker.following.observe(served(), "e", -1.0)
    for _ in range(3):
        await worker.following.tell()
    assert len(shelf.puts) == 1
    shelf.flush()
    shelf.clock.advance(AGAIN_S)
    await worker.following.tell()
    assert await answers(shelf) == (0, 1)


async def test_what_could_not_be_told_is_told_later(shelf: Shelf) -> None:
    """At the end at the latest."""
    await shelf.put(started(shelf.clock.now))
    worker = Worker(shelf)
    await worker.start()
    worker.following.observe(served(), "e", -1.0)
    shelf.down = True
    await worker.following.tell()
    shelf.down = False
    await worker.following.close()
    assert await answers(shelf) == (0, 1)


async def test_each_step_is_measured_anew(shelf: Shelf) -> None:
    """What was decided before counts no more; what is decided in a pause goes on to count."""
    rollout = started(shelf.clock.now)
    await shelf.put(rollout)
    worker = Worker(shelf)
    await worker.start()
    worker.following.observe(served(), "e", -1.0)
    paused, _ = advance.pause(await shelf.rollout(), shelf.clock.now, "eve")
    await shelf.put(paused)
    await worker.following.look()
    worker.following.observe(served(0.6), "e", -1.0)
    await worker.following.tell()
    assert await answers(shelf) == (0, 2)
    await shelf.put(moved(rollout, 1))
    await worker.following.look()
    worker.following.observe(served(0.7), "e", -1.0)
    worker.following.observe(served(0.8, epoch="r1-1"), "e", -1.0)
    await worker.following.tell()
    assert await answers(shelf) == (0, 2)
    assert await answers(shelf, "r1-1") == (0, 1)


async def test_what_no_rollout_is_about_is_only_counted(shelf: Shelf) -> None:
    """Without a rollout, and with one that is over."""
    rollout = started(shelf.clock.now)
    worker = Worker(shelf)
    await worker.start()
    worker.following.observe(served(), "e", -1.0)
    await shelf.put(rollout)
    aborted, _ = advance.abort(rollout, shelf.clock.now, "eve")
    await shelf.put(aborted)
    await worker.following.look()
    worker.following.observe(served(), "e", -1.0)
    await worker.following.tell()
    assert shelf.puts == []
    assert 'warmpath_version_requests_total{model="m",outcome="ok",version="one"} 2.0' in worker.page()


async def test_the_page_shows_who_gets_what(shelf: Shelf) -> None:
    """Shares as decisions go by them, and how requests of each version ended."""
    worker = Worker(shelf)
    await worker.start()
    assert 'warmpath_version_share{model="m",version="one"} 1.0' in worker.page()
    await shelf.put(started(shelf.clock.now))
    await worker.following.look()
    assert 'warmpath_version_share{model="m",version="two"} 0.05' in worker.page()
    worker.following.observe(served(0.01, "two", flags=("UPE",), output_tokens=-1), "e", -1.0)
    assert 'warmpath_version_requests_total{model="m",outcome="broken",version="two"} 1.0' in worker.page()


async def test_metadata_that_is_not_ours_makes_no_series(shelf: Shelf) -> None:
    """Names of models and versions are those of the configuration."""
    worker = Worker(shelf)
    await worker.start()
    worker.following.observe(served(metadata={MODEL: "x" * 50, VERSION: "y"}), "e", -1.0)
    assert not any("version_requests_total{" in line for line in worker.page())


async def test_times_of_samples_are_the_stores(shelf: Shelf) -> None:
    """A worker whose own clock counts from another origin dates what it measured as the others do."""
    rollout = started(shelf.clock.now, settle_s=5.0)
    await shelf.put(rollout)
    worker = Worker(shelf)
    await worker.start()
    shelf.clock.advance(4.0)
    worker.following.observe(served(0.5, duration_s=0.0), "e", -1.0)
    shelf.clock.advance(2.0)
    worker.following.observe(served(0.6, duration_s=0.0), "e", -1.0)
    await worker.following.tell()
    assert await answers(shelf) == (0, 1)


async def run_until_over(shelf: Shelf, fails: float) -> Rollout:
    """Traffic of two workers and the rounds of a keeper for three minutes; so many of the canary's answers are 500."""
    chance, workers, keeper = random.Random(7), [Worker(shelf, "w1"), Worker(shelf, "w2")], Keeper(shelf)
    for worker in workers:
        await worker.start()
    for _ in range(360):
        for worker in workers:
            await worker.following.look()
            split = worker.around.fleet.splits["m"]
            for _ in range(20):
                unit = chance.random()
                version = "two" if unit < split.weights.get("two", 0.0) else "one"
                failed = version == "two" and chance.random() < fails
                changes = {"status": 500, "output_tokens": -1} if failed else {}
                worker.following.observe(served(unit, version, split.epoch, **changes), "e", -1.0)
            await worker.following.tell()
        await keeper.rounds(0.5)
    return await shelf.rollout()


async def test_a_canary_that_fails_requests_is_rolled_back_everywhere(shelf: Shelf) -> None:
    """By the gate on errors, from what all workers measured; the log says by what numbers."""
    await shelf.put(started(shelf.clock.now, steps=(0.25, 1.0), hold_s=120.0, min_samples=100))
    after = await run_until_over(shelf, fails=0.2)
    assert (after.phase, after.share, after.gate) == ("rolled_back", 0.0, "errors")
    told = (await shelf.log())[-1]
    assert (told.what, told.gate) == ("rolled_back", "errors")
    assert told.told["canary"] > told.told["baseline"] == 0.0


async def test_a_canary_that_is_no_worse_is_promoted(shelf: Shelf) -> None:
    """With the same traffic."""
    await shelf.put(started(shelf.clock.now, steps=(0.25, 1.0), hold_s=60.0, min_samples=100))
    after = await run_until_over(shelf, fails=0.0)
    assert (after.phase, after.share, after.gate) == ("retired", 1.0, "")

"""Precise profiles in a replay: engines tell of their caches, some time later, and decisions go by it."""

import random

import msgspec
import pytest

from extproc.replay.cache_events import CacheEvents
from extproc.replay.compare import Compared, compare, config_of
from extproc.replay.generate import generated
from extproc.replay.routed import Routed
from extproc.replay.rows import Row
from extproc.replay.world import Ended, Settings, World
from extproc.sim.sequence import Sequence as Job
from extproc.sim.settings import EngineSettings
from extproc.sim.virtual import VirtualEngine

SIZE = 16
SMALL = EngineSettings(block_size=SIZE, blocks=13)
"""Room for 12 blocks."""


def run(engine: VirtualEngine, start: int, now: float) -> float:
    """A prompt of five blocks and an answer of one more, from `now` until it is answered; returns when that is."""
    job = Job(5 * SIZE, SIZE + 1, list(range(start, start + 6)))
    engine.advance(now)
    engine.submit([job], now)
    while job.finished is None:
        assert engine.next_event is not None
        engine.advance(engine.next_event)
    return job.finished_at


def test_what_is_told_is_what_the_cache_holds() -> None:
    """Stored and evicted, put together, are the blocks that can be found, whatever was computed twice."""
    rng, engines = random.Random(3), [VirtualEngine(SMALL) for _ in range(2)]
    events = CacheEvents(engines, 0.0)
    held: list[set[int]] = [set(), set()]
    now = 0.0
    for number in range(60):
        which = rng.randrange(2)
        start = 10 * rng.randrange(4)
        jobs = [Job(5 * SIZE, 20, list(range(start, start + 6))) for _ in range(rng.choice((1, 2)))]
        engines[which].advance(now)
        engines[which].submit(jobs, now)
        now += rng.choice((0.005, 0.5))
        for engine in engines:
            engine.advance(now)
        for index, stored, blocks in events.told(now):
            assert held[index].isdisjoint(blocks) if stored else held[index].issuperset(blocks)
            held[index] = held[index] | set(blocks) if stored else held[index] - set(blocks)
        assert [len(each) for each in held] == [engine.pool.cached for engine in engines], number
    assert all(held)


def test_events_are_as_late_as_was_asked_for() -> None:
    """They count from the first look after they happened, in the order in which they did."""
    engine = VirtualEngine(SMALL)
    events = CacheEvents([engine], 2.0)
    first = run(engine, 100, 0.0)
    assert list(events.told(first)) == []
    second = run(engine, 200, first + 1.0)
    third = run(engine, 300, second)
    assert list(events.told(first + 1.9)) == []
    told = [(stored, block) for _, stored, blocks in events.told(first + 2.0) for block in blocks]
    assert told == [(True, block) for block in range(100, 106)]
    later = [(stored, block) for _, stored, blocks in events.told(third + 5.0) for block in blocks]
    assert (True, 205) in later
    assert (False, 105) in later


def test_a_replayed_decision_goes_by_what_the_engine_told() -> None:
    """An engine that computed a prompt which nobody sent here is picked for it, and its answer predicted."""
    engines = [VirtualEngine(EngineSettings(block_size=SIZE)) for _ in range(3)]
    config = config_of("predicted_ttft", Compared(policies=(), engines=3))
    estimated = Routed(config, engines, SIZE)
    precise = Routed(config, engines, SIZE, CacheEvents(engines, 0.0))
    row = Row(0.0, -1, 5 * SIZE + 1, 4, list(range(100, 105)))
    for which in range(3):
        now = run(engines[which], 100, 10.0 * which) if which == 1 else 10.0 * which
    for chooser in (estimated, precise):
        chooser.scrape(engines, now)
    picked = precise.choose(row, now)
    assert (picked.engine, picked.cached_tokens) == (1, 5.0 * SIZE)
    assert estimated.choose(row, now).cached_tokens == 0.0


def test_kinds_of_profiles_are_compared_side_by_side() -> None:
    """Each policy that looks at prompts with each kind; the others, which have no profiles, once."""
    wanted = Compared(
        policies=("predicted_ttft", "round_robin", "oracle"), engines=2, profiles=("estimated", "precise"), regret=False
    )
    trace = generated("agents", 1, seconds=1.0)
    results = compare(trace, wanted)
    assert list(results) == ["predicted_ttft estimated", "predicted_ttft precise", "round_robin", "oracle"]
    assert list(compare(trace, msgspec.structs.replace(wanted, profiles=("precise",)))) == list(wanted.policies)


def promised_in_vain(ended: list[Ended]) -> float:
    """Share of all prompt tokens that was expected to be cached and was not."""
    tokens = sum(one.row.prompt_tokens for one in ended)
    return sum(max(0.0, one.picked.cached_tokens - one.cached_tokens) for one in ended) / tokens


@pytest.mark.parametrize("delay_s", [0.0, 2.0])
def test_what_a_queue_will_push_out_is_not_promised(delay_s: float) -> None:
    """Agents on two engines that they overload: their caches turn over while prompts wait, and events come late."""
    trace = generated("agents", 1, seconds=10.0, rate=6.0)
    engines = [VirtualEngine(EngineSettings(block_size=SIZE, blocks=401)) for _ in range(2)]
    config = config_of("predicted_ttft", Compared(policies=(), engines=2))
    chooser = Routed(config, engines, SIZE, CacheEvents(engines, delay_s))
    ended = World(trace, Settings(), engines, chooser).run().ended
    waits = sorted(one.ttft_s for one in ended)
    assert waits[len(waits) // 2] > 0.5
    assert promised_in_vain(ended) < 0.03

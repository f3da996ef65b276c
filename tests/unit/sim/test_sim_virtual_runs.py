"""Where the engine core for replay may jump to, and what is read of it between two events."""

from dataclasses import replace
from math import nextafter

import pytest

from extproc.sim.sequence import Sequence
from extproc.sim.settings import EngineSettings
from extproc.sim.virtual import VirtualEngine

TICK = 2.0**-12
DYADIC = EngineSettings(blocks=2001, step_s=2.0**-7, per_seq_s=TICK, prefill_tokens_per_s=2.0**14)
"""Every time that comes of these is a sum of powers of two, and exact."""
ALONE = 2.0**-7 + TICK
"""A step of `DYADIC` in which one sequence decodes."""


def plain(answer: int, prompt: int = 16, *, family: int = 0) -> Sequence:
    """A sequence of which no other shares a block, unless it is of the same family."""
    return Sequence(prompt, answer, [1000 * family + n for n in range((prompt + answer) // 16)])


def events(engine: VirtualEngine) -> list[float]:
    """Run until idle; return the times at which something happened."""
    times: list[float] = []
    while engine.next_event is not None:
        times.append(engine.next_event)
        engine.advance(engine.next_event)
    return times


def decoding(answer: int, knobs: EngineSettings = DYADIC) -> tuple[VirtualEngine, Sequence, float]:
    """An engine with one sequence in the midst of its answer: engine, sequence, when it began to decode."""
    engine, one = VirtualEngine(knobs), plain(answer, family=9)
    engine.submit([one], 0.0)
    assert engine.next_event is not None
    start = engine.next_event
    assert engine.advance(start) == [one]
    return engine, one, start


@pytest.mark.parametrize("answer", [2, 50, 20_000])
def test_an_answer_of_any_length_is_two_events(answer: int) -> None:
    """The first token and the end: what a request costs does not grow with the steps it decodes in."""
    engine, one = VirtualEngine(DYADIC), plain(answer)
    engine.submit([one], 0.0)
    assert events(engine) == [one.first_token_at, one.finished_at]
    assert one.finished_at - one.first_token_at == (answer - 1) * ALONE


@pytest.mark.parametrize(("arrival", "seen"), [(10.0, 11), (10.25, 11), (10.75, 11), (0.0, 1), (0.5, 1), (97.5, 98)])
def test_an_arrival_within_a_run_is_seen_at_the_end_of_the_step_in_progress(arrival: float, seen: int) -> None:
    """The run is cut there and nowhere else; an arrival at a step's very end waits for the next step."""
    engine, one, start = decoding(100)
    late = plain(1, family=1)
    now = start + arrival * ALONE
    assert engine.advance(now) == []
    engine.submit([late], now)
    assert engine.next_event == start + seen * ALONE
    events(engine)
    assert late.admitted_at == start + seen * ALONE
    assert one.finished_at == start + 99 * ALONE + (late.finished_at - late.admitted_at - ALONE)


def test_a_run_ends_where_the_pool_runs_dry() -> None:
    """The step that finds no free block begins on its own, and the newest sequence goes."""
    engine = VirtualEngine(replace(DYADIC, blocks=15))
    one, two = plain(60, 80, family=1), plain(60, 80, family=2)
    engine.submit([one, two], 0.0)
    times = events(engine)
    assert (one.preemptions, two.preemptions) == (0, 1)
    # Both take a sixth block with the 1st decode and a seventh with the 17th: the pool is full. The 33rd needs more.
    dry = times[0] + 32 * (2.0**-7 + 2 * TICK)
    assert times[1:4] == [dry, dry + ALONE, one.finished_at]
    assert one.finished_at == dry + (60 - 33) * ALONE


def test_an_end_makes_room_for_one_that_waits() -> None:
    """A run ends with the earliest of its sequences, and the next in the queue is admitted then."""
    engine = VirtualEngine(replace(DYADIC, blocks=10))
    one, two, three = plain(10, 80, family=1), plain(60, family=2), plain(1, 64, family=3)
    engine.submit([one, two, three], 0.0)
    times = events(engine)
    assert three.admitted_at == one.finished_at == times[1]
    assert three.preemptions == two.preemptions == 0


def test_a_block_filled_within_a_run_makes_room_for_one_that_shares_it() -> None:
    """Sharing a block instead of taking one may be what lets a waiting sequence in before anybody ends."""
    engine, one, start = decoding(80, replace(DYADIC, blocks=7))
    waiting = plain(1, 90, family=9)
    engine.submit([waiting], start)
    events(engine)
    # Of six blocks the sequence that decodes holds two and `waiting` needs six: it must share both, and the second
    # is full from the beginning of the 16th decode on.
    assert waiting.admitted_at == start + 15 * ALONE
    assert waiting.cached_tokens == 32
    assert waiting.finished_at < one.finished_at


def test_within_a_run_everything_reads_as_of_the_last_advance() -> None:
    """Busy time, cache usage and cached blocks go on while a run does, although no event happens."""
    engine, one, start = decoding(100)
    assert (engine.running, engine.waiting) == (1, 0)
    assert engine.cached_tokens(one.hashes, 64) == 16
    engine.advance(start + 40.5 * ALONE)
    assert engine.busy_s == start + 40 * ALONE
    assert engine.cache_usage == 1 - engine.pool.free / 2000 == pytest.approx(4 / 2000)
    assert engine.cached_tokens(one.hashes, 100) == 48
    engine.advance(start + 41 * ALONE)
    assert engine.busy_s == start + 41 * ALONE


def test_the_end_of_a_step_is_met_to_the_last_bit() -> None:
    """Dividing by a step's length rounds; at `began + n x length` n steps are over, and just before it one less."""
    knobs = replace(DYADIC, step_s=0.00613, per_seq_s=0.000137)
    length = 0.00613 + 0.000137
    for start in (0.1, 3.3, 77.7):
        engine, one = VirtualEngine(knobs), plain(1000)
        engine.submit([one], start)
        began = engine.next_event
        assert began is not None
        engine.advance(began)
        before = engine.busy_s
        for steps in range(1, 999):
            end = began + steps * length
            engine.advance(nextafter(end, 0.0))
            assert engine.busy_s == before + (steps - 1) * length
            engine.advance(end)
            assert engine.busy_s == before + steps * length


def test_a_decoding_sequence_evicts_as_it_goes() -> None:
    """Within one run, the cache loses a block whenever the sequence takes one that held something."""
    engine = VirtualEngine(replace(DYADIC, blocks=12))
    old, one = plain(1, 160, family=1), plain(100, family=2)
    engine.submit([old], 0.0)
    now = events(engine)[-1]
    engine.submit([one], now)
    assert engine.cached_tokens(old.hashes, 161) == 160
    start = engine.next_event
    assert start is not None
    engine.advance(start)
    found = []
    for steps in (0, 15, 16, 31, 32):
        engine.advance(start + steps * ALONE)
        found.append(engine.cached_tokens(old.hashes, 161))
    assert found == [144, 144, 128, 128, 112]


def test_a_pooling_sequence_ends_with_its_prefill() -> None:
    """Its end is its first token too, and it is reported once."""
    engine, one = VirtualEngine(DYADIC), plain(0, 100)
    engine.submit([one], 0.0)
    assert engine.advance(10.0) == [one]
    assert (one.produced, one.first_token_at) == (0, one.finished_at)


def test_blocks_without_a_known_hash_are_not_found() -> None:
    """`hashes` may end with the prompt, or before it: what lies behind takes room and is forgotten."""
    engine = VirtualEngine(DYADIC)
    engine.submit([Sequence(100, 100, [1, 2, 3])], 0.0)
    events(engine)
    assert engine.cached_tokens([1, 2, 3, 4, 5, 6, 7], 120) == 48
    assert engine.pool.cached == 3
    assert engine.pool.free == engine.pool.usable


@pytest.mark.parametrize(
    ("prompt", "answer", "fits"), [(100, 60, True), (101, 60, False), (161, 0, False), (0, 5, False)]
)
def test_what_could_never_run_is_refused(prompt: int, answer: int, fits: bool) -> None:
    """A sequence longer than the cache would wait for ever, and the replay with it; so would one of no tokens."""
    engine = VirtualEngine(replace(DYADIC, blocks=11))
    if fits:
        engine.submit([plain(answer, prompt)], 0.0)
        assert events(engine)
        return
    with pytest.raises(ValueError, match="raise blocks or leave it out"):
        engine.submit([plain(answer, prompt)], 0.0)

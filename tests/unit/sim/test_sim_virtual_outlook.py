"""What a virtual engine tells of what is to come: the step in progress, room, decodes, and who is in line."""

from dataclasses import replace

import pytest

from extproc.sim.sequence import Sequence
from extproc.sim.settings import EngineSettings
from extproc.sim.virtual import VirtualEngine

STEP = 2.0**-7
KNOBS = EngineSettings(blocks=2001, step_s=STEP, per_seq_s=0.0, prefill_tokens_per_s=2.0**14, token_budget=64)
"""A step takes `STEP` however much it does: 64 tokens of prefill would take half of it."""


def plain(answer: int, prompt: int = 16, *, family: int = 0) -> Sequence:
    """A sequence of which no other shares a block, unless it is of the same family."""
    return Sequence(prompt, answer, [1000 * family + n for n in range((prompt + answer) // 16)])


def decoding(*answers: int, blocks: int = 2001) -> tuple[VirtualEngine, float]:
    """An engine on which sequences with prompts of 16 tokens all got their first token just now, and the time."""
    engine = VirtualEngine(replace(KNOBS, blocks=blocks, token_budget=2048))
    engine.submit([plain(answer, family=n) for n, answer in enumerate(answers, 1)], 0.0)
    engine.advance(STEP)
    return engine, STEP


def test_the_step_in_progress_ends_when_an_arrival_would_be_seen() -> None:
    """`step_left` counts down within each step of a run, and is 0 while the engine is idle."""
    assert VirtualEngine(KNOBS).step_left() == 0.0
    engine, start = decoding(100)
    for steps in (0.0, 0.25, 0.75, 1.0, 1.5, 97.75):
        now = start + steps * STEP
        engine.advance(now)
        assert engine.step_left() == (1 - steps % 1) * STEP
        assert now + engine.step_left() <= (engine.next_event or 0.0)


def test_an_arrival_cuts_a_run_where_the_step_in_progress_ends() -> None:
    """The next event after an arrival is `step_left` away."""
    engine, start = decoding(100)
    now = start + 20.25 * STEP
    engine.advance(now)
    left = engine.step_left()
    engine.submit([plain(1, family=99)], now)
    assert engine.next_event == now + left


@pytest.mark.parametrize(
    ("lacking", "steps"), [(-5, 0), (0, 0), (1, 9), (2, 9), (3, 29), (4, 29), (5, 49), (6, 49), (1000, 49)]
)
def test_room_comes_when_sequences_end(lacking: int, steps: int) -> None:
    """Those that end give back the two blocks that each holds, first ends first; for more, the last end counts."""
    engine, _ = decoding(11, 31, 51)
    assert engine.pool.usable - engine.pool.free == 3 * 2
    assert engine.steps_to_room(engine.pool.free + lacking) == steps


def test_steps_to_room_are_counted_from_the_step_in_progress() -> None:
    """As a run goes on, the end comes nearer; the blocks taken meanwhile are given back too."""
    engine, start = decoding(41)
    engine.advance(start + 10.5 * STEP)
    assert engine.steps_to_room(engine.pool.usable) == 29
    engine.advance(start + 35.5 * STEP)
    assert engine.steps_to_room(engine.pool.usable) == 4
    assert engine.steps_to_room(engine.pool.free) == 0


def test_who_decodes_next_leaves_out_who_ends_and_counts_who_begins() -> None:
    """In the step after the one in progress: those that still lack a token, and prefills that are through by then."""
    engine, start = decoding(3, 50, 50)
    assert engine.decoding_next() == 3
    engine.advance(start + STEP)
    assert engine.decoding_next() == 2
    engine.submit([plain(5, family=7), plain(1, family=8)], start + STEP)
    engine.advance(start + 2 * STEP)
    # The first of the two prompts in the step in progress goes on to decode, the second one ends with it.
    assert engine.decoding_next() == 3
    engine.advance(start + 3 * STEP)
    assert engine.decoding_next() == 3


def test_the_line_is_those_that_were_never_admitted() -> None:
    """`newest` gives the last that came, in order; who got a chunk of the budget is in line no more."""
    engine = VirtualEngine(KNOBS)
    one, two, three = plain(5, 200, family=1), plain(5, 100, family=2), plain(5, 100, family=3)
    engine.submit([one], 0.0)
    assert (engine.submitted, engine.newest(1)) == (1, [])
    engine.submit([two], 0.0)
    engine.advance(STEP)
    engine.submit([three], STEP)
    assert engine.submitted == 3
    assert engine.newest(3) == engine.newest(2) == [two, three]
    assert engine.newest(1) == [three]
    assert engine.newest(0) == []


def test_who_has_begun_has_more_to_prefill_than_the_step_in_progress_does() -> None:
    """At most one sequence is in the midst of its prefill, and none once its last chunk is on the way."""
    engine, one = VirtualEngine(KNOBS), plain(5, 150, family=1)
    engine.submit([one], 0.0)
    engine.submit([plain(5, 100, family=2)], 0.0)
    seen = []
    for step in range(1, 4):
        seen.append([(one.prompt_tokens, one.computed + one.chunk) for one in engine.begun()])
        engine.advance(step * STEP)
    assert seen == [[(150, 64)], [(150, 128)], [(100, 42)]]


def test_who_was_preempted_begins_again_before_the_line() -> None:
    """It waits without blocks, in front of those that were never admitted."""
    engine = VirtualEngine(replace(KNOBS, blocks=5, token_budget=2048))
    first, second, late = plain(40, 16, family=1), plain(40, 16, family=2), plain(1, 16, family=3)
    engine.submit([first, second], 0.0)
    now = 0.0
    while not engine.preemptions:
        now += STEP
        engine.advance(now)
    engine.submit([late], now)
    assert engine.begun() == [second]
    assert second.blocks == []
    assert engine.newest(engine.submitted) == [late]

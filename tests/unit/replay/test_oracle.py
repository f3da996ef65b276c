"""The oracle knows the engines' caches, lines and answers to come, and its outlook is what comes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.replay.oracle import Oracle, Outlook
from extproc.replay.rows import Row
from extproc.sim.sequence import Sequence as Job
from extproc.sim.settings import EngineSettings
from extproc.sim.virtual import VirtualEngine

SIZE = 64
ENGINE = EngineSettings(block_size=SIZE, blocks=1537)


def row(prompt: int, *, family: int = 0, shared: int = 0, output: int = 1, own: int = 0) -> Row:
    """A row whose first `shared` blocks are those of its family; the others are those of `own`."""
    return Row(0.0, -1, prompt, output, hashes(prompt, family, shared, own))


def hashes(prompt: int, family: int, shared: int, own: int) -> list[int]:
    """Chained block hashes of such a prompt."""
    return [1000 * family + n if n < shared else (own + 1) << 32 | n for n in range(prompt // SIZE)]


def send(engine: VirtualEngine, one: Row, now: float = 0.0) -> Job:
    """Submit a row's sequence."""
    job = Job(one.prompt_tokens, one.output_tokens, one.blocks)
    engine.advance(now)
    engine.submit([job], now)
    return job


def settle(engine: VirtualEngine) -> float:
    """Run an engine until it is idle; returns when that was."""
    at = 0.0
    while engine.next_event is not None:
        at = engine.next_event
        engine.advance(at)
    return at


def first_token(engine: VirtualEngine, job: Job) -> float:
    """Run an engine until a sequence has its first token; returns when that was."""
    while not job.first_token_at:
        assert engine.next_event is not None
        engine.advance(engine.next_event)
    return job.first_token_at


def fleet(count: int = 3) -> list[VirtualEngine]:
    """Engines that are idle at 10 s, with nothing in their caches."""
    engines = [VirtualEngine(ENGINE) for _ in range(count)]
    for engine in engines:
        engine.advance(10.0)
    return engines


def chosen(engines: Sequence[VirtualEngine], one: Row) -> int:
    """Which engine the oracle picks for a row."""
    return Oracle(engines).choose(one, 10.0).engine


def test_the_engine_with_the_longest_cached_prefix_wins_when_all_are_idle() -> None:
    """What one has cached, it need not compute."""
    engines = fleet()
    for at, shared in enumerate([10, 40, 20]):
        send(engines[at], row(shared * SIZE + 1, family=7, shared=shared))
        settle(engines[at])
        engines[at].advance(10.0)
    assert chosen(engines, row(3000, family=7, shared=46, own=5)) == 1


def test_a_cached_prefix_is_left_behind_a_line_that_takes_longer() -> None:
    """An idle engine that computes everything is sooner than one that has it all after 20,000 other tokens."""
    engines = fleet(2)
    send(engines[0], row(2000, family=1, shared=31))
    settle(engines[0])
    for own in range(4):
        send(engines[0], row(5000, own=10 + own), 10.0)
    assert chosen(engines, row(2000, family=1, shared=31, own=1)) == 1
    # Behind a short line it is the other way round.
    short = fleet(2)
    send(short[0], row(2000, family=1, shared=31))
    settle(short[0])
    send(short[0], row(300, own=10), 10.0)
    assert chosen(short, row(2000, family=1, shared=31, own=1)) == 0


def test_what_the_line_is_about_to_compute_counts_as_cached() -> None:
    """The second question behind a prefix follows the first one, which has not been prefilled yet, and is right."""
    engines = fleet(2)
    for at in (0, 1):
        send(engines[at], row(2048, own=10 + at), 10.0)
    send(engines[1], row(1900, family=1, shared=29, own=1), 10.0)
    again = row(1900, family=1, shared=29, own=2)
    outlooks = [Outlook(engine).ms(again) for engine in engines]
    assert chosen(engines, again) == 0
    for engine, outlook in zip(engines, outlooks, strict=True):
        came = first_token(engine, send(engine, again, 10.0)) - 10.0
        assert 1000 * came == pytest.approx(outlook, rel=0.01)
    # 1,900 tokens alone, or 44 behind the 1,900 that the other computes, at 20 tokens a ms.
    assert outlooks[1] - outlooks[0] == pytest.approx(44 / 20, abs=0.1)


def test_what_a_prefill_in_its_midst_will_have_computed_counts_as_cached() -> None:
    """Of a long prompt whose first chunk is being computed, the row behind it finds the other chunks too."""
    engine = VirtualEngine(ENGINE)
    send(engine, row(9000, family=1, shared=140, own=1))
    engine.advance(0.05)
    again = row(9000, family=1, shared=139, own=2)
    outlook = Outlook(engine).ms(again)
    # 9,000 tokens and the 104 behind the shared ones, at 20 tokens a ms; both prompts apart would take twice as long.
    assert outlook == pytest.approx(9104 / 20 - 50, abs=5)
    assert outlook == pytest.approx(1000 * (first_token(engine, send(engine, again, 0.05)) - 0.05), rel=0.01)


def test_equal_outlooks_go_to_whom_has_fewer_sequences() -> None:
    """A first token comes as soon beside three decoding sequences as beside one; the rest of the answer does not."""
    quick = replace(ENGINE, blocks=20_000, step_s=0.0001, per_seq_s=0.000001)
    engines = [VirtualEngine(quick) for _ in range(3)]
    for at, many in enumerate([3, 2, 1]):
        for own in range(many):
            send(engines[at], row(64, own=own, output=10_000))
        engines[at].advance(0.2)
        assert engines[at].decoding_next() == many
    assert chosen(engines, row(4000, own=99)) == 2


def test_regret_is_how_much_sooner_the_best_engine_would_have_been() -> None:
    """None for the best one, and the difference of the outlooks for any other."""
    engines = fleet(2)
    send(engines[0], row(4000, family=1, shared=62))
    settle(engines[0])
    engines[0].advance(10.0)
    one = row(4000, family=1, shared=62, own=1)
    oracle = Oracle(engines)
    assert oracle.regret_ms(one, 0) == 0.0
    # 4,000 tokens less 32 take four steps of the budget's length at 20 tokens a ms, or one short one.
    assert oracle.regret_ms(one, 1) == pytest.approx(4000 / 20 - 6.1, abs=0.2)


@given(
    loads=st.lists(st.integers(0, 9000), min_size=3, max_size=6), picked=st.integers(0, 2), shared=st.integers(0, 60)
)
def test_regret_is_against_the_least_outlook_of_all(loads: list[int], picked: int, shared: int) -> None:
    """Engines that cannot be the best are not looked at in full; that changes no figure."""
    engines = fleet(len(loads))
    for own, (engine, tokens) in enumerate(zip(engines, loads, strict=True)):
        if tokens:
            send(engine, row(tokens, family=1, shared=shared, own=own), 10.0)
            send(engine, row(300, own=own), 10.0)
    one = row(5000, family=1, shared=60, own=99)
    outlooks = [Outlook(engine).ms(one) for engine in engines]
    assert Oracle(engines).regret_ms(one, picked) == outlooks[picked] - min(outlooks)
    assert outlooks[Oracle(engines).choose(one, 10.0).engine] <= min(outlooks) + 0.5


def test_a_row_that_finds_no_room_waits_for_answers_that_end() -> None:
    """Its outlook is when enough blocks are free, not when its turn to prefill would be."""
    engine = VirtualEngine(replace(ENGINE, blocks=33))
    long = send(engine, row(1024, own=1, output=400))
    first_token(engine, long)
    late = row(1024, own=2)
    outlook = Outlook(engine).ms(late)
    came = first_token(engine, send(engine, late, long.first_token_at)) - long.first_token_at
    assert came > 399 * 0.006
    assert outlook == pytest.approx(1000 * came, rel=0.02)


JOBS: st.SearchStrategy[list[dict[str, Any]]] = st.lists(
    st.builds(
        dict,
        gap=st.one_of(st.just(0.0), st.floats(0.0, 0.4)),
        prompt=st.integers(1, 6000),
        output=st.integers(1, 300),
        family=st.integers(0, 4),
        shared=st.integers(0, 90),
        looked=st.booleans(),
    ),
    max_size=25,
)


@given(before=JOBS, wait=st.floats(0.0, 0.3), prompt=st.integers(1, 9000), family=st.integers(0, 4))
def test_the_outlook_is_the_time_to_the_first_token_when_nothing_else_arrives(
    before: list[dict[str, Any]], wait: float, prompt: int, family: int
) -> None:
    """On random states of an engine with room: within 2 % and two steps, whether or not it was looked at before."""
    engine = VirtualEngine(replace(ENGINE, blocks=20_000))
    outlook = Outlook(engine)
    now = 0.0
    for number, one in enumerate(before):
        now += one["gap"]
        engine.advance(now)
        came = row(one["prompt"], family=one["family"], shared=one["shared"], output=one["output"], own=number)
        if one["looked"]:
            outlook.ms(came)
        send(engine, came, now)
    now += wait
    engine.advance(now)
    asked = row(prompt, family=family, shared=60, own=1000)
    seen = outlook.ms(asked)
    real_ms = 1000 * (first_token(engine, send(engine, asked, now)) - now)
    assert seen == pytest.approx(real_ms, rel=0.02, abs=20.0)

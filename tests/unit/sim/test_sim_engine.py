"""The engine core: what a step costs, who gets the budget, what is found in the cache."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.sim.engine import Engine
from extproc.sim.sequence import Sequence
from extproc.sim.settings import EngineSettings
from extproc.sim.tokens import block_hashes

FAST = EngineSettings(blocks=2001)


def sequence(family: int, prompt: int, answer: int = 1) -> Sequence:
    """A sequence whose tokens are all of one `family`: two of a family share the prefix of the shorter."""
    hashes = block_hashes(family.to_bytes(4, "little") * (prompt + answer), 16)
    return Sequence(prompt, answer, hashes)


def run(engine: Engine, *sequences: Sequence, now: float = 0.0) -> float:
    """Submit `sequences` together and run until the engine is idle; return when that is."""
    engine.submit(sequences, now)
    while engine.next_event is not None:
        now = engine.next_event
        engine.advance(now)
    return now


def test_a_lone_prefill_takes_its_tokens_over_the_rate() -> None:
    """2,000 uncached tokens at 20,000 a second: 0.1 s to the first token."""
    one = sequence(1, 2000)
    run(Engine(FAST), one)
    assert one.first_token_at == pytest.approx(0.1)


def test_a_prefill_longer_than_the_budget_takes_several_steps_and_no_longer() -> None:
    """Chunks of 2,048 tokens; the sum of the steps is the tokens over the rate."""
    engine, one = Engine(FAST), sequence(1, 6000)
    run(engine, one)
    assert engine.stats.steps == 3
    assert one.first_token_at == pytest.approx(0.3)


def test_decode_slows_with_the_batch() -> None:
    """A step without prefill lasts step_s + per_seq_s x batch."""
    for batch in (1, 10):
        ones = [sequence(n, 16, 11) for n in range(batch)]
        run(Engine(FAST), *ones)
        decode = ones[0].finished_at - ones[0].first_token_at
        assert decode == pytest.approx(10 * (0.006 + 0.0001 * batch))


def test_a_decode_beside_a_prefill_waits_for_the_chunk() -> None:
    """One budget: the decode takes one token of it first, the prefill the rest, and the step lasts for all."""
    engine = Engine(FAST)
    decoding, prompt = sequence(1, 16, 100), sequence(2, 5000)
    engine.submit([decoding], 0.0)
    first = engine.next_event
    assert first is not None
    engine.advance(first)
    engine.submit([prompt], first)
    second = engine.next_event
    assert second is not None
    engine.advance(second)
    assert prompt.chunk == 2047
    assert engine.next_event == pytest.approx(second + 2048 / 20_000)


def test_waiting_sequences_are_served_first_come_first_served() -> None:
    """Two prompts of 3,000 share the budget in order: the second gets what the first leaves over."""
    one, two = sequence(1, 3000), sequence(2, 3000)
    run(Engine(FAST), one, two)
    assert one.first_token_at == pytest.approx(2 * 2048 / 20_000)
    assert two.first_token_at == pytest.approx(6000 / 20_000, abs=0.007)


def test_the_batch_holds_at_most_max_num_seqs() -> None:
    """The third waits until one of the two has finished."""
    engine = Engine(replace(FAST, max_num_seqs=2))
    ones = [sequence(n, 16, 5) for n in range(3)]
    run(engine, *ones)
    assert ones[2].admitted_at == ones[0].finished_at


@pytest.mark.parametrize(("prompt", "cached"), [(16, 0), (17, 16), (32, 16), (33, 32), (128, 112), (129, 128)])
def test_a_repeated_prompt_hits_all_but_its_last_token_in_whole_blocks(prompt: int, cached: int) -> None:
    """floor((n - 1) / block) x block, as measured on vLLM."""
    engine = Engine(FAST)
    run(engine, sequence(1, prompt))
    again = sequence(1, prompt)
    run(engine, again, now=1.0)
    assert again.cached_tokens == cached
    assert (engine.stats.prefix_queries, engine.stats.prefix_hits) == (2 * prompt, cached)


def test_generated_tokens_are_cached() -> None:
    """A next turn finds prompt and answer; the answer's last token was never computed."""
    engine = Engine(FAST)
    run(engine, sequence(1, 100, 61))
    following = sequence(1, 200)
    run(engine, following, now=10.0)
    assert following.cached_tokens == 160


def test_a_prompt_is_found_by_another_of_the_same_step() -> None:
    """Blocks are findable from the step that computes them on: the second of two equal prompts computes one token."""
    engine = Engine(FAST)
    one, two = sequence(1, 161), sequence(1, 161)
    run(engine, one, two)
    assert (one.cached_tokens, two.cached_tokens) == (0, 160)
    assert engine.stats.steps == 1


def test_the_newest_sequence_is_preempted_and_computed_again() -> None:
    """When decodes run out of blocks the last admitted gives its own back, waits, and still gets its whole answer."""
    engine = Engine(EngineSettings(blocks=13))
    one, two = sequence(1, 80, 60), sequence(2, 80, 60)
    run(engine, one, two)
    assert engine.stats.preemptions == 1
    assert (one.preemptions, two.preemptions) == (0, 1)
    assert (one.produced, two.produced) == (60, 60)
    assert two.finished_at > one.finished_at
    assert engine.stats.prefix_queries == 160
    assert engine.pool.free == 12


def test_a_preempted_sequence_goes_before_those_that_wait() -> None:
    """It came first, so it is the next to run again."""
    engine = Engine(EngineSettings(blocks=13, max_num_seqs=2))
    ones = [sequence(n, 80, 60) for n in range(3)]
    run(engine, *ones)
    assert ones[1].preemptions == 1
    assert ones[1].finished_at < ones[2].finished_at
    assert ones[2].admitted_at >= ones[0].finished_at


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    """reserve_full_prompt: not only the first chunk must fit."""
    engine = Engine(EngineSettings(blocks=257, token_budget=512))
    one, two = sequence(1, 2048, 200), sequence(2, 2048)
    run(engine, one, two)
    assert two.admitted_at == one.finished_at
    assert engine.stats.preemptions == 0


def test_an_abort_takes_effect_when_the_step_ends() -> None:
    """Blocks come back and the gauges fall at the end of the step in progress, running or waiting."""
    engine = Engine(FAST)
    running, waiting = sequence(1, 5000, 50), sequence(2, 5000, 50)
    engine.submit([running, waiting], 0.0)
    engine.advance(2048 / 20_000)
    assert (engine.stats.running, engine.stats.waiting) == (1, 1)
    engine.abort(running, 0.11)
    engine.abort(waiting, 0.11)
    assert engine.pool.free < engine.pool.usable
    engine.advance(0.3)
    assert engine.next_event is None
    assert (engine.stats.running, engine.stats.waiting) == (0, 0)
    assert engine.pool.free == engine.pool.usable
    assert running.finished == waiting.finished == "abort"


def test_gauges_are_stale_while_a_step_runs() -> None:
    """As measured on vLLM: an arrival shows only when the step after it has ended."""
    engine = Engine(FAST)
    engine.submit([sequence(1, 6000), sequence(2, 500)], 0.0)
    assert (engine.stats.running, engine.stats.waiting) == (0, 0)
    engine.submit([sequence(3, 500)], 0.05)
    engine.advance(2048 / 20_000)
    assert (engine.stats.running, engine.stats.waiting) == (1, 1)
    engine.advance(2 * 2048 / 20_000)
    assert (engine.stats.running, engine.stats.waiting) == (1, 2)


def test_a_pooling_request_ends_with_its_prefill() -> None:
    """No token is generated."""
    engine, one = Engine(FAST), sequence(1, 1000, 0)
    run(engine, one)
    assert (one.finished, one.produced) == ("length", 0)
    assert one.finished_at == pytest.approx(0.05)


def test_a_slow_engine_is_slower_by_its_factor() -> None:
    """The fault knob stretches every step."""
    engine, one = Engine(FAST), sequence(1, 2000)
    engine.slowdown = 3.0
    run(engine, one)
    assert one.first_token_at == pytest.approx(0.3)


def test_an_unstreamed_sequence_is_reported_once() -> None:
    """Only its end is news, so a whole answer costs no work a token."""
    engine, one = Engine(FAST), sequence(1, 16, 5)
    one.streamed = False
    engine.submit([one], 0.0)
    reports = []
    while engine.next_event is not None:
        reports += engine.advance(engine.next_event)
    assert reports == [one]


@pytest.mark.parametrize("field", ["block_size", "token_budget", "max_num_seqs", "prefill_tokens_per_s"])
def test_settings_without_which_no_engine_runs_are_refused(field: str) -> None:
    """A zero is named."""
    values: dict[str, Any] = {field: 0}
    with pytest.raises(ValueError, match=field):
        replace(FAST, **values)


def test_a_context_longer_than_the_cache_is_refused() -> None:
    """Else such a prompt would wait for ever."""
    with pytest.raises(ValueError, match="raise blocks"):
        EngineSettings(blocks=11, max_model_len=161)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 3), st.integers(1, 200), st.integers(0, 40)),
        st.tuples(st.just("abort"), st.integers(0, 99), st.just(0), st.just(0)),
        st.tuples(st.just("pass"), st.integers(0, 60), st.just(0), st.just(0)),
    ),
    max_size=40,
)


def check_conserved(engine: Engine, ones: list[Sequence]) -> None:
    """Every usable block is either free or held, by as many sequences as its count says."""
    held = Counter(block for one in ones for block in one.blocks)
    free = engine.pool.free_order()
    assert len(free) == len(set(free))
    assert not set(free) & set(held)
    assert len(free) + len(held) == engine.pool.usable
    for block in range(1, engine.pool.usable + 1):
        assert engine.pool.references(block) == held[block]


@settings(deadline=None)
@given(OPERATIONS)
def test_blocks_are_conserved(operations: list[tuple[str, int, int, int]]) -> None:
    """Whatever is submitted, aborted and stepped in a small cache: no block is lost or lent twice, all ends well."""
    engine = Engine(EngineSettings(blocks=17, token_budget=64, max_num_seqs=4))
    ones: list[Sequence] = []
    now = 0.0
    for kind, first, prompt, answer in operations:
        if kind == "submit":
            ones.append(sequence(first, prompt, answer))
            engine.submit(ones[-1:], now)
        elif kind == "abort" and ones:
            engine.abort(ones[first % len(ones)], now)
        elif kind == "pass":
            now += first / 1000
            engine.advance(now)
        check_conserved(engine, ones)
    while engine.next_event is not None:
        engine.advance(engine.next_event)
        check_conserved(engine, ones)
    assert engine.pool.free == engine.pool.usable
    for one in ones:
        assert one.aborted if one.finished == "abort" else one.produced == one.answer_tokens
    assert engine.live == 0

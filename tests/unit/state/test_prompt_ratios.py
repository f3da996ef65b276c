"""Bytes a token of single prompts: found again by the prompts that begin like them, and bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.state.feed import Answered, Measured, pack
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.learn import PromptRatios, marks


def fed(*prompts: tuple[list[int], float], limit: int = 1000) -> PromptRatios:
    """Ratios after these prompts (blocks, bytes a token) were answered."""
    ratios = PromptRatios(limit)
    for blocks, ratio in prompts:
        ratios.observe(marks(blocks), ratio)
    return ratios


def test_a_later_turn_finds_the_ratio_of_its_last_turn() -> None:
    """The longest answered prompt that this one extends counts, not the shorter ones before it."""
    assert fed(([1, 2, 3], 2.0), ([1, 2, 3, 4, 5], 2.5)).of([1, 2, 3, 4, 5, 6, 7]) == 2.5


def test_a_prompt_that_shares_a_beginning_finds_it() -> None:
    """Of a common beginning of six blocks, the fourth carries the ratio of the last answer that went through it."""
    assert fed(([1, 2, 3, 4, 5, 6, 70, 71], 2.0), ([1, 8, 9], 3.0)).of([1, 2, 3, 4, 5, 6, 80]) == 2.0


@pytest.mark.parametrize("blocks", [[], [9, 2, 3]])
def test_a_prompt_like_no_other_has_no_ratio(blocks: list[int]) -> None:
    """Without blocks, or with a beginning never seen, there is none."""
    assert fed(([1, 2, 3], 2.0)).of(blocks) is None


@pytest.mark.parametrize(("prompt_bytes", "prompt_tokens"), [(-1, 10), (100, -1), (0, 0)])
def test_unknown_lengths_teach_nothing(prompt_bytes: float, prompt_tokens: float) -> None:
    """-1 and 0 mean that nothing was told."""
    known = PoolKnowledge(Priors())
    known.decided("c", "a", [1, 2])
    assert not known.apply(Answered("c", "a", -1, -1, prompt_bytes, prompt_tokens))
    assert known.bytes_per_token_of([1, 2]) == known.bytes_per_token


def test_other_replicas_are_told_the_ratio() -> None:
    """The owner of the charge alone knows the blocks: what it tells makes another replica predict alike."""
    known, other = PoolKnowledge(Priors()), PoolKnowledge(Priors())
    known.decided("c", "a", [1, 2, 3])
    told = known.apply(Answered("c", "a", -1, -1, prompt_bytes=600, prompt_tokens=300))
    assert told == [Measured(pack([1, 2, 3]), 2.0)]
    assert not [correction for delta in told for correction in other.apply(delta)]
    assert other.bytes_per_token_of([1, 2, 3, 4]) == 2.0


def test_a_ratio_no_text_can_have_is_passed_over() -> None:
    """A broken usage cannot make a prompt look empty or endless: what was known before stays."""
    assert fed(([1], 1e6), ([2], 1e-6)).of([1]) is None
    assert fed(([1], 3.0), ([1], 1e6)).of([1]) == 3.0


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True), max_size=40), st.integers(1, 20))
def test_any_order_of_prompts_stays_bounded_and_answers(prompts: list[list[int]], limit: int) -> None:
    """Whatever was answered and forgotten, the bound holds and each prompt gets a ratio or None."""
    ratios = fed(*((blocks, 2.0) for blocks in prompts), limit=limit)
    assert len(ratios) <= limit
    assert all(ratios.of(blocks) in {None, 2.0} for blocks in prompts)


def test_matched_tokens_follow_the_ratio_of_the_conversation() -> None:
    """Two blocks of 256 bytes at 2 bytes a token are 256 tokens, whatever the pool's mean is."""
    known = PoolKnowledge(Priors())
    known.decided("c", "a", [1, 2])
    known.apply(Answered("c", "a", -1, -1, prompt_bytes=600, prompt_tokens=300))
    assert known.matched_tokens([1, 2, 3]) == {"a": 256.0}
    assert known.bytes_per_token_of([1, 2, 3]) == 2.0
    assert known.bytes_per_token_of([7]) == known.bytes_per_token > 3.5

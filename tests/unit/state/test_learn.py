"""Estimators of prompts: bytes a token, tokens of an answer."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.state.learn import PRIOR_OUTPUT, OutputLengths, PromptRatios, TokenEstimator, marks


class TestTokens:
    """Prompt bytes a token."""

    def test_the_ratio_follows_usage(self) -> None:
        """A hundred answers at 3.2 bytes a token move the estimate from 4 to within 2 %."""
        estimator = TokenEstimator(4.0)
        for _ in range(100):
            estimator.observe(3200, 1000)
        assert estimator.bytes_per_token == pytest.approx(3.2, rel=0.02)

    def test_unknown_and_empty_answers_change_nothing(self) -> None:
        """-1 and 0 mean that nothing was told."""
        estimator = TokenEstimator(4.0)
        estimator.observe(-1, 10)
        estimator.observe(100, -1)
        estimator.observe(0, 0)
        assert estimator.bytes_per_token == 4.0

    @pytest.mark.parametrize("tokens", [1e18, 1.0, math.inf, math.nan])
    def test_a_usage_that_no_text_can_have_changes_nothing(self, tokens: float) -> None:
        """One engine that reports nonsense once must not shrink every profile of the pool for hundreds of answers."""
        estimator = TokenEstimator(4.0)
        estimator.observe(4000, tokens)
        assert estimator.bytes_per_token == 4.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0])
def test_a_prompts_ratio_stays_a_number_whatever_the_feed_holds(bad: float) -> None:
    """A ratio that is no number would make every prediction of a prompt one."""
    ratios = PromptRatios()
    ratios.observe([1], bad)
    assert ratios.of([1]) is None


class TestOutputs:
    """Tokens expected of an answer."""

    @pytest.mark.parametrize(("max_tokens", "expected"), [(None, 256.0), (1000, 256.0), (16, 16.0), (0, 0.0)])
    def test_before_any_answer_a_client_is_taken_at_its_word(self, max_tokens: int | None, expected: float) -> None:
        """256 tokens, or what the client allows when that is less."""
        assert OutputLengths().expected([1, 2], max_tokens) == expected

    def test_prompts_that_begin_alike_get_answers_alike(self) -> None:
        """After four answers a beginning has its own mean; other prompts get the pool's."""
        outputs = OutputLengths()
        for number in range(4):
            outputs.observe_at(marks([1, 2, 3, 10 + number]), 20.0)
            outputs.observe(20.0)
        assert outputs.expected([1, 2, 3, 99], None) == 20.0
        assert 20.0 < outputs.expected([7], None) < PRIOR_OUTPUT

    def test_one_answer_says_little_of_the_next(self) -> None:
        """The long beginning was answered once, with an outlier; the shorter one often."""
        outputs = OutputLengths()
        for _ in range(8):
            outputs.observe_at(marks([1]), 50.0)
        outputs.observe_at([2], 4000.0)
        assert outputs.expected([1, 2], None) == 50.0

    def test_the_pool_follows_its_answers(self) -> None:
        """Three hundred answers of 1,000 tokens leave little of the prior."""
        outputs = OutputLengths()
        for _ in range(300):
            outputs.observe(1000.0)
        assert outputs.expected([], None) == pytest.approx(1000.0, rel=0.05)

    @given(
        st.lists(st.tuples(st.lists(st.integers(1, 40), max_size=12), st.floats()), max_size=60),
        st.integers(0, 500) | st.none(),
    )
    def test_any_answers_leave_a_number_within_its_bounds(
        self, answers: list[tuple[list[int], float]], max_tokens: int | None
    ) -> None:
        """Whatever was reported, at most the limit of blocks is kept, and the charge is finite and never too high."""
        outputs = OutputLengths(limit=10)
        for blocks, tokens in answers:
            outputs.observe(tokens)
            outputs.observe_at(marks(blocks), tokens)
        assert len(outputs) <= 10
        for blocks, _ in answers:
            assert 0.0 <= outputs.expected(blocks, max_tokens) < math.inf
            assert max_tokens is None or outputs.expected(blocks, max_tokens) <= max_tokens


def test_an_absurd_answer_length_is_not_remembered() -> None:
    """One broken usage would weigh on every charge of the pool for hours: it is passed over."""
    lengths = OutputLengths()
    for _ in range(100):
        lengths.observe(100.0)
        lengths.observe_at([1], 100.0)
    before = lengths.expected([], None), lengths.expected([1], None)
    lengths.observe(1.8e19)
    lengths.observe_at([1], 1.8e19)
    assert (lengths.expected([], None), lengths.expected([1], None)) == before

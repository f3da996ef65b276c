"""Tokens counted from bytes: exact where the frame is regular, unknown where nothing is known."""

import random

import pytest

from extproc.answer_sizes import AnswerSizes

STREAM = ("main", "chat", True)


def taught(*answers: tuple[int, int]) -> AnswerSizes:
    """Sizes after these answers, each of (tokens, bytes)."""
    sizes = AnswerSizes()
    for tokens, size in answers:
        sizes.learn(STREAM, size, tokens)
    return sizes


def test_a_frame_and_an_event_a_token_are_told_apart() -> None:
    """700 bytes around an answer and 230 a token, learnt from answers of 10 to 100 tokens, hold for one of 1,000."""
    sizes = taught(*((tokens, 700 + 230 * tokens) for tokens in range(10, 100, 7)))
    for tokens in (1, 10, 64, 1000):
        assert sizes.tokens(STREAM, 700 + 230 * tokens) == pytest.approx(tokens, abs=0.01)


def test_texts_of_different_length_come_out_on_average() -> None:
    """Tokens of 1 to 12 bytes: answers of 200 tokens are counted within a tenth."""
    rng = random.Random(3)
    lengths = [sum(rng.randint(1, 12) for _ in range(200)) for _ in range(20)]
    sizes = taught(*((n, 700 + 230 * n + sum(rng.randint(1, 12) for _ in range(n))) for n in range(20, 400, 9)))
    assert all(sizes.tokens(STREAM, 700 + 230 * 200 + length) == pytest.approx(200, rel=0.1) for length in lengths)


def test_answers_of_one_length_give_their_mean() -> None:
    """No line can be laid through one point."""
    assert taught(*[(50, 12_000)] * 20).tokens(STREAM, 24_000) == pytest.approx(100)


def test_answers_of_nearly_one_length_show_no_line() -> None:
    """Two points close together would point anywhere: 10 bytes a token here, where 240 are right."""
    sizes = taught(*[(49, 12_000), (51, 12_020)] * 20)
    assert sizes.tokens(STREAM, 24_000) == pytest.approx(100, rel=0.01)


def test_a_line_that_falls_is_not_believed() -> None:
    """Longer answers with fewer bytes are noise; no answer then has fewer than no tokens."""
    sizes = taught(*((tokens, 20_000 - 100 * tokens) for tokens in range(10, 100, 5)))
    assert sizes.tokens(STREAM, 1) >= 0.0
    assert sizes.tokens(STREAM, 20_000) > sizes.tokens(STREAM, 10_000)


def test_fewer_bytes_than_the_frame_are_no_tokens() -> None:
    """A stream that ended at once."""
    assert taught(*((tokens, 700 + 230 * tokens) for tokens in range(10, 100, 7))).tokens(STREAM, 200) == 0.0


def test_what_was_not_seen_often_enough_is_unknown() -> None:
    """Seven answers are too few, of another form even many."""
    assert taught(*[(50, 12_000)] * 7).tokens(STREAM, 12_000) == -1.0
    sizes = taught(*[(50, 12_000)] * 8)
    assert sizes.tokens(STREAM, 12_000) > 0
    for other in (("main", "chat", False), ("main", "completion", True), ("second", "chat", True)):
        assert sizes.tokens(other, 12_000) == -1.0


@pytest.mark.parametrize(("tokens", "size"), [(0, 100), (-1, 100), (10, 0), (10, -1)])
def test_what_is_unknown_teaches_nothing(tokens: int, size: int) -> None:
    """Negative numbers stand for unknown ones."""
    assert taught(*[(tokens, size)] * 20).tokens(STREAM, 100) == -1.0
    assert taught(*[(50, 12_000)] * 20).tokens(STREAM, min(size, 0)) == -1.0


def test_a_change_of_the_frame_is_followed() -> None:
    """A new version of the engine writes longer events: some hundred answers later they are what counts."""
    sizes = taught(*((n % 90 + 10, 700 + 230 * (n % 90 + 10)) for n in range(300)))
    for n in range(700):
        tokens = n % 90 + 10
        sizes.learn(STREAM, 900 + 400 * tokens, tokens)
    assert sizes.tokens(STREAM, 900 + 400 * 50) == pytest.approx(50, rel=0.02)

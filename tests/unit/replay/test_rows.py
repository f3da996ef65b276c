"""The shared facts of a trace."""

import pytest

from extproc.replay.rows import Row, Trace, leading


def test_an_endless_cache_finds_leading_blocks_of_earlier_prompts_and_answers() -> None:
    """Cached is what earlier prompts and answers hold, up to the first block that is missing."""
    rows = [
        Row(0.0, -1, 8, 8, (1, 2), answer_blocks=(3, 4)),
        Row(0.0, 0, 17, 1, (1, 2, 3, 4)),
        Row(0.0, -1, 9, 1, (1, 9)),
        Row(0.0, -1, 9, 1, (7, 2)),
    ]
    assert Trace("t", 4, rows).ideal_cached_share == pytest.approx((0 + 16 + 4 + 0) / (8 + 17 + 9 + 9))


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    """A prompt that is wholly cached still counts one block less when it ends with that block."""
    whole, more = Row(0.0, -1, 8, 1, (1, 2)), Row(0.0, -1, 9, 1, (1, 2))
    assert Trace("t", 4, [whole, whole]).ideal_cached_share == pytest.approx(4 / 16)
    assert Trace("t", 4, [whole, more]).ideal_cached_share == pytest.approx(8 / 17)


def test_totals_count_every_answer() -> None:
    """A request for three answers generates three times its output."""
    trace = Trace("t", 4, [Row(0.0, -1, 8, 5, (1, 2), n=3), Row(1.0, -1, 3, 2, ())])
    assert (trace.requests, trace.prompt_tokens, trace.output_tokens) == (2, 11, 17)
    assert Trace("t", 4, []).ideal_cached_share == 0.0


def test_leading_blocks_end_at_the_first_unknown_one() -> None:
    """A block behind a gap is of no use to an engine."""
    assert leading((1, 2, 3), {1, 3}) == 1
    assert leading((1, 2), {1, 2}) == 2
    assert leading((), {1}) == 0

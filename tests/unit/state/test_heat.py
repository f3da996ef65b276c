"""How often a block is used, as a mean gap."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.state.heat import Heat


def used(*times: float, limit: int = 10) -> Heat:
    """Block 1, used at these times."""
    heat = Heat(limit)
    for now in times:
        heat.used(1, now)
    return heat


def test_a_block_that_was_used_once_has_no_gap_yet() -> None:
    """Nothing is known of how often what is new will be asked for; its second use tells the first gap."""
    assert Heat().gap_s(1, 5.0) == math.inf
    assert used(5.0).gap_s(1, 7.0) == 2.0


def test_the_gap_is_an_exponential_mean_that_follows_the_uses() -> None:
    """Gaps of 2 and 6 s give 2 + (6 - 2) / 4 = 3 s."""
    assert used(0.0, 2.0).gap_s(1, 8.0) == pytest.approx(3.0)


def test_what_was_hot_cools_down_while_it_is_not_asked_for() -> None:
    """A block used every tenth of a second is rare again when nobody used it for a minute."""
    heat = used(*(number / 10 for number in range(50)))
    assert heat.gap_s(1, 5.0) == pytest.approx(0.1)
    assert heat.gap_s(1, 65.0) > 10.0


def test_asking_changes_nothing() -> None:
    """What only explains a decision must not make its prefix hotter."""
    heat = used(0.0, 2.0)
    assert heat.gap_s(1, 8.0) == heat.gap_s(1, 8.0)


@given(st.lists(st.integers(0, 30), max_size=100))
def test_only_so_many_blocks_are_remembered_the_last_used_ones(blocks: list[int]) -> None:
    """The table is bounded, and gives up what was used longest ago."""
    heat = Heat(limit=5)
    for now, block in enumerate(blocks):
        heat.used(block, float(now))
    newest = list(dict.fromkeys(reversed(blocks)))[:5]
    assert len(heat) == len(newest)
    assert all(heat.gap_s(block, 1000.0) < math.inf for block in newest)


def test_news_of_an_older_use_change_nothing() -> None:
    """Others' uses are told later than they were: one before the last that is known is none of the gaps since."""
    heat = used(0.0, 10.0, 20.0)
    before = heat.gap_s(1, 30.0)
    heat.used(1, 12.0)
    assert heat.gap_s(1, 30.0) == before

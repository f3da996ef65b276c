"""How workers share a pool by what waits at each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.govern.shares import Demand, share_of


def parts(*demands: Demand, low_share: float = 0.1, **weights: float) -> list[float]:
    """Each worker's part."""
    return [share_of(mine, [each for each in demands if each is not mine], weights, low_share).part for mine in demands]


def test_one_that_waits_alone_has_all() -> None:
    """Others without a queue take no part; nor do queues without anything."""
    assert parts({(1, "a"): 5.0}, {}) == [1.0, 0.0]


def test_tenants_share_whichever_worker_they_reach() -> None:
    """A has a hundred times more than B, at another worker: both workers get half."""
    assert parts({(1, "a"): 10_000.0}, {(1, "b"): 100.0}) == [0.5, 0.5]


def test_a_tenants_part_is_split_by_where_it_waits() -> None:
    """A waits at both, three to one, B at the second only."""
    assert parts({(1, "a"): 300.0}, {(1, "a"): 100.0, (1, "b"): 50.0}) == pytest.approx([0.375, 0.625])


def test_weights_count() -> None:
    """Three to one."""
    assert parts({(1, "a"): 10.0}, {(1, "b"): 10.0}, a=3.0) == pytest.approx([0.75, 0.25])


def test_a_lower_class_elsewhere_keeps_its_share() -> None:
    """High at one worker, low at another: nine to one."""
    assert parts({(0, "a"): 10.0}, {(2, "b"): 10.0}) == pytest.approx([0.9, 0.1])


def test_weights_here_follow_where_tokens_wait() -> None:
    """A tenant of which a quarter waits here counts a quarter here."""
    share = share_of({(1, "a"): 100.0, (1, "b"): 5.0}, [{(1, "a"): 300.0}], {}, 0.1)
    assert share.scale == {"a": 0.25, "b": 1.0}


keys = st.tuples(st.integers(0, 2), st.sampled_from("abc"))


@given(st.lists(st.dictionaries(keys, st.floats(1, 1e6), min_size=1), min_size=1, max_size=5))
def test_parts_add_up(demands: list[dict[tuple[int, str], float]]) -> None:
    """All workers together have the whole pool, and nobody who waits has nothing."""
    found = parts(*demands)
    assert sum(found) == pytest.approx(1.0)
    assert min(found) > 0.0

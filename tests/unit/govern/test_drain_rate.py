"""How fast requests end, and what a refused client is told of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.govern.drain_rate import LEAST_S, MOST_S, DrainRate, retry_after_s


def rate_of(per_s: int, seconds: int) -> tuple[DrainRate, float]:
    """So many requests in each of these seconds, evenly; and the time at their end."""
    rate = DrainRate()
    for at in range(seconds * per_s):
        rate.note(100.0 + at / per_s)
    return rate, 100.0 + seconds


@pytest.mark.parametrize("seconds", [2, 5, 10, 60])
def test_a_steady_rate_is_measured(seconds: int) -> None:
    """Ten a second, however long that has gone on."""
    rate, now = rate_of(10, seconds)
    assert rate.per_s(now) == pytest.approx(10.0, rel=0.01)


def test_it_falls_when_requests_end_no_more() -> None:
    """Half the window later half is left, and after the window nothing."""
    rate, now = rate_of(10, 60)
    assert rate.per_s(now + 5.0) == pytest.approx(5.0, rel=0.1)
    assert rate.per_s(now + 11.0) == 0.0


def test_45_that_wait_at_10_a_second_are_5_seconds() -> None:
    """`Retry-After` is the queue by the drain rate, rounded up to whole seconds."""
    rate, now = rate_of(10, 10)
    assert retry_after_s(45, rate.per_s(now)) == 5


def test_it_is_clamped() -> None:
    """At least a second, at most thirty; the most where nothing ends, the least where nothing waits."""
    assert (retry_after_s(0.1, 100.0), retry_after_s(10_000, 1.0)) == (LEAST_S, MOST_S)
    assert (retry_after_s(3, 0.0), retry_after_s(0, 0.0)) == (MOST_S, LEAST_S)


@given(st.lists(st.floats(0, 100), max_size=200).map(sorted), st.floats(0, 30))
def test_it_never_counts_more_than_there_was(times: list[float], later: float) -> None:
    """Whatever the times, the rate is at least 0 and no more than all that was counted in a second."""
    rate = DrainRate()
    for at in times:
        rate.note(at)
    assert 0.0 <= rate.per_s((times[-1] if times else 0.0) + later) <= len(times)

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


def test_idle_time_counts_for_nothing() -> None:
    """Eight a second before an hour without work: the first refusal after it goes by these eight."""
    rate, now = rate_of(8, 20)
    rate.at_work(now, working=False)
    rate.at_work(now + 1800.0, working=False)
    assert rate.per_s(now + 3600.0) == pytest.approx(8.0, rel=0.01)
    rate.at_work(now + 3600.0, working=True)
    for part_s in (0.1, 0.5, 1.0):
        assert rate.retry_after_s(now + 3600.0 + part_s, 16.0) in (2, 3)


def test_work_that_was_short_is_not_spread_over_the_idle_time_around_it() -> None:
    """Eight in one second of work, a minute after the last: eight a second, not eight in ten."""
    rate = DrainRate()
    rate.note(100.0)
    rate.at_work(100.0, working=False)
    rate.at_work(160.0, working=True)
    for each in range(8):
        rate.note(160.0 + (each + 1) / 8)
    assert rate.per_s(161.0) == pytest.approx(8.0, rel=0.15)


def test_what_ends_elsewhere_tells_that_there_was_work() -> None:
    """An end heard of while this worker saw none of the pool's work: time counts again."""
    rate, now = rate_of(10, 10)
    rate.at_work(now, working=False)
    rate.note(now + 50.0)
    assert rate.per_s(now + 61.0) == 0.0


def test_before_anything_has_ended_it_may_take_as_long_again_as_it_has_taken() -> None:
    """No rate is known: a second at first, then as long as there has been work, thirty at most; idle time aside."""
    rate = DrainRate()
    assert rate.retry_after_s(100.0, 45.0) == LEAST_S
    rate.at_work(100.0, working=True)
    assert [rate.retry_after_s(100.0 + s, 45.0) for s in (0.2, 3.5, 500.0)] == [1, 4, MOST_S]
    rate.at_work(104.0, working=False)
    rate.at_work(900.0, working=True)
    assert rate.retry_after_s(900.5, 45.0) == 5
    rate.note(901.0)
    assert rate.retry_after_s(901.0, 45.0) == MOST_S


def test_an_engine_that_stands_still_with_work_is_the_longest() -> None:
    """Ends came once and come no more, though there is work."""
    rate, now = rate_of(10, 20)
    rate.at_work(now, working=True)
    assert rate.retry_after_s(now + 11.0, 45.0) == MOST_S


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

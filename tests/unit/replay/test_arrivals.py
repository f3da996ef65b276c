"""Arrivals: spreading keeps order and count, pace scales times, conversations merge in the order they are sent."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.replay.arrivals import expected, interleaved, paced, poisson, requests_per_s, seeded, spread
from extproc.replay.rows import Row, Trace


def row(at_s: float, after: int = -1, output: int = 10) -> Row:
    """Row of which only times matter."""
    return Row(at_s, after, 5, output, ())


def test_a_poisson_process_has_the_rate_and_the_gaps_it_should() -> None:
    """Count and spread of the gaps are those of an exponential distribution, within four sigma."""
    times = list(poisson(seeded("p", 1), 10.0, 400.0, start_s=3.0))
    assert times == sorted(times)
    assert times[0] > 3.0
    assert times[-1] < 403.0
    assert abs(len(times) - 4000) < 4 * math.sqrt(4000)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(mean, rel=0.1)


def test_requests_of_one_tick_are_spread_over_it() -> None:
    """The time until the next tick is shared out evenly, no longer than the tick, and who came alone stays."""
    assert spread([0.0, 0.0, 0.0, 3.0, 13.0, 13.0], 3.0) == [0.0, 1.0, 2.0, 3.0, 13.0, 14.5]
    assert spread([0.0, 0.0, 1.0], 3.0) == [0.0, 0.5, 1.0]
    assert spread([], 3.0) == []


@given(times=st.lists(st.integers(0, 20).map(float)).map(sorted), tick=st.sampled_from([0.0, 1.0, 3.0]))
def test_spreading_keeps_order_and_never_moves_a_request_earlier(times: list[float], tick: float) -> None:
    """Every arrival stays within its tick, in its place."""
    result = spread(times, tick)
    assert result == sorted(result)
    assert all(0 <= after - before < max(tick, 1e-9) for before, after in zip(times, result, strict=True))


def test_a_pace_of_two_halves_every_time() -> None:
    """Think times shrink with the arrivals unless asked not to; nothing else changes."""
    trace = Trace("t", 4, [row(2.0), row(3.0, after=0), row(4.0)])
    assert [one.at_s for one in paced(trace, 2).rows] == [1.0, 1.5, 2.0]
    assert [one.at_s for one in paced(trace, 2, think=False).rows] == [1.0, 3.0, 2.0]
    assert [one.after for one in paced(trace, 2).rows] == [-1, 0, -1]


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_a_pace_that_is_not_above_zero_is_refused(factor: float) -> None:
    """No pace stands still or runs backwards."""
    with pytest.raises(ValueError, match="above 0"):
        paced(Trace("t", 4, [row(1.0)]), factor)


def test_a_later_turn_is_sent_after_the_answer_and_the_think_time() -> None:
    """Expected times add arrival, answers and think times along the conversation."""
    rows = [row(1.0, output=100), row(2.0, after=0, output=50), row(0.5, after=1)]
    assert expected(rows, 0.01) == pytest.approx([1.0, 4.0, 5.0])
    assert requests_per_s(Trace("t", 4, rows), 0.01) == pytest.approx(3 / 5)
    assert requests_per_s(Trace("t", 4, []), 0.01) == 0.0


def test_conversations_are_merged_in_the_order_they_are_sent() -> None:
    """The list follows the expected times, and each later turn points at the one before it."""
    talks = [[row(0.0, output=100), row(3.0)], [row(1.0, output=100), row(0.5), row(9.0)]]
    rows = interleaved(talks, 0.01)
    sent = expected(rows, 0.01)
    assert sent == sorted(sent)
    assert [one.after for one in rows] == [-1, -1, 1, 0, 2]
    assert interleaved([], 0.01) == []

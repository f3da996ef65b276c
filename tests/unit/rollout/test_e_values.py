"""Bets are fair: they win nothing on average where labels are drawn by chance, and less where the canary is better."""

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.rollout.e_values import (
    RANK_BETS,
    RATE_BETS,
    events_log,
    log10_mixture,
    mean_product,
    rank_steps,
    ranks_log_mean,
    rate_log,
    upper_bound,
)


@given(st.lists(st.floats(0.1, 30.0), min_size=1, max_size=8), st.data())
def test_the_mean_of_products_is_that_of_all_choices(weights: list[float], data: st.DataObject) -> None:
    """The recurrence gives what listing every choice gives."""
    chosen = data.draw(st.integers(0, len(weights)))
    products = [math.prod(some) for some in combinations(weights, chosen)]
    assert mean_product(weights, chosen) == pytest.approx(sum(products) / len(products))


@pytest.mark.parametrize("odds", RATE_BETS)
@pytest.mark.parametrize(("group", "canary", "events"), [(7, 2, 3), (9, 4, 1), (9, 8, 8), (6, 1, 6)])
def test_bets_on_events_are_fair(group: int, canary: int, events: int, odds: float) -> None:
    """Over all assignments of the canary's labels to a group, what a bet leaves of 1 is 1 on average."""
    left = [
        math.exp(events_log(group, canary, events, sum(unit < events for unit in labels), odds))
        for labels in combinations(range(group), canary)
    ]
    assert sum(left) / len(left) == pytest.approx(1.0)


@pytest.mark.parametrize("bet", RANK_BETS)
@pytest.mark.parametrize("percentile", [1.0, 50.0, 90.0, 99.0])
@pytest.mark.parametrize(("group", "canary"), [(8, 1), (8, 3), (9, 8)])
def test_bets_on_ranks_are_fair(group: int, canary: int, percentile: float, bet: float) -> None:
    """The same of ranks."""
    steps, mean = rank_steps(group, percentile), ranks_log_mean(group, canary, percentile, bet)
    left = [math.exp(bet * sum(steps[rank] for rank in labels) - mean) for labels in combinations(range(group), canary)]
    assert sum(left) / len(left) == pytest.approx(1.0)


def test_ranks_count_the_more_the_greater_they_are_and_most_around_the_percentile() -> None:
    """No rank counts less than a lower one, so better canaries cannot fail; a tail's gate looks at the tail."""
    for percentile in (1.0, 10.0, 50.0, 90.0, 99.0):
        steps = rank_steps(200, percentile)
        assert list(steps) == sorted(steps)
        assert steps[0] < 0.5 < steps[-1]
    assert rank_steps(20, 90.0)[:16] == (0.0,) * 16
    assert rank_steps(20, 50.0)[9] == pytest.approx(0.475)


def test_great_groups_neither_overflow_nor_vanish() -> None:
    """The gates of the 1st and 99th percentiles rank 200 values, of which the canary may have nearly all."""
    for percentile in (1.0, 99.0):
        for canary in (1, 100, 199):
            assert math.isfinite(ranks_log_mean(200, canary, percentile, max(RANK_BETS)))
    assert events_log(100, 100, 100, 100, max(RATE_BETS)) == pytest.approx(0.0)


@given(st.integers(1, 60), st.data())
def test_a_rate_is_seldom_over_its_bound(risk: int, data: st.DataObject) -> None:
    """Whatever the rate, the chance of counts whose bound lies below it is no more than was asked for."""
    rate, chance = data.draw(st.floats(0.0, 1.0)), data.draw(st.sampled_from([0.2, 0.05, 0.001]))
    missed = sum(
        math.comb(risk, events) * rate**events * (1.0 - rate) ** (risk - events)
        for events in range(risk + 1)
        if upper_bound(events, risk, chance) < rate
    )
    assert missed <= chance * (1.0 + 1e-9)


def test_the_bound_comes_close_with_much_at_risk() -> None:
    """It is of use: 10 of 10,000 allow 0.35 % at the most, and nothing at risk allows everything."""
    assert 0.001 < upper_bound(10, 10_000, 1e-4) < 0.0035
    assert upper_bound(0, 0, 0.01) == 1.0


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.sampled_from(RATE_BETS))
def test_bets_against_a_rate_win_nothing_at_less(rate: float, part: float, odds: float) -> None:
    """One unit at risk, whose chance of an event is the rate or less, leaves 1 or less on average."""
    chance = rate * part
    left = chance * math.exp(rate_log(1, 1, rate, odds)) + (1.0 - chance) * math.exp(rate_log(0, 1, rate, odds))
    assert left <= 1.0 + 1e-9


def test_a_mixture_is_the_sum_of_its_shares() -> None:
    """Half at 100 and half at nothing is 50; logs that no float can hold are no trouble."""
    assert log10_mixture([(0.5, math.log(100.0)), (0.5, -1e9)]) == pytest.approx(math.log10(50.0))
    assert log10_mixture([(1.0, 5000.0)]) == pytest.approx(5000.0 / math.log(10.0))
    assert log10_mixture([]) == 0.0

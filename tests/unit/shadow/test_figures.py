"""What many results say together; golden numbers are computed here, by other means."""

import itertools
import random
import statistics

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.shadow.compare import Side, compared
from extproc.shadow.figures import Figures, figures, interval, share, spread
from extproc.shadow.result import Result
from tests.unit.shadow.parts import SETTINGS, result, text


def measured(primary: float, shadow: float, name: str = "r") -> Result:
    """A result whose answers took so long to begin."""
    one = result(name)
    ours, theirs = (msgspec.structs.replace(one.compared.primary, ttft_s=at) for at in (primary, shadow))
    return msgspec.structs.replace(one, compared=msgspec.structs.replace(one.compared, primary=ours, shadow=theirs))


def only(results: list[Result]) -> Figures:
    """The figures of one pair of versions."""
    (found,) = figures(results)
    return found


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_quantiles_are_those_between_neighbours(values: list[float]) -> None:
    """As Python's `statistics` has them by its inclusive method, whose median is the middle one."""
    found = spread(values)
    assert found is not None
    assert found.number == len(values)
    assert found.p50 == pytest.approx(statistics.median(values))
    if len(values) > 1:
        cuts = statistics.quantiles(values, n=10, method="inclusive")
        assert [found.p10, found.p90] == pytest.approx([cuts[0], cuts[-1]], abs=1e-6)


def test_nothing_has_no_quantiles() -> None:
    """Nor has what is not known."""
    assert spread([]) is None
    assert spread([None, None]) is None


@pytest.mark.parametrize(
    ("number", "of", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (0, 0, 0, 1)],
)
def test_a_share_has_its_interval(number: int, of: int, low: float, high: float) -> None:
    """Golden: Wilson's interval of 8 of 10 and of 0 of 10 at 95 %, from tables."""
    found = share(number, of)
    assert (found.number, found.of) == (number, of)
    assert [found.low, found.high] == pytest.approx([low, high], abs=5e-5)


def test_the_interval_of_a_ratio_is_that_of_pairs() -> None:
    """Pairs that differ greatly among one another but by the same factor have an interval of one point."""
    primary = np.array([1.0, 10.0, 100.0, 1000.0, 3.0, 7.0])
    assert [*interval(primary, primary * 1.25)] == pytest.approx([1.25, 1.25])


def test_the_interval_agrees_with_all_resamples() -> None:
    """Golden: of five pairs all 3,125 resamples can be listed, and their quantiles are those of the bootstrap."""
    primary, shadow = [1.0, 2.0, 4.0, 5.0, 9.0], [1.5, 1.0, 5.0, 7.0, 8.0]
    every = sorted(
        statistics.median(shadow[at] for at in drawn) / statistics.median(primary[at] for at in drawn)
        for drawn in itertools.product(range(5), repeat=5)
    )
    low, high = interval(np.array(primary), np.array(shadow))
    assert low == pytest.approx(every[int(0.025 * len(every))], abs=0.01)
    assert high == pytest.approx(every[int(0.975 * len(every))], abs=0.01)


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    """95 % of the time, of ratios that are known: within what 200 runs may show by chance (90 to 99 %)."""
    rng = random.Random(7)
    held = 0
    for _ in range(200):
        primary = [rng.lognormvariate(0.0, 0.5) for _ in range(60)]
        shadow = [1.2 * value * rng.lognormvariate(0.0, 0.2) for value in primary]
        low, high = interval(np.array(primary), np.array(shadow))
        assert low is not None
        assert high is not None
        held += low <= 1.2 <= high
    assert 180 <= held <= 198


def test_few_pairs_have_no_interval_and_nothing_no_ratio() -> None:
    """Four pairs say nothing; a median of 0 cannot be divided by."""
    found = only([measured(0.0, 1.0, f"{n}") for n in range(4)]).measures["ttft_s"]
    assert (found.number, found.ratio, found.low, found.high) == (4, None, None, None)
    assert interval(np.zeros(6), np.ones(6)) == (None, None)


def test_a_measure_is_of_pairs_that_both_have_it() -> None:
    """An answer in one piece has no time to its first token: its pair is left out there, and only there."""
    bare = msgspec.structs.replace(result("x").compared.primary, ttft_s=None)
    lone = msgspec.structs.replace(result("x"), compared=msgspec.structs.replace(result("x").compared, shadow=bare))
    found = only([*(measured(0.1 * n, 0.2 * n, f"{n}") for n in range(1, 6)), lone])
    ttft = found.measures["ttft_s"]
    assert (ttft.number, found.measures["duration_s"].number) == (5, 6)
    assert [ttft.primary.p50, ttft.shadow.p50, ttft.ratio] == pytest.approx([0.3, 0.6, 2.0])


def of(ours: str, theirs: str, name: str = "r") -> Result:
    """A result of two texts."""
    return result(name, compared=compared(text(ours), text(theirs), SETTINGS))


SORRY = "I must decline."


def test_everything_is_counted() -> None:
    """Outcomes, equal answers, and refusals either way; failed comparisons count as such and nowhere else."""
    failed = text("", flaw="cut")
    lost = result("l", compared=compared(text("a"), failed, SETTINGS))
    found = only([of("a", "a"), of("a", "b"), of(SORRY, "b"), of("a", SORRY), of(SORRY, SORRY), lost])
    assert (found.number, dict(found.outcomes)) == (6, {"compared": 5, "shadow_failed": 1})
    assert (found.exact.number, found.exact.of) == (2, 5)
    assert dict(found.refusals) == {"neither": 2, "both": 1, "primary": 1, "shadow": 1}
    assert (dict(found.flaws[0]), dict(found.flaws[1])) == ({}, {"cut": 1})
    assert dict(found.finishes[1]) == {"stop": 5}
    assert found.same_tools.of == 0


def test_the_worst_come_first_by_their_ids() -> None:
    """Ten at most, none that is exactly the same or was not compared; with excerpts where texts were kept."""
    many = [result(f"r{n:02}", similarity=n / 20) for n in range(1, 15)]
    answers = ("x" * 100 + "left" + "y" * 200, "x" * 100 + "right")
    kept = msgspec.structs.replace(
        of(*answers, "kept"), answers=answers, compared=compared(text(answers[0]), text(answers[1]), SETTINGS)
    )
    found = only([result("same", similarity=1.0), *reversed(many)])
    assert [one.id for one in found.worst] == [f"r{n:02}" for n in range(1, 11)]
    lost = result("lost", compared=compared(text("a"), text("", flaw="cut"), SETTINGS))
    assert [one.id for one in only([result("same", similarity=1.0), many[0], lost]).worst] == ["r01"]
    (worst,) = only([kept]).worst
    assert worst.differs_at == 100
    assert worst.excerpts == ("x" * 40 + "left" + "y" * 76, "x" * 40 + "right")


def test_pairs_of_versions_stand_apart() -> None:
    """A shadow whose version was changed has two sets of figures, the one with more results first."""
    other = [msgspec.structs.replace(result(f"o{n}"), shadow="v3") for n in range(3)]
    assert [(one.shadow, one.number) for one in figures([result("a"), *other])] == [("v3", 3), ("v2", 1)]
    assert figures([]) == []


def test_the_same_results_give_the_same_figures() -> None:
    """The resamples are drawn by a seed of their own."""
    rng = random.Random(3)
    results = [measured(rng.random(), rng.random(), f"{n}") for n in range(40)]
    assert figures(results) == figures(results)
    assert Side(status=200).ttft_s is None

"""The schedule of the chaos run: what a seed may and may not do to a fleet."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.run.plan import CALM_S, RULES, Fault, Kind, Part, schedule

SEEDS = st.integers(min_value=1, max_value=1_000_000)
EVERY = tuple(Part)
TEN_MINUTES = 600.0


def unwell(faults: tuple[Fault, ...], part: Part, moment: float) -> list[int]:
    """Numbers of the parts of a kind that count as hit at a moment."""
    return [one.number for one in faults if one.part is part and one.at_s <= moment < one.until_s]


@given(seed=SEEDS)
def test_no_more_parts_are_hit_at_once_than_their_rule_allows(seed: int) -> None:
    """What is left always serves: at the beginning of every fault its part's rule holds, and none is hit twice."""
    faults = schedule(seed, 120.0, EVERY)
    for fault in faults:
        hit = unwell(faults, fault.part, fault.at_s)
        assert len(hit) <= RULES[fault.part].most
        assert len(set(hit)) == len(hit)
        assert all(0 <= number < RULES[fault.part].parts for number in hit)


@given(seed=SEEDS)
def test_every_kind_of_fault_comes_up_in_ten_minutes(seed: int) -> None:
    """A run proves nothing of what never happened to it: each kind comes up twice at least."""
    counts = Counter((one.kind, one.part) for one in schedule(seed, TEN_MINUTES, EVERY))
    expected = {(kind, part) for part in EVERY if part is not Part.CLOCK for kind in (Kind.KILL, Kind.STOP)}
    assert set(counts) == expected | {(Kind.JUMP, Part.CLOCK)}
    assert min(counts.values()) >= 2


@given(seed=SEEDS, seconds=st.floats(min_value=0.0, max_value=200.0))
def test_faults_come_in_order_after_a_calm_and_have_settled_at_the_end(seed: int, seconds: float) -> None:
    """The load begins without faults and ends on a fleet that is whole again."""
    faults = schedule(seed, seconds, EVERY)
    assert all(one.at_s >= CALM_S and one.until_s <= seconds for one in faults)
    assert [one.at_s for one in faults] == sorted(one.at_s for one in faults)


@given(seed=SEEDS)
def test_a_seed_repeats_its_faults_and_another_does_not(seed: int) -> None:
    """A failure is found again by its seed."""
    assert schedule(seed, 60.0, EVERY) == schedule(seed, 60.0, EVERY)
    assert schedule(seed, 60.0, EVERY) != schedule(seed + 1, 60.0, EVERY)


@given(seed=SEEDS, parts=st.sets(st.sampled_from(EVERY), min_size=1))
def test_only_what_there_is_gets_hit(seed: int, parts: set[Part]) -> None:
    """Without Sentinels, or without a clock that can be misled, the others take the time."""
    faults = schedule(seed, 60.0, sorted(parts))
    assert {one.part for one in faults} <= parts
    assert all((one.jump_s != 0) == (one.kind is Kind.JUMP) for one in faults)

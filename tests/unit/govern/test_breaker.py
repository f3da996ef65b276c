"""What answers say of their endpoints, who is left alone, and who is slow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.govern.breaker import Pace, Verdict, is_full, left_alone, usual_s, verdict


@pytest.mark.parametrize(
    ("status", "flags", "expected"),
    [
        (200, (), "good"),
        (301, (), "good"),
        (400, (), "neutral"),
        (404, (), "neutral"),
        (422, (), "neutral"),
        (429, (), "neutral"),
        (499, (), "neutral"),
        (503, (), "neutral"),
        (500, (), "strike"),
        (502, (), "strike"),
        (504, (), "strike"),
        (0, ("UF",), "strike"),
        (0, ("UC",), "strike"),
        (200, ("UC",), "strike"),
        (200, ("UR",), "strike"),
        (0, ("UT",), "strike"),
        (200, ("UT",), "neutral"),
        (0, ("UPE",), "strike"),
        (503, ("UF", "URX"), "strike"),
        (200, ("DC",), "neutral"),
        (0, ("DC",), "neutral"),
        (200, ("DPE",), "neutral"),
        (0, (), "neutral"),
    ],
)
def test_answers_are_judged_by_what_they_say_of_the_engine(
    status: int, flags: tuple[str, ...], expected: Verdict
) -> None:
    """Broken connections and 5xx but 503 count; refused prompts, full queues and clients that leave do not."""
    assert verdict(status, flags) == expected


def test_a_full_engine_is_told_from_an_ill_one() -> None:
    """429 and 503 are answers of an engine without room."""
    assert [status for status in range(200, 600) if is_full(status)] == [429, 503]


def test_those_that_opened_last_are_left_alone_first() -> None:
    """Of three of four, half the pool goes: who is next to be tried again stays in use."""
    assert left_alone({"a": 900.0, "b": 100.0, "c": 500.0}, 4, 0.5) == {"a", "c"}
    assert left_alone({"a": 0.0}, 4, 0.5) == {"a"}
    assert left_alone({"a": 5.0}, 1, 0.5) == set()
    assert left_alone({"a": 5.0, "b": 5.0}, 2, 1.0) == {"a", "b"}
    assert left_alone({"a": 5.0}, 3, 0.0) == set()


@given(
    left=st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 1e6)),
    more=st.integers(0, 20),
    share=st.floats(0, 1),
)
def test_no_more_than_the_share_is_left_alone(left: dict[str, float], more: int, share: float) -> None:
    """Whatever opened, and in whatever order it is told: the share holds, and every replica leaves the same ones."""
    members = len(left) + more
    alone = left_alone(left, members, share)
    assert alone <= left.keys()
    assert len(alone) <= members * share + 1e-9
    assert alone == left_alone(dict(reversed(left.items())), members, share)
    if len(left) <= int(members * share):
        assert alone == left.keys()


def test_an_endpoint_is_measured_by_its_peers() -> None:
    """Ten times what the others take is ten; the same lateness of all is one."""
    pace = Pace()
    for name in "abc" * 5:
        pace.took(name, 0.1, 0.1)
    assert pace.took("d", 1.0, 0.1) == pytest.approx(10.0)
    late = Pace()
    for name in "abcd" * 5:
        late.took(name, 1.0, 0.1)
    assert late.took("a", 1.0, 0.1) == pytest.approx(1.0)


def test_fast_peers_make_nobody_slow() -> None:
    """Peers that are faster than expected are no measure: what is as expected is not late."""
    pace = Pace()
    for name in "abc" * 5:
        pace.took(name, 0.001, 0.1)
    assert pace.took("d", 0.1, 0.1) == pytest.approx(1.0)


def test_without_peers_nobody_is_slow() -> None:
    """Alone, or before others answered a few times, there is nothing to compare with."""
    pace = Pace()
    assert [pace.took("a", 9.0, 0.1) for _ in range(9)] == [0.0] * 9
    pace.took("b", 0.1, 0.1)
    assert pace.took("a", 9.0, 0.1) == 0.0
    assert pace.took("b", 0.1, 0.1) == pytest.approx(1.0 / 90.0)


def test_who_left_is_no_peer_any_more() -> None:
    """Forgotten endpoints are not compared with."""
    pace = Pace()
    for _ in range(5):
        pace.took("b", 0.1, 0.1)
    pace.keep({"a"})
    assert pace.took("a", 9.0, 0.1) == 0.0


def test_usual_is_the_median_speed() -> None:
    """One endpoint that crawls does not make the usual slow: 2,000 tokens at 10,000 a second and 50 ms."""
    assert usual_s(2000.0, [10_000.0, 10_000.0, 100.0], [0.05, 0.05, 3.0]) == pytest.approx(0.25)
    assert usual_s(0.0, [1000.0], [0.0]) > 0.0

"""The rule that turns scrapes into an endpoint's state."""

from itertools import accumulate

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.engines.adapter import Reading
from extproc.fleet.health import STEP_S, UNREACHABLE_AFTER, Failure, Health, Outcome, after, first, resumed
from extproc.state.endpoint import EndpointState

_NEW = first("10.0.0.1:8000", 0.0)
_READ = Reading(
    running=3,
    waiting=2,
    kv_usage=0.5,
    block_tokens=16,
    kv_blocks=900,
    started_at=50.0,
    prefix_queries=90.0,
    prefix_caching=False,
)
_GOOD, _BAD, _LOST = _READ, Failure.UNREADABLE, Failure.UNREACHABLE


def _run(*outcomes: Outcome, start: Health = _NEW, now: float = 100.0) -> list[Health]:
    """States after each outcome, one second apart."""
    times = iter(range(len(outcomes)))

    def step(health: Health, outcome: Outcome) -> Health:
        passed = next(times)
        return after(health, outcome, now + passed, float(passed))

    return list(accumulate(outcomes, step, initial=start))[1:]


@pytest.mark.parametrize(
    ("outcomes", "reachable"),
    [
        ([_LOST], [True]),
        ([_LOST] * 4, [True, True, False, False]),
        ([_LOST, _LOST, _BAD, _LOST, _LOST, _LOST], [True, True, True, True, True, False]),
        ([_LOST, _LOST, _GOOD, _LOST, _LOST], [True] * 5),
        ([_BAD] * 10, [True] * 10),
        ([_LOST, _LOST, _LOST, _BAD], [True, True, False, True]),
        ([_LOST, _LOST, _LOST, _GOOD, _LOST], [True, True, False, True, True]),
    ],
)
def test_only_three_lost_connections_in_a_row_make_an_endpoint_unreachable(
    outcomes: list[Outcome], reachable: list[bool]
) -> None:
    """One failure changes nothing; any answer, even an error, is a sign of life."""
    assert [health.state.reachable for health in _run(*outcomes)] == reachable


@pytest.mark.parametrize("failure", [_BAD, _LOST])
def test_a_failed_scrape_leaves_the_numbers_and_their_age(failure: Failure) -> None:
    """After a failure the last numbers stay, dated by the scrape that brought them."""
    good, failed = _run(_GOOD, failure)
    assert failed.state == msgspec.structs.replace(good.state, misses=failed.state.misses, unread=1)
    assert failed.state.scraped_at == 100.0


def test_a_reading_is_published_whole() -> None:
    """Every number of a reading reaches the state, and what other parts set stays."""
    start = Health(EndpointState(destination="10.0.0.1:8000", draining=True), 0.0)
    (health,) = _run(_READ, start=start)
    assert health.state == EndpointState(
        destination="10.0.0.1:8000",
        scraped_at=100.0,
        draining=True,
        running=3,
        waiting=2,
        kv_usage=0.5,
        block_tokens=16,
        kv_blocks=900,
        started_at=50.0,
        prefix_queries=90.0,
        prefix_caching=False,
        told_start=50.0,
    )


@pytest.mark.parametrize(
    ("starts_and_queries", "expected"),
    [
        ([(50, 10), (50, 20)], [50, 50]),
        ([(50, 10), (60, 0)], [50, 60]),
        ([(50, 10), (50, 3), (50, 4)], [50, 101, 101]),
        ([(0, 10), (0, 20)], [0, 0]),
        ([(0, 10), (0, 3), (0, 4)], [0, 101, 101]),
        ([(50, 10), (0, 20), (50, 30)], [50, 50, 50]),
        ([(50, 10), (50, 3), (0, 4), (50, 5)], [50, 101, 101, 101]),
    ],
)
def test_a_restarted_engine_shows_a_new_start(
    starts_and_queries: list[tuple[float, float]], expected: list[float]
) -> None:
    """A start that changed, or a counter that went back, changes `started_at` once; nothing else does."""
    readings = [Reading(started_at=start, prefix_queries=queries) for start, queries in starts_and_queries]
    assert [health.state.started_at for health in _run(*readings)] == expected


def test_what_an_engine_stops_telling_about_its_cache_is_remembered() -> None:
    """Block size and capacity do not vanish when one page leaves them out."""
    health = _run(_READ, msgspec.structs.replace(_READ, block_tokens=0, kv_blocks=0))[-1]
    assert (health.state.block_tokens, health.state.kv_blocks) == (16, 900)


@given(st.lists(st.sampled_from([_GOOD, _BAD, _LOST, Failure.SILENT]), max_size=30))
def test_reachability_depends_on_the_last_three_outcomes_alone(outcomes: list[Outcome]) -> None:
    """For any history: unreachable exactly when the latest outcomes were all lost connections."""
    health = _run(*outcomes)[-1] if outcomes else _NEW
    last = outcomes[-UNREACHABLE_AFTER:]
    assert health.state.reachable is not (len(last) == UNREACHABLE_AFTER and set(last) == {_LOST})


def _counts(tokens: float, kv_usage: float = 0.5, running: int = 1, waiting: int = 0) -> Reading:
    return Reading(tokens=tokens, kv_usage=kv_usage, running=running, waiting=waiting)


_WORKS, _IDLE = _counts(10), _counts(10, running=0)
_SILENT = Failure.SILENT


@pytest.mark.parametrize(
    ("outcomes", "stalled_s"),
    [
        ([_counts(tokens) for tokens in range(1, 6)], [0] * 5),
        ([_WORKS] * 6, [0, 0, 0, 3, 4, 5]),
        ([_WORKS] * 5 + [_counts(11), _counts(11)], [0, 0, 0, 3, 4, 0, 0]),
        ([_counts(10, kv / 10) for kv in range(5)], [0] * 5),
        ([_counts(10, waiting=queued, running=0) for queued in range(1, 6)], [0, 0, 0, 3, 4]),
        ([_IDLE] * 5, [0] * 5),
        ([_WORKS] * 4 + [_IDLE], [0, 0, 0, 3, 0]),
        ([_counts(0)] * 5, [0] * 5),
        ([_WORKS] + [_SILENT] * 4, [0, 0, 0, 3, 4]),
        ([_IDLE] + [_SILENT] * 4, [0, 0, 0, 3, 4]),
        ([_WORKS] + [_LOST] * 4, [0, 0, 0, 3, 4]),
        ([_WORKS] + [_SILENT] * 3 + [_WORKS], [0, 0, 0, 3, 4]),
        ([_WORKS] + [_SILENT] * 3 + [_counts(11)], [0, 0, 0, 3, 0]),
        ([_WORKS] + [_BAD] * 4, [0] * 5),
    ],
)
def test_an_engine_with_work_that_shows_no_progress_stands_still(
    outcomes: list[Outcome], stalled_s: list[float]
) -> None:
    """Tokens that move, a cache that fills, an idle engine and an HTTP error are no stall; neither are two seconds."""
    assert [health.state.stalled_s for health in _run(*outcomes)] == stalled_s


@given(st.lists(st.sampled_from([_WORKS, _IDLE, _counts(11), _BAD, _LOST, _SILENT]), max_size=30))
def test_a_stall_is_as_long_as_the_time_since_the_last_progress(outcomes: list[Outcome]) -> None:
    """For any history: nothing up to the length of a step, then all of it; never longer than the history."""
    for passed, health in enumerate(_run(*outcomes)):
        assert health.state.stalled_s == 0.0 or STEP_S < health.state.stalled_s <= passed
        assert health.state.stalled_s in {0.0, passed - health.moved_at}


_OUTCOMES = st.lists(st.sampled_from([_GOOD, _WORKS, _IDLE, _counts(11), _BAD, _LOST, _SILENT]), max_size=12)


@given(before=_OUTCOMES, later=_OUTCOMES)
def test_a_keeper_that_takes_over_goes_on_where_the_other_stopped(before: list[Outcome], later: list[Outcome]) -> None:
    """For any histories: misses, starts and stalls do not begin anew, and a clock of another origin changes nothing."""
    one = _run(*before)[-1] if before else _NEW
    two = resumed(one.state, 7_000.0)
    elapsed = max(0, len(before) - 1)
    for step, outcome in enumerate(later, start=1):
        one = after(one, outcome, 500.0 + step, float(elapsed + step))
        two = after(two, outcome, 500.0 + step, 7_000.0 + step)
        # Only a stall that was too short to be told is counted from the take-over.
        forgotten = msgspec.structs.replace(one.state, stalled_s=two.state.stalled_s)
        assert two.state == forgotten
        assert 0.0 <= one.state.stalled_s - two.state.stalled_s <= 2 * STEP_S


def test_a_stall_goes_on_over_a_takeover() -> None:
    """An engine that stood still for five seconds when its keeper died is not believed to work again."""
    stalled = _run(*[_WORKS] * 6)[-1]
    assert stalled.state.stalled_s == 5.0
    assert after(resumed(stalled.state, 7_000.0), _WORKS, 500.0, 7_001.0).state.stalled_s == 6.0

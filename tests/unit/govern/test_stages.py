"""Which time limits apply to a request, and when one has run out."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config_limits import LimitedKind, TimeoutRule, Timeouts
from extproc.govern.stages import Limits, Progress, Shape, Sight, Stage, judge, limits_of
from extproc.request.model import RouteKind

CHAT = Shape("m", "chat", streamed=True, uncached_tokens=2000.0)
WHOLE = Shape("m", "chat", streamed=False, uncached_tokens=2000.0)
BOTH = Limits(first_token_s=5.0, stall_s=2.0)


def follow(limits: Limits, *sights: Sight, opened_early: bool = False) -> list[Stage | None]:
    """What each of these sights of one answer is judged."""
    progress: Progress | None = None
    told = []
    for sight in sights:
        progress, stage = judge(limits, progress, sight, opened_early=opened_early)
        told.append(stage)
    return told


def seen(sent_bytes: int, at: float, age_s: float | None = None, now: float | None = None, attempt: int = 1) -> Sight:
    """A sight of a request that its endpoint has since 0, told at once."""
    return Sight(sent_bytes, 1e9 + at, at if now is None else now, at if age_s is None else age_s, attempt)


def test_the_kinds_of_rules_are_those_of_requests() -> None:
    """A rule can name every API, and none that does not exist."""
    assert set(get_args(LimitedKind)) == {each.value for each in RouteKind}


def test_limits_are_off_by_default_but_for_the_whole_request() -> None:
    """Nothing is watched unless somebody asks for it."""
    limits = limits_of(Timeouts(), CHAT)
    assert limits == Limits(request_s=900.0)
    assert not limits.watched
    assert not Timeouts().differ


@pytest.mark.parametrize(
    "timeouts",
    [Timeouts(headers_s=1), Timeouts(first_token_s=1), Timeouts(stall_s=1), Timeouts(rules=[TimeoutRule(request_s=1)])],
)
def test_any_limit_of_a_stage_differs(timeouts: Timeouts) -> None:
    """Decisions are given limits as soon as one is configured."""
    assert timeouts.differ


def test_the_first_token_has_time_for_each_uncached_token() -> None:
    """5 s, and half a millisecond for each of 2,000 tokens; an unknown number adds nothing; off stays off."""
    timeouts = Timeouts(first_token_s=5.0, first_token_ms_per_token=0.5)
    assert limits_of(timeouts, CHAT).first_token_s == 6.0
    assert limits_of(timeouts, Shape("m", "chat", streamed=True, uncached_tokens=-1.0)).first_token_s == 5.0
    assert limits_of(Timeouts(first_token_ms_per_token=0.5), CHAT).first_token_s == 0.0


def test_whole_answers_have_no_stages() -> None:
    """Their headers come with the last token: the limits of streams would end them in mid-answer."""
    timeouts = Timeouts(headers_s=1.0, first_token_s=2.0, stall_s=3.0, rules=[TimeoutRule(model="m", headers_s=4.0)])
    assert limits_of(timeouts, WHOLE) == Limits(request_s=900.0)
    asked = Timeouts(headers_s=1.0, rules=[TimeoutRule(streamed=False, kind="chat", headers_s=60.0)])
    assert limits_of(asked, WHOLE).headers_s == 60.0
    assert limits_of(asked, Shape("m", "embedding", streamed=False, uncached_tokens=1.0)).headers_s == 0.0


def test_each_limit_comes_from_the_first_rule_that_matches_and_has_it() -> None:
    """Rules are read in order, limit by limit; what none has is as for all requests."""
    timeouts = Timeouts(
        first_token_s=9.0,
        stall_s=8.0,
        rules=[
            TimeoutRule(model="other", stall_s=1.0),
            TimeoutRule(model="m", first_token_s=2.0),
            TimeoutRule(kind="chat", streamed=True, first_token_s=3.0, request_s=60.0),
            TimeoutRule(request_s=0.0),
        ],
    )
    assert limits_of(timeouts, CHAT) == Limits(first_token_s=2.0, stall_s=8.0, request_s=60.0)
    assert limits_of(timeouts, WHOLE).request_s == 0.0
    assert timeouts.longest_request_s == 0.0


def test_a_rule_can_switch_a_limit_off() -> None:
    """0 in a rule is no limit, and not the limit of the others."""
    timeouts = Timeouts(first_token_s=9.0, stall_s=8.0, rules=[TimeoutRule(model="m", stall_s=0.0)])
    assert limits_of(timeouts, CHAT) == Limits(first_token_s=9.0, request_s=900.0)


def test_the_longest_request_is_that_of_any_rule() -> None:
    """Envoy's limit on all requests must not cut off what a rule allows."""
    assert Timeouts(request_s=60.0, rules=[TimeoutRule(request_s=90.0), TimeoutRule()]).longest_request_s == 90.0
    assert Timeouts(request_s=0.0, rules=[TimeoutRule(request_s=90.0)]).longest_request_s == 0.0


def test_an_endpoint_that_gives_no_token_runs_out_of_time() -> None:
    """Counted from when it got the request, not from the first sight."""
    assert follow(BOTH, seen(0, 0.6), seen(0, 4.6), seen(0, 5.0)) == [None, None, "first_token"]


def test_a_first_token_in_time_ends_that_limit() -> None:
    """Afterwards only silence counts, however long the answer takes."""
    sights = [seen(0, 4.9), *(seen(100 * step, 5.0 + step) for step in range(1, 60))]
    assert set(follow(BOTH, *sights)) == {None}


def test_silence_between_tokens_runs_out_of_time() -> None:
    """Two seconds without a byte more; the first byte after that would begin anew."""
    sights = [seen(10, 0.5), seen(20, 1.0), seen(20, 2.9), seen(20, 3.0), seen(21, 3.1), seen(21, 4.0)]
    assert follow(BOTH, *sights) == [None, None, None, "stall", None, None]


def test_an_entry_that_is_a_little_early_counts() -> None:
    """Envoy's timer is some milliseconds early or late: what matters is not to wait for the next entry."""
    assert follow(BOTH, seen(10, 0.5), seen(10, 2.449), seen(10, 2.451)) == [None, None, "stall"]
    assert follow(BOTH, seen(0, 0.5), seen(0, 4.949), seen(0, 4.951)) == [None, None, "first_token"]


def test_limits_that_are_off_never_run_out() -> None:
    """0 is off, however long it takes."""
    assert follow(Limits(stall_s=2.0), seen(0, 0.5), seen(0, 1000.0)) == [None, None]
    assert follow(Limits(first_token_s=5.0), seen(7, 0.5), seen(7, 1000.0)) == [None, None]


def test_events_that_open_a_stream_are_no_first_token() -> None:
    """A Responses stream sends its first events before the prefill: those bytes are no token, the next ones are."""
    waiting = [seen(900, 0.5), seen(900, 3.0), seen(900, 5.0)]
    assert follow(BOTH, *waiting, opened_early=True) == [None, None, "first_token"]
    assert follow(BOTH, seen(0, 0.2), *waiting, opened_early=True) == [None, None, None, "first_token"]
    going = [seen(900, 0.5), seen(950, 4.0), seen(950, 5.5), seen(950, 6.0)]
    assert follow(BOTH, *going, opened_early=True) == [None, None, None, "stall"]


def test_each_try_has_its_own_time() -> None:
    """The next endpoint gets the request later than the first one did."""
    sights = [seen(0, 4.0), seen(0, 5.5, age_s=0.5, attempt=2), seen(0, 9.9, attempt=2), seen(0, 10.0, attempt=2)]
    assert follow(BOTH, *sights) == [None, None, None, "first_token"]


def test_entries_that_come_in_a_heap_are_no_silence() -> None:
    """A worker that stood still reads old entries late: what counts is when they were written."""
    sights = [seen(10, 0.5), seen(10, 1.0, now=9.0), seen(20, 1.5, now=9.0), seen(20, 2.0, now=9.0)]
    assert set(follow(BOTH, *sights)) == {None}


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_is_set_ends_no_request(jump: float) -> None:
    """Envoy's clock jumps by an hour: our own says that no time has passed."""
    sights = [seen(10, 0.5), seen(10, 1.0 + jump, now=1.0), seen(0, 1.5 + jump, now=1.5)]
    assert set(follow(BOTH, *sights)) == {None}
    assert follow(BOTH, *sights[:2], seen(10, 4.0 + jump, now=4.0))[-1] == "stall"
    first = [seen(0, 0.5), seen(0, 1.0 + jump, age_s=jump, now=1.0)]
    assert set(follow(BOTH, *first)) == {None}


def test_a_request_taken_over_is_not_ended_at_once() -> None:
    """A worker that hears of it for the first time gives it its time anew, less what it may have missed."""
    assert follow(BOTH, seen(0, 100.0), seen(0, 103.9), seen(0, 104.0)) == [None, None, "first_token"]
    assert follow(BOTH, seen(5, 100.0), seen(5, 101.9), seen(5, 102.0)) == [None, None, "stall"]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 3.0)), min_size=1, max_size=40))
def test_longest_silence_is_the_longest(steps: list[tuple[int, float]]) -> None:
    """Against a plain scan: the most time between two sights of which the later one had no more bytes."""
    at, sent, last, longest = 0.5, 10, 0.5, 0.0
    progress, _ = judge(BOTH, None, seen(sent, at))
    for more, wait_s in steps:
        at, sent = at + wait_s, sent + more
        progress, stage = judge(BOTH, progress, seen(sent, at))
        if more:
            last = at
        longest = max(longest, at - last)
        assert (stage == "stall") == (at - last >= 1.95) or abs(at - last - 1.95) < 1e-6
    assert progress.longest_s == pytest.approx(longest, abs=1e-6)

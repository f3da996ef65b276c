"""What the chaos run counts as whose fault."""

from typing import Any

import pytest

from extproc.sim.client import Failure
from tests.chaos.run.judge import (
    FIRST_BYTE_S,
    LATE_S,
    WAKE_S,
    Happened,
    Kept,
    Seen,
    Sent,
    Verdict,
    during,
    first_try,
    kept,
    stood,
    verdict,
)
from tests.chaos.run.plan import Kind

ONE, OTHER = "127.0.0.1:1", "127.0.0.1:2"
ON_ONE = Seen(served=ONE, picked=ONE, attempts=1)


def sent(**fields: Any) -> Sent:
    """A request that was answered at once."""
    plain: dict[str, Any] = {
        "number": 0,
        "session": 0,
        "turn": 0,
        "envoy": 0,
        "stream": True,
        "sent_s": 100.0,
        "head_s": 100.1,
        "first_byte_s": 100.2,
        "end_s": 101.0,
        "status": 200,
        "failure": None,
    }
    return Sent(**{**plain, **fields})


def fault(kind: Kind, from_s: float, until_s: float, name: str = ONE) -> Happened:
    """Something done to an engine."""
    return Happened(kind, "engine", name, from_s, until_s)


BROKEN = sent(failure=Failure.BROKEN)


@pytest.mark.parametrize(
    ("request_", "faults", "expected"),
    [
        (sent(), [], Verdict.ANSWERED),
        (sent(first_byte_s=100.1 + LATE_S, end_s=104.0), [], Verdict.LATE),
        (sent(first_byte_s=100.1 + FIRST_BYTE_S, end_s=130.0), [], Verdict.FAILED),
        (sent(status=503, failure=Failure.STATUS), [], Verdict.FAILED),
        (sent(head_s=None, first_byte_s=None, status=0, failure=Failure.TIMEOUT), [], Verdict.FAILED),
        (BROKEN, [], Verdict.FAILED),
        (BROKEN, [fault(Kind.KILL, 100.5, 103.0)], Verdict.CUT),
        (BROKEN, [fault(Kind.STOP, 100.5, 103.0)], Verdict.FAILED),
        (BROKEN, [fault(Kind.KILL, 100.5, 103.0, OTHER)], Verdict.FAILED),
        (BROKEN, [fault(Kind.KILL, 90.0, 99.0)], Verdict.FAILED),
        (BROKEN, [fault(Kind.KILL, 101.5, 103.0)], Verdict.FAILED),
        (sent(status=503, failure=Failure.STATUS), [fault(Kind.KILL, 100.5, 103.0)], Verdict.FAILED),
        (sent(head_s=None, status=0, failure=Failure.BROKEN), [fault(Kind.KILL, 100.5, 103.0)], Verdict.FAILED),
    ],
)
def test_only_a_kill_after_the_status_excuses_a_broken_answer(
    request_: Sent, faults: list[Happened], expected: Verdict
) -> None:
    """Every answer but a whole 200 in time failed, unless its own engine was killed when the 200 was out."""
    assert verdict(request_, ON_ONE, faults) is expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (ON_ONE, ONE),
        (Seen(served=OTHER, picked=ONE, attempts=2), ONE),
        (Seen(served=OTHER, picked=ONE, attempts=1), OTHER),
        (Seen(served=OTHER, attempts=1), OTHER),
        (Seen(), ""),
    ],
)
def test_the_first_try_is_the_pick_unless_envoy_passed_it_over(seen: Seen, expected: str) -> None:
    """One try that went elsewhere means that Envoy held the pick for unhealthy."""
    assert first_try(seen) == expected


def test_a_stopped_engine_explains_only_those_that_waited_on_it() -> None:
    """The age of the stop when the request was sent; negative when the engine stopped under it."""
    waiting = sent(first_byte_s=105.0, end_s=106.0)
    assert stood(waiting, ON_ONE, [fault(Kind.STOP, 97.0, 104.0)]) == pytest.approx(3.0)
    assert stood(waiting, ON_ONE, [fault(Kind.STOP, 102.0, 104.0)]) == pytest.approx(-2.0)
    assert stood(waiting, ON_ONE, [fault(Kind.STOP, 97.0, 99.0)]) is None
    assert stood(waiting, ON_ONE, [fault(Kind.STOP, 105.5, 107.0)]) is None
    assert stood(waiting, ON_ONE, [fault(Kind.STOP, 97.0, 104.0, OTHER)]) is None
    assert stood(waiting, ON_ONE, [fault(Kind.KILL, 97.0, 104.0)]) is None


def turns(*served: str, failed: int = -1) -> tuple[list[Sent], dict[int, Seen]]:
    """A session of turns ten seconds apart, and who served each; one of them may have failed."""
    requests = [
        sent(number=n, turn=n, sent_s=10.0 * n, end_s=10.0 * n + 1, failure=Failure.STATUS if n == failed else None)
        for n in range(len(served))
    ]
    return requests, {n: Seen(served=at, picked=at) for n, at in enumerate(served)}


def test_a_turn_on_another_engine_than_the_turn_before_is_a_session_not_kept() -> None:
    """Of three turns after the first, one moved."""
    assert kept(*turns(ONE, ONE, OTHER, OTHER), []) == Kept(turns=3, kept=2, left_out=0)


def test_moves_by_envoy_alone_are_told_from_those_of_the_sidecar() -> None:
    """The second turn was picked by nobody, so neither it nor the return after it is the sidecar's.

    The last was not either, but it went where the one before went.
    """
    requests, _ = turns(ONE, ONE, ONE, ONE, ONE)
    picked = [Seen(ONE, ONE), Seen(OTHER), Seen(ONE, ONE), Seen(OTHER, OTHER), Seen(OTHER)]
    assert kept(requests, dict(enumerate(picked)), []) == Kept(turns=4, kept=1, left_out=0, alone=2)


def test_sessions_are_told_apart() -> None:
    """The first turn of a session is compared with nothing."""
    requests, seen = turns(ONE, OTHER)
    apart = [sent(number=n, session=n, sent_s=one.sent_s) for n, one in enumerate(requests)]
    assert kept(apart, seen, []) == Kept(turns=0, kept=0, left_out=0)


def test_a_failed_turn_is_passed_over() -> None:
    """It is judged elsewhere; the turn after it is compared with the last that was answered."""
    assert kept(*turns(ONE, OTHER, ONE, failed=1), []) == Kept(turns=1, kept=1, left_out=0)


@pytest.mark.parametrize("kind", [Kind.KILL, Kind.STOP])
def test_turns_whose_engine_was_not_well_are_left_out(kind: Kind) -> None:
    """A fault of the engine of the turn before excuses the move; one of another engine, or long before, does not."""
    requests, seen = turns(ONE, OTHER)
    assert kept(requests, seen, [fault(kind, 5.0, 6.0)]) == Kept(turns=0, kept=0, left_out=1)
    assert kept(requests, seen, [fault(kind, 5.0, 6.0, OTHER)]) == Kept(turns=1, kept=0, left_out=0)
    assert kept(requests, seen, [fault(kind, -9.0 - WAKE_S, -1.0 - WAKE_S)]) == Kept(turns=1, kept=0, left_out=0)
    assert kept(requests, seen, [fault(kind, 12.0, 13.0)]) == Kept(turns=1, kept=0, left_out=0)


def test_requests_under_way_during_a_fault() -> None:
    """Those that ended before it began, or were sent after it ended, have nothing to do with it."""
    requests = [sent(number=n, sent_s=float(n), end_s=float(n) + 1.5) for n in range(6)]
    assert [one.number for one in during(requests, fault(Kind.STOP, 2.0, 3.0))] == [1, 2, 3]

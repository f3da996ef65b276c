"""What became of each request, and whose fault it was: plain functions of what was seen."""

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from extproc.sim.client import Failure
from tests.chaos.run.plan import Kind

FIRST_BYTE_S = 20.0
"""Deadline for the first byte of an answer's body. The longest stop of an engine is 8 s."""
LATE_S = 2.0
"""An answer whose first byte took longer is counted as late. Frozen workers cost `message_timeout_ms`, 1 s."""
NOTICED_S = 3.0
"""How long an engine has stood still when the sidecar should no longer send anything to it."""
SLACK_S = 1.0
"""A cut stream may reach the client so much later than its engine's death."""
WAKE_S = 12.0
"""After its fault an engine stays out while Envoy's ejection (5 s, more when it was ejected before) and its health
checks last: turns in that time are no measure of how sessions are kept."""

OK = 200


class Sent(msgspec.Struct, frozen=True):
    """One request as its client saw it; moments are monotonic seconds.

    Attributes:
        number: of the request; Envoy's log carries it.
        session: number of its session.
        turn: place in the session, from 0.
        envoy: number of the Envoy that it went to.
        stream: whether a stream was asked for.
        sent_s: when it was sent.
        head_s: when the answer's status came; None if it did not.
        first_byte_s: when the first byte of the body came; None if none did.
        end_s: last byte, or when it failed.
        status: HTTP status; 0 if none came.
        failure: None for a whole, well-formed answer.
    """

    number: int
    session: int
    turn: int
    envoy: int
    stream: bool
    sent_s: float
    head_s: float | None
    first_byte_s: float | None
    end_s: float
    status: int
    failure: Failure | None

    @property
    def wait_s(self) -> float:
        """Seconds to the first byte of the body, or to the end without one."""
        return (self.end_s if self.first_byte_s is None else self.first_byte_s) - self.sent_s


class Seen(msgspec.Struct, frozen=True):
    """What Envoy's log says of a request.

    Attributes:
        served: `ip:port` that it was sent to last; empty for none.
        picked: `ip:port` that the sidecar named first; empty when Envoy picked alone.
        attempts: tries upstream.
        flags: Envoy's response flags.
        details: Envoy's words for how the answer came about.
    """

    served: str = ""
    picked: str = ""
    attempts: int = 0
    flags: str = ""
    details: str = ""


class Happened(msgspec.Struct, frozen=True):
    """A fault that was done.

    Attributes:
        kind: what.
        part: to what: kind of part.
        name: which: `ip:port` of an engine, else a short name.
        from_s: monotonic second of its beginning.
        until_s: when its part was itself again.
    """

    kind: Kind
    part: str
    name: str
    from_s: float
    until_s: float


class Verdict(StrEnum):
    """What counts of a request. Late ones are answered ones."""

    ANSWERED = "answered"
    LATE = "late"
    CUT = "cut"
    """The engine was killed after the status had gone to the client: no other engine could take over."""
    FAILED = "failed"


def verdict(sent: Sent, seen: Seen, faults: Sequence[Happened]) -> Verdict:
    """Judge one request.

    Answered is a whole answer of status 200 whose first byte came within its deadline. Of the others those are cut
    whose status, 200, had reached the client before the engine that served them was killed; all the rest failed.

    Args:
        sent: the request.
        seen: what Envoy said of it.
        faults: what was done to engines.
    """
    if sent.failure is None:
        if sent.wait_s > FIRST_BYTE_S:
            return Verdict.FAILED
        return Verdict.LATE if sent.wait_s > LATE_S else Verdict.ANSWERED
    if sent.head_s is None or sent.status != OK:
        return Verdict.FAILED
    killed = any(
        one.name == seen.served and one.kind is Kind.KILL and sent.head_s - SLACK_S <= one.from_s <= sent.end_s
        for one in faults
    )
    return Verdict.CUT if killed else Verdict.FAILED


def first_try(seen: Seen) -> str:
    """`ip:port` that a request was sent to first: a pick that Envoy holds for unhealthy is passed over."""
    tried = bool(seen.picked) and (seen.served == seen.picked or seen.attempts > 1)
    return seen.picked if tried else seen.served


def stood(sent: Sent, seen: Seen, faults: Sequence[Happened]) -> float | None:
    """How long the first engine of a request had stood still when it was sent; below 0 when it stopped later.

    None when it did not stand still while the request waited for its first byte.
    """
    for one in faults:
        waited = sent.sent_s + sent.wait_s >= one.from_s and sent.sent_s < one.until_s
        if one.name == first_try(seen) and one.kind is Kind.STOP and waited:
            return sent.sent_s - one.from_s
    return None


class Kept(msgspec.Struct, frozen=True):
    """How sessions were kept.

    Attributes:
        turns: answered turns, after the first of each session, whose engine of the turn before was well all the time.
        kept: those of them that the same engine served.
        left_out: turns whose engine had been killed or stopped, or was not awake again.
        alone: of the turns not kept, those for which Envoy had picked alone, then or the turn before.
    """

    turns: int
    kept: int
    left_out: int
    alone: int = 0

    @property
    def share(self) -> float:
        """Share of turns kept; 1 without any."""
        return self.kept / self.turns if self.turns else 1.0


def kept(requests: Iterable[Sent], seen: Mapping[int, Seen], faults: Sequence[Happened]) -> Kept:
    """Count the turns that went where the turn before went, by Envoy's log.

    Left out are turns whose engine was killed or stopped at any moment between the sending of the turn before and
    the end of this one, or had been less than `WAKE_S` before.
    """
    turns = same = left_out = alone = 0
    for before, after in _pairs(requests):
        was, now = seen.get(before.number, Seen()), seen.get(after.number, Seen())
        if not was.served:
            continue
        if any(one.name == was.served and _touches(one, before.sent_s, after.end_s) for one in faults):
            left_out += 1
            continue
        turns += 1
        same += was.served == now.served
        alone += was.served != now.served and not (was.picked and now.picked)
    return Kept(turns, same, left_out, alone)


def _touches(fault: Happened, from_s: float, until_s: float) -> bool:
    return fault.from_s <= until_s and fault.until_s + WAKE_S >= from_s


def _pairs(requests: Iterable[Sent]) -> Iterator[tuple[Sent, Sent]]:
    """Each answered turn with the answered one before it."""
    last: dict[int, Sent] = {}
    answered = (one for one in requests if one.failure is None)
    for one in sorted(answered, key=lambda each: (each.session, each.turn)):
        before = last.get(one.session)
        if before is not None:
            yield before, one
        last[one.session] = one


def during(requests: Sequence[Sent], fault: Happened) -> list[Sent]:
    """Requests that were under way at some moment of a fault; `requests` in the order they were sent."""
    end = bisect.bisect_right(requests, fault.until_s, key=lambda each: each.sent_s)
    return [one for one in requests[:end] if one.end_s >= fault.from_s]

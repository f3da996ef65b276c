"""Time limits by stage, as plain functions: which apply to a request, and whether one has run out."""

from typing import Final, Literal

import msgspec

from extproc.config_limits import TimeoutRule, Timeouts

Stage = Literal["headers", "first_token", "stall", "request", "idle"]
"""What a limit bounds: silence before the headers, time to the first token, silence between tokens, the whole request,
and silence on the connection, which Envoy alone watches."""

_BELIEVED_AGE_S: Final = 1.0
"""A request is seen for the first time within a second of its start (two intervals of Envoy). What looks older was seen
by another worker before, or a clock was set: its time begins anew rather than that many requests end for that."""


_SLACK_S: Final = 0.05
"""How much earlier a limit counts as over: entries come each half second, some milliseconds early or late, and the next
one is half a second away."""
_HELD_S: Final = 0.25
"""Envoy holds entries back for up to `telemetry.access_log_flush_ms`, so our clock may have seen less time between two
of them than went by: with limits of 2 s, one in twenty was noticed half a second late. It is asked only so that a clock
that is set ends nothing."""


class Shape(msgspec.Struct, frozen=True, gc=False):
    """What limits depend on.

    Attributes:
        model: name that the client asks for; empty when it named none.
        kind: API, as `request.model.RouteKind`.
        streamed: whether the answer is streamed.
        uncached_tokens: prompt tokens that the endpoint has to compute; negative when that is not known.
    """

    model: str
    kind: str
    streamed: bool
    uncached_tokens: float


class Limits(msgspec.Struct, frozen=True, gc=False):
    """Limits of one request in seconds; 0 for none.

    Attributes:
        headers_s: silence before the headers, at each try.
        first_token_s: from when the endpoint got the request to the first byte of the answer's body.
        stall_s: silence between two tokens.
        request_s: the whole request.
    """

    headers_s: float = 0.0
    first_token_s: float = 0.0
    stall_s: float = 0.0
    request_s: float = 0.0

    @property
    def watched(self) -> bool:
        """Whether somebody has to look at the answer while it runs: Envoy enforces the other limits by itself."""
        return self.first_token_s > 0.0 or self.stall_s > 0.0


def limits_of(timeouts: Timeouts, shape: Shape) -> Limits:
    """The limits of a request: each from the first matching rule that has it, else from `timeouts`."""
    rules = [rule for rule in timeouts.rules if _matches(rule, shape)]

    def limit(name: str) -> float:
        told = (getattr(rule, name) for rule in rules)
        return float(next((value for value in told if value is not None), getattr(timeouts, name)))

    request_s = limit("request_s")
    if not shape.streamed:
        own = (rule.headers_s for rule in rules if rule.streamed is False and rule.headers_s is not None)
        return Limits(headers_s=next(own, 0.0), request_s=request_s)
    first_token_s = limit("first_token_s")
    if first_token_s > 0.0:
        first_token_s += max(0.0, shape.uncached_tokens) * limit("first_token_ms_per_token") / 1000.0
    return Limits(limit("headers_s"), first_token_s, limit("stall_s"), request_s)


def _matches(rule: TimeoutRule, shape: Shape) -> bool:
    return (
        rule.model in (None, shape.model)
        and rule.kind in (None, shape.kind)
        and rule.streamed in (None, shape.streamed)
    )


class Sight(msgspec.Struct, frozen=True, gc=False):
    """A running answer at one moment, in seconds.

    Attributes:
        sent_bytes: bytes of the answer's body so far.
        at: the moment by the gateway's clock, which may be set.
        now: the moment it was told, by a clock that never goes back.
        age_s: since when the endpoint has the request, by the gateway's clock.
        attempt: number of the try.
    """

    sent_bytes: int
    at: float
    now: float
    age_s: float
    attempt: int = 1


class Progress(msgspec.Struct, frozen=True, gc=False):
    """What is remembered of a running answer.

    Attributes:
        sent_bytes: bytes of its body when it was seen last.
        at: since when that is so, by the gateway's clock.
        now: the same by our clock.
        begun: its first token has come.
        attempt: number of the try.
        longest_s: longest silence after the first token so far.
    """

    sent_bytes: int
    at: float
    now: float
    begun: bool
    attempt: int = 1
    longest_s: float = 0.0


def judge(
    limits: Limits, before: Progress | None, sight: Sight, *, opened_early: bool = False
) -> tuple[Progress, Stage | None]:
    """Take in a sight of an answer; the limit that has run out, or None.

    Silence is the lesser of what both clocks say: entries that come late in a heap do not look like silence, nor does a
    gateway whose clock was set.

    Args:
        limits: of the request.
        before: what the last call returned; None at the first sight.
        sight: what was seen.
        opened_early: the API opens its streams with events that stand for no token: the first token has come when more
            bytes came than those.
    """
    if before is None or before.attempt != sight.attempt:
        age_s = min(max(sight.age_s, 0.0), _BELIEVED_AGE_S)
        begun = sight.sent_bytes > 0 and not opened_early
        since = 0.0 if begun else age_s
        before = Progress(sight.sent_bytes, sight.at - since, sight.now - since, begun, sight.attempt)
    elif sight.sent_bytes != before.sent_bytes:
        if before.begun or before.sent_bytes > 0 or not opened_early:
            return Progress(sight.sent_bytes, sight.at, sight.now, True, sight.attempt, before.longest_s), None
        before = msgspec.structs.replace(before, sent_bytes=sight.sent_bytes)
    elif sight.at < before.at:
        before = msgspec.structs.replace(before, at=sight.at)
    silent_s = min(sight.at - before.at, sight.now - before.now + _HELD_S)
    if not before.begun:
        return before, "first_token" if 0.0 < limits.first_token_s <= silent_s + _SLACK_S else None
    after = msgspec.structs.replace(before, longest_s=max(before.longest_s, silent_s))
    return after, "stall" if 0.0 < limits.stall_s <= silent_s + _SLACK_S else None

"""The breaker of one endpoint: what each answer changes in it. A pure rule, which `redis/breaker.lua` follows as well.

Closed, it counts strikes in a row. At `BreakerRules.strikes` of them it opens, and lets nothing through for a while.
Then it is half open: one request at a time goes to the endpoint and decides. A breaker that opens again soon after it
closed stays open twice as long as the last time, `BreakerRules.max_open_ms` at most.
"""

from typing import Final, Literal

import msgspec

from extproc.govern.breaker import Verdict
from extproc.state.values import Breaker, BreakerRules

State = Literal["closed", "open", "half_open"]
_DOUBLINGS: Final = 16
"""Openings that still make a difference: 1 ms doubled so often is a minute, the longest that a configuration allows."""


class Kept(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a store keeps of a breaker. Times in milliseconds of the store's clock; 0 for none.

    Attributes:
        strikes: strikes in a row, while it is closed.
        openings: how often it opened, the last time within `max_open_ms` of being closed.
        until: when it is half open; 0 while it is closed.
        closed_at: when it closed last.
        probed_until: until when nobody else may send a probe.
    """

    strikes: int = 0
    openings: int = 0
    until: float = 0.0
    closed_at: float = 0.0
    probed_until: float = 0.0


def state_of(kept: Kept, now: float) -> State:
    """Where a breaker stands at `now`."""
    if not kept.until:
        return "closed"
    return "open" if now < kept.until else "half_open"


def view(kept: Kept, now: float) -> Breaker:
    """A breaker as it is told to those who ask."""
    return Breaker(state_of(kept, now), kept.strikes, kept.openings, max(0.0, kept.until - now))


def after(kept: Kept, verdict: Verdict, rules: BreakerRules, now: float) -> Kept:
    """A breaker after one answer of its endpoint.

    Args:
        kept: before.
        verdict: what the answer says of the endpoint.
        rules: when it opens, and for how long.
        now: time of the verdict, milliseconds.
    """
    state = state_of(kept, now)
    if state == "open":
        return kept  # of a request that was sent before it opened
    if verdict == "neutral":
        return msgspec.structs.replace(kept, probed_until=0.0)
    if verdict == "good":
        if state == "closed":
            return msgspec.structs.replace(kept, strikes=0)
        return Kept(openings=kept.openings, closed_at=now)
    if state == "closed" and kept.strikes + 1 < rules.strikes:
        return msgspec.structs.replace(kept, strikes=kept.strikes + 1)
    relapsed = state == "half_open" or now - kept.closed_at < rules.max_open_ms
    openings = kept.openings + 1 if relapsed else 1
    open_ms = min(rules.max_open_ms, rules.open_ms * 2 ** min(openings - 1, _DOUBLINGS))
    return Kept(openings=openings, until=now + open_ms, closed_at=kept.closed_at)


def probed(kept: Kept, lease_ms: float, now: float) -> Kept | None:
    """A breaker after somebody was allowed a probe; None when nobody is."""
    if state_of(kept, now) != "half_open" or now < kept.probed_until:
        return None
    return msgspec.structs.replace(kept, probed_until=now + lease_ms)

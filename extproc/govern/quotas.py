"""How much of a limit is used, may be taken, and is given back: arithmetic of values, without clock and store.

A limit by the minute is the generic cell rate algorithm, in the form of a leaky bucket: ITU-T Recommendation I.371
(2004), annex A ("continuous-state leaky bucket algorithm"), which it shows to be equal to virtual scheduling; ATM Forum
Traffic Management 4.1, section 4.4.2. The bucket drains at the rate of the limit, and what would make it overflow is
refused. There each cell weighs the same; here a request weighs its tokens. A limit by the day or month counts what was
used since the window began (UTC).

`redis/quota.lua` has the same arithmetic, on Redis' clock.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

Unit = Literal["requests", "tokens"]
Per = Literal["minute", "day", "month"]

DAY_S = 86_400
LEVEL_LIMIT = 1e15
"""Most that is believed of a bucket, in requests or tokens; anything above is damage."""


class Draw(msgspec.Struct, frozen=True, gc=False):
    """What one request takes of one limit.

    Attributes:
        shard: part of the store that has the bucket; all that belongs to one tenant has one.
        bucket: name of the bucket there, a keyed hash.
        unit: what is counted.
        per: how it comes back: evenly, or all at once with the next window.
        most: how much may be in use.
        rate: how much drains in a second; 0 for windows.
        amount: how much is taken; below 0 to give back.
    """

    shard: str
    bucket: str
    unit: Unit
    per: Per
    most: float
    rate: float
    amount: float


class Take(msgspec.Struct, frozen=True, gc=False):
    """A request for all of these, or none.

    Attributes:
        draws: what is taken; each bucket once.
        pool: pool that would serve the request; empty when that is not known yet.
        share: part of each limit that a process may use by itself while nobody tells what the others use.
    """

    draws: Sequence[Draw]
    pool: str = ""
    share: float = 1.0


class Taken(msgspec.Struct, frozen=True, gc=False):
    """What became of a `Take`.

    Attributes:
        allowed: everything was taken; otherwise nothing was.
        at: when, in seconds since the epoch by the clock of whoever decided.
        levels: for each draw, what is in use: with it when it was taken, else without.
        local: decided by this process alone.
    """

    allowed: bool
    at: float
    levels: Sequence[float]
    local: bool = False


class Correction(msgspec.Struct, frozen=True, gc=False):
    """What a request used turned out to be otherwise than what was taken.

    Attributes:
        at: when it was taken, as `Taken.at`.
        draws: differences; what is used counts whether or not it was allowed.
        own: what this process keeps up of its own use differs by these.
    """

    at: float
    draws: Sequence[Draw]
    own: Sequence[Draw] = ()


class Claim(msgspec.Struct, frozen=True, gc=False):
    """A key that one request has until it ends.

    Attributes:
        shard: part of the store that has it.
        key: name of the key there, a keyed hash.
        token: who has it.
        lease_ms: how long it has it at most.
        pool: pool that serves the request.
    """

    shard: str
    key: str
    token: str
    lease_ms: int
    pool: str = ""


class Bucket(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How much of a limit is used.

    Attributes:
        level: requests or tokens in use at `since`.
        since: seconds since the epoch.
        busy: when it was found empty last; what was taken before that has all come back.
    """

    level: float
    since: float
    busy: float


def standing(bucket: Bucket | None, draw: Draw, now: float) -> Bucket:
    """The bucket of a draw as it stands now. One that nobody used, or that cannot be read, is empty."""
    if bucket is None or not 0.0 <= bucket.level <= LEVEL_LIMIT:
        return Bucket(0.0, now, now)
    if draw.per != "minute":
        same = window_start(draw.per, bucket.since) == window_start(draw.per, now)
        return Bucket(bucket.level, now, bucket.busy) if same else Bucket(0.0, now, now)
    level = bucket.level - draw.rate * max(0.0, now - bucket.since)
    return Bucket(level, now, bucket.busy) if level > 0.0 else Bucket(0.0, now, now)


def taken(draws: Sequence[Draw], buckets: Sequence[Bucket], now: float) -> tuple[bool, Sequence[Bucket]]:
    """Take all of the draws or none from buckets as they stand; whether they were, and the buckets afterwards."""
    if any(each.level + draw.amount > draw.most for draw, each in zip(draws, buckets, strict=True)):
        return False, buckets
    return True, [Bucket(each.level + draw.amount, now, each.busy) for draw, each in zip(draws, buckets, strict=True)]


def corrected(draw: Draw, bucket: Bucket, at: float) -> Bucket | None:
    """The bucket with a draw's difference; None when it stays as it is.

    What was taken in a window that is over is no part of the next one. And a bucket that was empty since has all of it
    back already: to give back once more would let others use more than the limit.

    Args:
        draw: the difference.
        bucket: its bucket as it stands now.
        at: when it was taken.
    """
    if draw.per != "minute":
        if window_start(draw.per, at) != window_start(draw.per, bucket.since):
            return None
    elif draw.amount < 0.0 and bucket.busy > at:
        return None
    return Bucket(max(0.0, bucket.level + draw.amount), bucket.since, bucket.busy)


def window_start(per: Per, now: float) -> float:
    """When the day or the month of a moment began, in seconds since the epoch (UTC)."""
    if per == "day":
        return math.floor(now / DAY_S) * DAY_S
    moment = datetime.fromtimestamp(now, UTC)
    return datetime(moment.year, moment.month, 1, tzinfo=UTC).timestamp()


def window_end(per: Per, now: float) -> float:
    """When the day or the month of a moment ends, in seconds since the epoch (UTC)."""
    if per == "day":
        return window_start(per, now) + DAY_S
    moment = datetime.fromtimestamp(now, UTC)
    year, month = (moment.year + 1, 1) if moment.month == 12 else (moment.year, moment.month + 1)
    return datetime(year, month, 1, tzinfo=UTC).timestamp()


def wait_s(draw: Draw, level: float, now: float) -> float:
    """Seconds until the draw would be allowed if nobody else took anything; infinite when it never would be."""
    over = level + draw.amount - draw.most
    if over <= 0.0:
        return 0.0
    if draw.amount > draw.most:
        return math.inf
    return over / draw.rate if draw.per == "minute" else window_end(draw.per, now) - now


def reset_s(draw: Draw, level: float, now: float) -> float:
    """Seconds until nothing of the limit would be in use if nobody took anything."""
    if level <= 0.0:
        return 0.0
    return level / draw.rate if draw.per == "minute" else window_end(draw.per, now) - now


def alone(draw: Draw, share: float) -> Draw:
    """The draw of the share of its limit that this process may use by itself, and no less than one request of it."""
    least = 1.0 if draw.unit == "requests" else 0.0
    return msgspec.structs.replace(draw, most=max(least, draw.most * share), rate=draw.rate * share)

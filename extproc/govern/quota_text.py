"""Limits as text: the headers that tell clients, and what a decision carries so that any process can correct it."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from extproc.govern import quotas
from extproc.govern.quotas import Draw, Per, Taken, Unit

HEADER_KEYS = {
    f"ratelimit_{what}_{unit}": f"x-ratelimit-{what}-{unit}"
    for unit in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
}
"""Keys of a decision's metadata, and the response headers they become; names and forms are those of OpenAI's API
(platform.openai.com/docs/guides/rate-limits, "Rate limits in headers")."""

_UNITS: Mapping[Unit, str] = {"requests": "r", "tokens": "t"}
_PERS: Mapping[Per, str] = {"minute": "m", "day": "d", "month": "M"}
_UNIT_OF = {text: unit for unit, text in _UNITS.items()}
_PER_OF = {text: per for per, text in _PERS.items()}
_FIELDS = 5
_FOREVER_S = 400 * quotas.DAY_S
"""Longest time that is told; times beyond it come of limits that give back next to nothing."""


class Carried(msgspec.Struct, frozen=True, gc=False):
    """What a request took, as its decision carries it.

    Attributes:
        at: as `Taken.at`.
        local: as `Taken.local`.
        draws: what was taken; `most` is not carried.
    """

    at: float
    local: bool
    draws: Sequence[Draw]


def headers(draws: Sequence[Draw], taken: Taken) -> dict[str, str]:
    """Values by key of `HEADER_KEYS`: of requests, and of tokens, the limit that is nearest to its end."""
    told: dict[str, str] = {}
    for unit in _UNITS:
        mine = [(draw, level) for draw, level in zip(draws, taken.levels, strict=True) if draw.unit == unit]
        if not mine:
            continue
        draw, level = min(mine, key=lambda each: each[0].most - each[1])
        told[f"ratelimit_limit_{unit}"] = str(math.floor(draw.most))
        told[f"ratelimit_remaining_{unit}"] = str(max(0, math.floor(draw.most - level)))
        told[f"ratelimit_reset_{unit}"] = duration(quotas.reset_s(draw, level, taken.at))
    return told


def duration(seconds: float) -> str:
    """A time in OpenAI's form, which is Go's: `20ms`, `1s`, `6m0s`, `26h3m0s`. Rounded up: no one comes too early."""
    if seconds < 1.0:
        millis = math.ceil(max(0.0, seconds) * 1000)
        return f"{millis}ms" if 0 < millis < 1000 else f"{millis // 1000}s"
    whole = math.ceil(min(seconds, _FOREVER_S))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def carried(draws: Sequence[Draw], taken: Taken) -> str:
    """What a request took, as one text."""
    parts = [
        f"{each.shard}|{each.bucket}|{_UNITS[each.unit]}{_PERS[each.per]}|{each.rate!r}|{each.amount!r}"
        for each in draws
    ]
    return " ".join([repr(taken.at), str(int(taken.local)), *parts])


def read_carried(text: str) -> Carried:
    """What `carried` wrote. Raises ValueError for anything else."""
    at, local, *parts = text.split(" ")
    return Carried(_finite(at), bool(int(local)), [_draw(each) for each in parts])


def _draw(text: str) -> Draw:
    fields = text.split("|")
    if len(fields) != _FIELDS:
        raise ValueError("what a decision took of its limits cannot be read")
    shard, bucket, kind, rate, amount = fields
    unit, per = _UNIT_OF.get(kind[:1]), _PER_OF.get(kind[1:])
    if unit is None or per is None or not bucket or (per == "minute") != (_finite(rate) > 0.0):
        raise ValueError("what a decision took of its limits cannot be read")
    return Draw(shard, bucket, unit, per, 0.0, float(rate), _finite(amount))


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("what a decision took of its limits is no number")
    return number

"""The limits that are for a request, and how one that refuses says so. Plain functions of values."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from extproc.config import Config
from extproc.errors import RateLimitedError
from extproc.govern import quota_text, quotas
from extproc.govern.quota_rules import Rules, limits_of
from extproc.govern.quotas import Draw, Taken
from extproc.request.session import pin_key

_EVERYBODY: Final = "quota/all"


class Bound(msgspec.Struct, frozen=True, gc=False):
    """A limit that is for somebody.

    Attributes:
        draw: its draw, of nothing yet.
        limit: key of the limit.
        tenant: as the rule names it.
        model: as the rule names it.
    """

    draw: Draw
    limit: str
    tenant: str | None
    model: str | None


def bounds_of(config: Config, rules: Rules, tenant: str, model: str | None) -> Sequence[Bound]:
    """The limits for a tenant and a model, see `Rules.of`.

    All that count for one tenant lie in one of sixteen shards, those that count for all together in one of their own.
    Names are keyed hashes: who reads the store learns no tenant.
    """
    secret = secret_of(config)
    own = f"quota/{pin_key(secret, 'tenant', tenant)[0]}"
    found = []
    for applied in rules.of(tenant, model):
        shard = _EVERYBODY if applied.tenant is None else own
        for limit in limits_of(applied.rule):
            bucket = pin_key(secret, limit.name, repr((applied.tenant, applied.model)))
            draw = Draw(shard, bucket, limit.unit, limit.per, limit.most, limit.rate, 0.0)
            found.append(Bound(draw, limit.name, applied.rule.tenant, applied.rule.model))
    return found


def refusal(draws: Sequence[Draw], bounds: Sequence[Bound], taken: Taken) -> tuple[RateLimitedError, Bound]:
    """The error, and the limit that keeps the request waiting longest."""
    waits = [quotas.wait_s(draw, level, taken.at) for draw, level in zip(draws, taken.levels, strict=True)]
    wait_s = max(waits)
    place = waits.index(wait_s)
    draw, bound, told = draws[place], bounds[place], response_headers(quota_text.headers(draws, taken))
    text = f"Rate limit reached: {bound.limit} allows {draw.most:g} at once"
    if math.isinf(wait_s):
        # No wait helps: SDKs that would try again are told so.
        told["x-should-retry"] = "false"
        text += f", and this request needs about {draw.amount:g}. Send a shorter prompt, or a lower max_tokens."
    else:
        seconds = max(1, math.ceil(wait_s))
        told["retry-after"] = str(seconds)
        text += f"; {math.ceil(taken.levels[place])} are in use, and this request needs {draw.amount:g}."
        text += f" Try again in {seconds} s."
    return RateLimitedError(text, told), bound


def response_headers(told: Mapping[str, str]) -> dict[str, str]:
    """Values by key of metadata as headers of an answer."""
    return {quota_text.HEADER_KEYS[key]: value for key, value in told.items()}


def secret_of(config: Config) -> bytes:
    """Key of the hashes that tenants and idempotency keys are stored under: that of sessions."""
    return (config.routing.session.secret or f"warmpath:{config.redis.key_prefix}").encode()

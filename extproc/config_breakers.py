"""The section `breakers` of `warmpath.yaml`."""

from typing import Annotated

from msgspec import Meta

from extproc.config_base import NotNegative, Positive, Section


class Breakers(Section, frozen=True, kw_only=True):
    """When an endpoint is left alone because of how it answers; all replicas count together.

    Strikes are connections that fail or break, answers of 500 and above except 503, time limits that ran out, and first
    tokens that are far too slow. Answers below 500, 503, and clients that leave are none.

    Attributes:
        strikes: strikes in a row that open an endpoint's breaker; 0 switches breakers off.
        open_s: how long it is left alone then, before single requests try it.
        max_open_s: how long at most, when it fails again and again.
        max_open_share: share of a pool's endpoints that may be left alone at once.
        slow_factor: a first token that takes this many times what the pool's other endpoints need is a strike; above 1,
            or 0 to switch this off.
        slow_least_s: no first token that comes within this time is a strike.
        busy_ms: cost added to an endpoint that has just answered 429 or 503: it has no room, and is not ill.
        max_requests: requests that one Envoy has open to one pool at once; 0 for no limit.
        max_pending: requests that one Envoy lets wait for a connection to one pool; 0 for no limit.
    """

    strikes: Annotated[int, Meta(ge=0, le=1000)] = 5
    open_s: Annotated[float, Meta(gt=0, le=3600)] = 5.0
    max_open_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    max_open_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    slow_factor: NotNegative = 8.0
    slow_least_s: Positive = 2.0
    busy_ms: NotNegative = 500.0
    max_requests: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    max_pending: Annotated[int, Meta(ge=0, le=1_000_000)] = 0

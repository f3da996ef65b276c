"""The section `rate_limits` of `warmpath.yaml`."""

from typing import Annotated

import msgspec
from msgspec import Meta

from extproc.config_base import Count, Section

EACH = "*"
"""In place of a name: each tenant, or each model, for itself."""

Whose = Annotated[str, Meta(min_length=1, max_length=256)]


class RateLimit(Section, frozen=True, kw_only=True):
    """One rule: how much those that it is for may use. A request must keep all limits of all rules that are for it.

    Of the rules that name a tenant (or `*`) and a model (or `*`), the one that says more exactly who is meant applies:
    a tenant's name before a model's, a name before `*`. Rules without `tenant` or without `model` are of another kind,
    and apply beside them.

    Attributes:
        tenant: name of a tenant; `*` for each tenant for itself; none for all tenants together.
        model: name of a model; `*` for each model for itself; none for all models together.
        requests_per_minute: requests that a minute gives back, evenly.
        tokens_per_minute: tokens that a minute gives back, evenly: of prompts and of answers.
        burst_s: seconds of those two that may be used at once.
        requests_per_day: requests from midnight to midnight, UTC.
        tokens_per_day: tokens from midnight to midnight, UTC.
        tokens_per_month: tokens of a calendar month, UTC.
    """

    tenant: Whose | None = None
    model: Whose | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    burst_s: Annotated[float, Meta(ge=1, le=3600)] = 60.0
    requests_per_day: Count | None = None
    tokens_per_day: Count | None = None
    tokens_per_month: Count | None = None


class RateLimits(Section, frozen=True, kw_only=True):
    """How much may be used.

    Attributes:
        rules: limits that all replicas share; each has `tenant` and `model` (a name, `*` for each, none for all
            together), and any of `requests_per_minute`, `tokens_per_minute`, `burst_s` (60), `requests_per_day`,
            `tokens_per_day`, `tokens_per_month`.
        local_requests_per_s: requests a second that each Envoy passes on, of all clients together, before anything
            else looks at them; as many may come at once. None for no limit.
        before_body: ask for limits of requests that name no model before the body is read, in a round trip of its own.
    """

    rules: Annotated[list[RateLimit], Meta(max_length=1000)] = msgspec.field(default_factory=list)
    local_requests_per_s: Count | None = None
    before_body: bool = False

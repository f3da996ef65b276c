"""The section `overload` of `warmpath.yaml`, and the part of each pool that stands in for it."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from extproc.config_base import Count, ModelName, Positive, Section

Action = Literal["pass", "queue", "fallback", "reject"]


class Saturation(Section, frozen=True, kw_only=True):
    """When an endpoint is saturated: any of these is enough.

    Attributes:
        waiting: so many requests wait in the engine: by its last page, and by what was sent and finished since.
        kv_usage: its KV cache is this full, and a request waits.
        backlog_ms: prompt tokens charged to it take so long to prefill.
    """

    waiting: Annotated[int, Meta(ge=1, le=100_000)] = 4
    kv_usage: Annotated[float, Meta(gt=0, le=1)] = 0.95
    backlog_ms: Positive = 5000.0


class QueueBounds(Section, frozen=True, kw_only=True):
    """Bounds of the queue that each worker keeps for a pool.

    Attributes:
        max_requests: requests that wait.
        max_tokens: tokens of work that they stand for: uncached prompt tokens and expected output tokens.
        max_wait_s: longest wait; past it a request is answered 503.
        low_share: share of the work that each lower class gets while higher ones wait.
    """

    max_requests: Annotated[int, Meta(ge=1, le=100_000)] = 1000
    max_tokens: Count = 4_000_000
    max_wait_s: Annotated[float, Meta(gt=0, le=300)] = 30.0
    low_share: Annotated[float, Meta(ge=0, le=0.3)] = 0.1


class TenantShare(Section, frozen=True, kw_only=True):
    """How one tenant waits.

    Attributes:
        weight: its share of a queue, beside the weights of the other tenants that wait.
        priority: its class: below 0 goes first, above 0 last.
    """

    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    priority: int = 0


class PoolOverload(Section, frozen=True, kw_only=True):
    """What a pool has of its own; keys that are absent follow the section `overload`.

    Attributes:
        action: see `overload.action`.
        fallback: see `overload.fallback`.
        saturation: see `overload.saturation`; given as a whole.
        queue: see `overload.queue`; given as a whole.
    """

    action: Action | None = None
    fallback: ModelName | None = None
    saturation: Saturation | None = None
    queue: QueueBounds | None = None


class Overload(Section, frozen=True, kw_only=True):
    """What happens to requests when every endpoint of a pool is saturated.

    Attributes:
        action: `pass` leaves them to the engines' own queues; `queue` lets them wait here; `fallback` sends them
            to another model; `reject` answers 429.
        fallback: model that answers in their place; the response says so in `x-warmpath-fallback`.
        saturation: when an endpoint is saturated.
        queue: bounds of the queue.
        client_priority: take the header `x-warmpath-priority` and the body's `priority` for the class of a request.
        tenants: by tenant, its share and class; others have weight 1 and priority 0.
    """

    action: Action = "pass"
    fallback: ModelName | None = None
    saturation: Saturation = Saturation()
    queue: QueueBounds = QueueBounds()
    client_priority: bool = False
    tenants: dict[str, TenantShare] = msgspec.field(default_factory=dict)


class Rules(msgspec.Struct, frozen=True):
    """What holds for one pool; see `Overload` for each."""

    action: Action
    fallback: str
    saturation: Saturation
    queue: QueueBounds


def rules_of(overload: Overload, own: PoolOverload) -> Rules:
    """The rules of a pool: its own, else the section's."""
    return Rules(
        action=own.action or overload.action,
        fallback=own.fallback or overload.fallback or "",
        saturation=own.saturation or overload.saturation,
        queue=own.queue or overload.queue,
    )

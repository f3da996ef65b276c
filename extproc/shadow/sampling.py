"""Which requests a shadow gets too: by a hash of their id, while there is room to spare. Pure: values in, a value out.

A shadow is worth less than any request of a client: it is the first to go, and nothing is ever put off for it.
"""

import math
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
import xxhash

Held = Literal["over_cap", "late", "queued", "primary_busy", "shadow_busy", "no_endpoint"]
"""Why a request that was drawn has no shadow: as many as allowed are under way; the worker's event loop is late;
requests wait for one of the pools; too much of the client's pool is in use; of the shadow's; nobody there can serve."""

LATE_S: Final = 0.05
"""An event loop that is so late is behind with decisions: they take less than a millisecond each."""
_SCALE: Final = float(1 << 64)


class Use(msgspec.Struct, frozen=True, gc=False):
    """How busy a pool is.

    Attributes:
        share: share of its room that is in use, 0 to 1.
        queued: requests that wait for it at this worker.
    """

    share: float = 0.0
    queued: int = 0


class State(msgspec.Struct, frozen=True, gc=False):
    """What decides whether there is room for one more.

    Attributes:
        under_way: shadow requests of this model at this worker.
        late_s: how late the worker's event loop is.
        primary: the pool that serves the client.
        shadow: the shadow's pool.
        serves: some endpoint of the shadow's pool can serve.
    """

    under_way: int
    late_s: float
    primary: Use
    shadow: Use
    serves: bool


def drawn(model: str, request_id: str, share: float) -> bool:
    """Whether a request is of the share that a shadow gets.

    All workers draw alike, and one that is sent again is drawn again: who calls sees to it that it counts once.

    Args:
        model: its model: shadows of two models are drawn apart.
        request_id: its `x-request-id`; without one it is not drawn.
        share: 0 to 1.
    """
    if not request_id or share <= 0.0:
        return False
    digest = xxhash.xxh3_64_intdigest(f"{model}\0shadow\0{request_id}".encode("utf-8", "surrogatepass"))
    return digest < share * _SCALE


def held_back(state: State, max_concurrent: int, max_load: float) -> Held | None:
    """Why a request that was drawn gets no shadow; None when it does.

    Args:
        state: how things are.
        max_concurrent: most under way at once.
        max_load: most of a pool's room that may be in use.
    """
    if state.under_way >= max_concurrent:
        return "over_cap"
    if state.late_s > LATE_S:
        return "late"
    if state.primary.queued or state.shadow.queued:
        return "queued"
    if state.primary.share >= max_load:
        return "primary_busy"
    if not state.serves:
        return "no_endpoint"
    return "shadow_busy" if state.shadow.share >= max_load else None


def share_of(limit: float, free: float, pages: Sequence[tuple[float, int]]) -> float:
    """Share of a pool's room that is in use.

    Args:
        limit: sequences that it may have, by `govern.saturation.Room`; infinite while nobody knows.
        free: of these, how many it can still take.
        pages: for each endpoint that may serve, the share of its KV cache in use, and how many requests wait there.
            Where some wait at an engine, that one is full.

    Returns:
        The greater of both, 0 to 1; what is not known says nothing.
    """
    counted = 1.0 - free / limit if math.isfinite(limit) and limit > 0.0 else 0.0
    shown = sum(1.0 if waiting else usage for usage, waiting in pages) / len(pages) if pages else 0.0
    return min(1.0, max(0.0, counted, shown))

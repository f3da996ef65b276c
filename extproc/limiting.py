"""Gives decisions their time limits: to Envoy as headers, to whoever watches them as metadata."""

from typing import Final

import msgspec

from extproc.config import Timeouts
from extproc.envoy.contract import FIRST_LIMIT, STALL_LIMIT, Call, Decider, Decision
from extproc.govern.stages import Shape, limits_of

_PER_TRY: Final = "x-envoy-upstream-rq-per-try-timeout-ms"
"""Envoy's router ends a try without headers after so long and takes the next; it ignores the limit once headers came.
https://www.envoyproxy.io/docs/envoy/latest/configuration/http/http_filters/router_filter"""
_WHOLE: Final = "x-envoy-upstream-rq-timeout-ms"
"""The whole answer, all tries together; 0 is no limit."""


class Limiting:
    """Implements `envoy.contract.Decider`: another one's decisions, with limits."""

    def __init__(self, decider: Decider, timeouts: Timeouts) -> None:
        self._decider = decider
        self._timeouts = timeouts

    async def decide(self, call: Call) -> Decision:
        """See `Decider.decide`."""
        return with_limits(await self._decider.decide(call), self._timeouts)

    async def served(self, decision: Decision, served: str) -> None:
        """See `Decider.served`."""
        await self._decider.served(decision, served)

    async def settle(self, decision: Decision, served: str = "") -> None:
        """See `Decider.settle`."""
        await self._decider.settle(decision, served)


def with_limits(decision: Decision, timeouts: Timeouts) -> Decision:
    """The decision with the limits that it falls under."""
    told = decision.metadata
    uncached = told.get("uncached_tokens")
    shape = Shape(
        model=decision.model,
        kind=str(told.get("kind", "")),
        streamed=told.get("streamed") == 1.0,
        uncached_tokens=float(uncached) if isinstance(uncached, int | float) else -1.0,
    )
    limits = limits_of(timeouts, shape)
    headers = dict(decision.headers)
    if limits.headers_s > 0.0:
        headers[_PER_TRY] = _milliseconds(limits.headers_s)
    if limits.request_s != timeouts.request_s:
        headers[_WHOLE] = _milliseconds(limits.request_s)
    metadata = dict(told)
    if decision.model:
        metadata["model"] = decision.model
    if limits.first_token_s > 0.0:
        metadata[FIRST_LIMIT] = limits.first_token_s
    if limits.stall_s > 0.0:
        metadata[STALL_LIMIT] = limits.stall_s
    return msgspec.structs.replace(
        decision,
        metadata=metadata,
        headers=headers,
        limited=limits.watched and bool(decision.charge_id),
        total_s=limits.request_s,
    )


def _milliseconds(seconds: float) -> str:
    """Whole milliseconds; what is not 0 stays so, since 0 is no limit."""
    return str(max(1, round(seconds * 1000))) if seconds else "0"

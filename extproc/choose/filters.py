"""Which endpoints may serve at all.

Hard rules always drop. Soft rules drop only while somebody is left: what the keeper believes of an endpoint
may be stale or wrong, and Envoy's own health checks stand behind the choice, so belief alone never turns into
a 503.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from extproc.choose.fleet import Endpoint


def hard_reason(endpoint: Endpoint, subset: AbstractSet[str] | None) -> str:
    """Why the endpoint must never serve this request; empty when it may."""
    if subset is not None and endpoint.destination not in subset:
        return "outside_subset"
    if endpoint.asleep:
        return "asleep"
    return ""


def soft_reason(endpoint: Endpoint) -> str:
    """Why another endpoint should serve if there is one; empty when this one is fine."""
    if not endpoint.reachable:
        return "unreachable"
    if endpoint.breaker in ("open", "half_open"):
        return "breaker_open"
    if endpoint.draining:
        return "draining"
    return ""


def usable(endpoints: Sequence[Endpoint], subset: AbstractSet[str] | None = None) -> Sequence[Endpoint]:
    """Endpoints that may serve, in their given order; empty only when a hard rule drops every one."""
    allowed = [endpoint for endpoint in endpoints if not hard_reason(endpoint, subset)]
    return [endpoint for endpoint in allowed if not soft_reason(endpoint)] or allowed

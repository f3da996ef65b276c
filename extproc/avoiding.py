"""Who may be picked: what a gateway hinted at, without the endpoints that a relay has just lost."""

from collections.abc import Set as AbstractSet

from extproc.choose.fleet import Pool
from extproc.config_relay import AVOID
from extproc.envoy.contract import Call


def hinted(call: Call, pool: Pool) -> AbstractSet[str] | None:
    """`ip:port` of the endpoints that may be picked; None for all.

    Endpoints to avoid are a wish: when no other is left, they may be picked all the same, for one may be back by now.
    """
    subset = None if call.subset is None else frozenset(call.subset)
    lost = call.headers.get(AVOID)
    if not lost:
        return subset
    members = frozenset(each.destination for each in pool.endpoints)
    left = (members if subset is None else subset & members) - frozenset(lost.split(","))
    return left or subset

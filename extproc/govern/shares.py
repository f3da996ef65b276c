"""How several queues share one pool: each worker's part of what may be in flight, by what waits there and elsewhere."""

from collections.abc import Mapping, Sequence

import msgspec

Demand = Mapping[tuple[int, str], float]
"""Tokens that wait, by class and tenant."""


class Share(msgspec.Struct, frozen=True):
    """One queue's part.

    Attributes:
        part: of all that may be in flight, 0 to 1.
        scale: by tenant, how much of its waiting tokens are in this queue: its weight here is so much less.
    """

    part: float
    scale: Mapping[str, float]


def share_of(mine: Demand, others: Sequence[Demand], weights: Mapping[str, float], low_share: float) -> Share:
    """This queue's part of a pool.

    Each class has its share: lower ones that wait `low_share`, the highest the rest. Within a class tenants share by
    weight, and a tenant's part is split by where its tokens wait. So tenants get the same whichever worker they reach.

    Args:
        mine: what waits here.
        others: what waits in each of the other queues.
        weights: by tenant, its weight; 1 where absent.
        low_share: share of each lower class while higher ones wait.
    """
    total: dict[tuple[int, str], float] = {}
    for demand in (mine, *others):
        for key, tokens in demand.items():
            if tokens > 0.0:
                total[key] = total.get(key, 0.0) + tokens
    if not total:
        return Share(1.0, {})
    bands = sorted({band for band, _ in total})
    part = 0.0
    for at, band in enumerate(bands):
        of_band = 1.0 - low_share * (len(bands) - 1) if at == 0 else low_share
        tenants = [tenant for each, tenant in total if each == band]
        whole = sum(weights.get(tenant, 1.0) for tenant in tenants)
        for tenant in tenants:
            here = mine.get((band, tenant), 0.0) / total[band, tenant]
            part += of_band * weights.get(tenant, 1.0) / whole * here
    here_of: dict[str, list[float]] = {}
    for (band, tenant), tokens in total.items():
        sums = here_of.setdefault(tenant, [0.0, 0.0])
        sums[0] += mine.get((band, tenant), 0.0)
        sums[1] += tokens
    return Share(min(1.0, part), {tenant: here / tokens for tenant, (here, tokens) in here_of.items() if here > 0.0})

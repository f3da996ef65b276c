"""The one awaited step of a decision: the store picks among the candidates, charges and pins."""

import msgspec

from extproc import deciding
from extproc.choose import chooser
from extproc.choose.chooser import Plan, Priced
from extproc.choose.fleet import Pool
from extproc.choose.policies import Ask, Weights
from extproc.errors import StoreError
from extproc.state.pick import MAX_CANDIDATES
from extproc.state.store import Store
from extproc.state.values import Reservation, Reserve


async def reserved(
    store: Store, reserve: Reserve, ask: Ask, pool: Pool, plan: Plan, weights: Weights
) -> tuple[Reservation, Priced]:
    """One round trip; a second one when the session is pinned to an endpoint outside the candidates."""
    candidates = list(plan.candidates)
    try:
        answer = await store.reserve(reserve)
        absent = answer.absent_pin
        pinned = next((each for each in plan.eligible if each.id == absent), None) if absent else None
        if pinned:
            priced = chooser.price_one(ask, pinned, pool, weights)
            candidates = [priced, *candidates][:MAX_CANDIDATES]
            offered = [*deciding.packed([priced]), *reserve.candidates][:MAX_CANDIDATES]
            answer = await store.reserve(msgspec.structs.replace(reserve, candidates=offered))
        if answer.absent_pin:  # to one that may not serve, or moved in between
            answer = await store.reserve(msgspec.structs.replace(reserve, ignore_pin=True))
    except StoreError:
        cheapest = min(plan.candidates, key=lambda each: each.static_ms)
        return Reservation(cheapest.endpoint.id, cheapest.static_ms), cheapest
    return answer, next((each for each in candidates if each.endpoint.id == answer.endpoint), candidates[0])

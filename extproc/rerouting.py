"""Another endpoint answers than the one that was picked: charge and session's pin go where the request is.

Envoy takes the next of the list when the pick fails, and a foreign gateway may choose among it by itself. The profile
follows in `PoolKnowledge`. Whichever worker hears of it first, the one that decided acts: it alone knows the session's
pin, whose key leaves the process only for the store.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec

from extproc.background import Background
from extproc.choose.chooser import Priced
from extproc.errors import StoreError
from extproc.state.store import Store
from extproc.state.values import Move, Reserve

_REMEMBERED: Final = 8192
"""Decisions of which pin and prices are kept, about 700 bytes each; older ones stay where they were picked."""
_MOST_TASKS: Final = 256
"""Moves under way at once. More come only from a store that hangs: then they would come too late anyway."""


class Place(msgspec.Struct, frozen=True, gc=False):
    """What a request costs on an endpoint: prompt tokens to prefill, and how many it does in a second."""

    endpoint: str
    tokens: float
    rate: float


class Route(msgspec.Struct, frozen=True, gc=False):
    """Where one decision stands.

    Attributes:
        pool: its pool.
        endpoint: who has the request, as far as is known.
        places: the pick, and those that Envoy was told to try next.
        prompt_tokens: length of the prompt: what any other endpoint has to prefill.
        pin_key: key under which the pick was pinned; empty for no session.
        pin_ttl_ms: life of the pin.
        max_pins: pins that the pool keeps.
    """

    pool: str
    endpoint: str
    places: tuple[Place, ...]
    prompt_tokens: float
    pin_key: str
    pin_ttl_ms: int
    max_pins: int


def route_of(reserve: Reserve, order: Sequence[Priced], prompt_tokens: float) -> Route:
    """The route of a reservation; `order` is the pick and those that are tried after it."""
    places = tuple(Place(each.endpoint.id, each.uncached, each.endpoint.rate) for each in order)
    key = reserve.next_pin_key or reserve.pin_key
    pick = places[0].endpoint
    return Route(reserve.pool, pick, places, prompt_tokens, key, reserve.pin_ttl_ms, reserve.max_pins)


class Rerouting:
    """The last decisions of one worker, and what becomes of those that went elsewhere."""

    def __init__(self, store: Store, replica: str) -> None:
        """`replica` is the worker's id: its charges are moved."""
        self._store = store
        self._replica = replica
        self._routes: OrderedDict[str, Route] = OrderedDict()
        self._moving = Background()

    def decided(self, charge_id: str, route: Route) -> None:
        """Remember a decision."""
        self._routes[charge_id] = route
        if len(self._routes) > _REMEMBERED:
            self._routes.popitem(last=False)

    def heard(self, charge_id: str, endpoint: str) -> None:
        """An endpoint has this request: see that it is charged there. Returns at once; must be called in a loop."""
        moved = self._take(charge_id, endpoint)
        if moved is not None and len(self._moving) < _MOST_TASKS:
            self._moving.keep(self._move(charge_id, moved))

    async def served(self, charge_id: str, endpoint: str) -> None:
        """The same, done when it returns. Never raises."""
        moved = self._take(charge_id, endpoint)
        if moved is not None:
            await self._move(charge_id, moved)

    async def idle(self) -> None:
        """Return once nothing is being moved."""
        await self._moving.idle()

    def _take(self, charge_id: str, endpoint: str) -> Route | None:
        """The decision's new route; None when nothing changed, or it is not one of the last of this worker."""
        route = self._routes.get(charge_id)
        if route is None or not endpoint or route.endpoint == endpoint:
            return None
        self._routes[charge_id] = route = msgspec.structs.replace(route, endpoint=endpoint)
        return route

    async def _move(self, charge_id: str, route: Route) -> None:
        unlisted = Place(route.endpoint, route.prompt_tokens, route.places[0].rate)
        place = next((each for each in route.places if each.endpoint == route.endpoint), unlisted)
        move = Move(route.pool, charge_id, self._replica, place.endpoint, place.tokens, place.rate)
        try:
            await self._store.move(move)
            if route.pin_key:
                await self._store.pin(route.pool, route.pin_key, route.endpoint, route.pin_ttl_ms, route.max_pins)
        except StoreError:
            # The charge ends with its request all the same; the session's next turn pays for one prefill.
            return

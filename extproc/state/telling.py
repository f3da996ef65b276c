"""Telling a shared store that is back what it missed: ends, open charges and where they are served, pins."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Final, Protocol, TypeVar

import msgspec

from extproc.clock import Clock
from extproc.errors import StoreError
from extproc.state.memory import MemoryStore, OpenCharge
from extproc.state.stats import Stats
from extproc.state.store import Store
from extproc.state.unsent import LatePin, Unsent
from extproc.state.values import Move, Reserve, Settle

T = TypeVar("T")

# Calls under way at once after a return, and the pause after them. A call takes a server some 30 us: 32 workers that
# return together hold a decision up by 16 ms at most, and each still tells 3,000 things a second.
_BATCH: Final = 16
_PAUSE_S: Final = 0.004
# Pins noted in one turn of the event loop, in a millisecond. 20,000 at once held decisions up for 30 ms.
_SLICE: Final = 1000


class Tools(msgspec.Struct, frozen=True):
    """What all pools of one `ResilientStore` share."""

    primary: Store
    local: MemoryStore
    clock: Clock
    chance: Random
    stats: Stats
    longest_s: float
    most: int


class Asking(Protocol):
    """How the shared store is asked."""

    @property
    def asks(self) -> bool:
        """Calls are sent."""
        ...

    async def ask(self, call: Awaitable[T], *, bulk: bool = False) -> T:
        """Await a call. Raises `StoreError` when it fails."""
        ...


class Telling:
    """Empties what is unsent of one pool.

    Args:
        pool: its name.
        tools: the stores, clock and counters.
        unsent: what is to be told.
        asking: how to ask.
    """

    def __init__(self, pool: str, tools: Tools, unsent: Unsent, asking: Asking) -> None:
        self._pool = pool
        self._tools = tools
        self._unsent = unsent
        self._asking = asking

    async def round(self) -> bool:
        """Tell the shared store what waits, until something fails; whether everything was told."""
        for replica in list(self._unsent.wiped):
            if not await self._told(self._tools.primary.release(self._pool, replica)):
                return False
            self._unsent.wiped.discard(replica)
            self._unsent.lost = True
        if not await self._in_batches(list(self._unsent.settles.values()), self._deliver):
            return False
        charges = list(self._tools.local.open_charges(self._pool))
        self._sort_out(charges)
        unsure = [each for each in charges if self._unsent.is_unsure(each.ask.charge_id)]
        if not await self._in_batches(unsure, self._assert):
            return False
        if self._unsent.pins_lost and not await self._find_lost_pins():
            return False
        # Sessions seen last ask again first.
        return await self._in_batches(list(reversed(self._unsent.pins)), self._merge)

    def _sort_out(self, charges: Sequence[OpenCharge]) -> None:
        """Find out which of the open charges are to be told: with a store that may have lost them, all."""
        self._unsent.keep_doubts({each.ask.charge_id for each in charges})
        if self._unsent.lost:
            self._unsent.lost, self._unsent.pins_lost = False, True
            self._unsent.doubt_all(each.ask.charge_id for each in charges)

    async def _find_lost_pins(self) -> bool:
        """Look whether the shared store lost pins with the rest, and keep those of this worker's sessions for it.

        A store that evicts lacks some at all times; one that was flushed lacks nearly all, and a few tell.
        """
        unsent, local = self._unsent, self._tools.local
        newest = local.newest_pins(self._pool, self._tools.most)
        await asyncio.sleep(0)
        known = [key for key in newest if key not in unsent.pins]
        sample = [key for key in known[:: len(known) // _BATCH + 1] if local.pin_left(self._pool, key)[1] > 0]
        try:
            found = await asyncio.gather(
                *(self._asking.ask(self._tools.primary.pinned(self._pool, key)) for key in sample)
            )
        except StoreError:
            return False
        unsent.pins_lost = False
        if 2 * found.count("") > len(found):
            await self._keep_pins(list(reversed(known)))
        return True

    async def _keep_pins(self, keys: Sequence[str]) -> None:
        """Keep the pins of these sessions for the shared store, unless newer ones wait for it already."""
        for place, key in enumerate(keys):
            if place % _SLICE == 0:
                await asyncio.sleep(0)
            endpoint, left_s = self._tools.local.pin_left(self._pool, key)
            if left_s > 0 and key not in self._unsent.pins:
                until = self._tools.clock.monotonic() + left_s
                self._unsent.pin(key, LatePin(endpoint, until, self._unsent.max_pins, None))

    async def _in_batches(self, items: Sequence[T], tell: Callable[[T], Awaitable[bool]]) -> bool:
        """Tell these things, a few at a time; False as soon as some of a few could not be told."""
        for start in range(0, len(items), _BATCH):
            if not self._asking.asks:
                return False
            if start:
                await asyncio.sleep(_PAUSE_S)
            if not all(await asyncio.gather(*(tell(each) for each in items[start : start + _BATCH]))):
                return False
        return True

    async def _told(self, call: Awaitable[object]) -> bool:
        """Whether a call to the shared store succeeded; what was refused has to be tried again too.

        A full or read-only store does not stay so, and nothing else ends the charge of a replica that lives on.
        """
        try:
            await self._asking.ask(call)
        except StoreError:
            return False
        return True

    async def _deliver(self, end: Settle) -> bool:
        # Late, the backlog has drained by itself: the tokens given back would be those of other requests.
        if not await self._told(self._tools.primary.settle(msgspec.structs.replace(end, refund=False))):
            if end.charge_id in self._unsent.settles:
                # One that is refused for ever must not keep the others waiting.
                self._unsent.settles.move_to_end(end.charge_id)
            return False
        self._unsent.delivered(end)
        self._tools.stats.replayed += 1
        return True

    async def _assert(self, told: OpenCharge) -> bool:
        """Tell the shared store of an open charge; it keeps one that it knows, which then may have to move."""
        ask = told.ask
        # No await stands between this look and the call, so that its settle comes after it.
        charge = self._now(told)
        if charge is None:
            return True
        again = self._again(charge)
        try:
            answer = await self._asking.ask(self._tools.primary.reserve(again))
            charge = self._now(told)
            if charge is not None and answer.endpoint != charge.reservation.endpoint:
                # It decided too late for this worker, or the charge moved meanwhile, perhaps while this was asked.
                self._unsent.ghost(ask.next_pin_key or ask.pin_key, answer.endpoint)
                await self._asking.ask(self._tools.primary.move(_move_of(self._again(charge))))
        except StoreError:
            return False
        self._unsent.told(ask.charge_id)
        self._tools.stats.asserted += 1
        return True

    def _now(self, charge: OpenCharge) -> OpenCharge | None:
        """The charge as it is now: it may have moved or ended since it was listed."""
        ask = charge.ask
        return self._tools.local.open_charge(ask.pool, ask.replica, ask.charge_id)

    def _again(self, charge: OpenCharge) -> Reserve:
        """What reserves a charge anew.

        With what is left of its prefill, as a backlog of its own would have drained. The queue that its floor was proof
        of has gone too. Pins are merged apart, where another replica's later decision can be seen.
        """
        age_s = self._tools.clock.monotonic() - self._unsent.telling(charge.ask.charge_id)
        known = charge.ask.candidates[0]
        candidate = msgspec.structs.replace(
            known,
            endpoint=charge.reservation.endpoint,
            static_ms=0.0,
            tokens=max(0.0, charge.tokens - known.rate * age_s),
            floor_tokens=0.0,
            floor_running=0,
            stalled_tokens=0.0,
        )
        return msgspec.structs.replace(
            charge.ask, candidates=(candidate,), pin_key="", next_pin_key="", ignore_pin=True
        )

    async def _merge(self, key: str) -> bool:
        """Write a pin of this worker's own to the shared store, or give it up for another replica's."""
        primary, stats = self._tools.primary, self._tools.stats
        if (pin := self._unsent.pins.get(key)) is None:
            return True
        left_ms = int((pin.until - self._tools.clock.monotonic()) * 1000)
        if left_ms <= 0:
            self._unsent.merged(key, pin, pin.before or "")
            return True
        try:
            shared = await self._asking.ask(primary.pinned(self._pool, key))
            if self._unsent.pins.get(key) is not pin:
                return True
            if pin.wins_over(shared):
                await self._asking.ask(primary.pin(self._pool, key, pin.endpoint, left_ms, pin.max_pins))
                shared = pin.endpoint
                stats.pins_merged += 1
            elif pin.before is not None:
                stats.pins_dropped += 1
        except StoreError:
            return False
        self._unsent.merged(key, pin, shared)
        return True


def _move_of(ask: Reserve) -> Move:
    """Move a charge to its one candidate."""
    at = ask.candidates[0]
    return Move(ask.pool, ask.charge_id, ask.replica, at.endpoint, tokens=at.tokens, rate=at.rate)

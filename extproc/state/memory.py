"""The store inside one process: for tests, for a single worker, and as the ledger to fall back on without Redis."""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import islice

import msgspec

from extproc.clock import Clock
from extproc.state.memory_board import MemoryBoard
from extproc.state.memory_documents import MemoryDocuments
from extproc.state.memory_feed import MemoryFeed
from extproc.state.memory_quota import MemoryQuota
from extproc.state.pick import PINS_TRIMMED, Bucket, check, check_move, check_pins, decode_charge, floored, pick
from extproc.state.values import MAX_PINS, Beat, Candidate, Load, Move, Reservation, Reserve, Settle


class OpenCharge(msgspec.Struct, frozen=True):
    """A charge that was not settled yet.

    Attributes:
        ask: what was asked, with the endpoint that serves it as the only candidate.
        reservation: the answer given; its endpoint is the one that serves it.
        tokens: prompt tokens charged to the backlog.
        sequences: sequences held in flight.
        output_tokens: output tokens held in flight.
    """

    ask: Reserve
    reservation: Reservation
    tokens: float
    sequences: int
    output_tokens: float


class _Pool:
    """Ledger and pins of one pool."""

    def __init__(self) -> None:
        self.buckets: dict[str, Bucket] = {}
        # Sequences and output tokens in flight; endpoints without any are absent.
        self.decode: dict[str, tuple[int, float]] = {}
        self.flights: dict[str, dict[str, OpenCharge]] = {}
        self.leases: dict[str, float] = {}
        # In order of last use. With 100,000 of them, one in and one out takes 1.3 us; in a plain dict 18 us, because it
        # walks over all it has lost at its front to find its first key.
        self.pins: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def load(self, endpoint: str, now: float) -> Load:
        """Load of `endpoint` at `now`, its backlog drained up to then."""
        bucket = self.buckets.get(endpoint)
        level = bucket.level(now) if bucket else 0.0
        return Load(level, *self.decode.get(endpoint, (0, 0.0)))

    def shift(self, endpoint: str, tokens: float, now: float, rate: float = 0.0) -> None:
        """Let a backlog grow, or shrink to no less than none; it drains at `rate` then, as before when that is 0."""
        bucket = self.buckets.pop(endpoint, None)
        level = max(0.0, (bucket.level(now) if bucket else 0.0) + tokens)
        if level > 0:
            self.buckets[endpoint] = Bucket(level, now, rate or (bucket.rate if bucket else 0.0))

    def pinned(self, session: str, now: float) -> str:
        """Endpoint of a live pin, or an empty text."""
        endpoint, until = self.pins.get(session, ("", 0.0))
        return endpoint if now < until else ""

    def pin(self, session: str, endpoint: str, until: float, max_pins: int) -> None:
        """Pin a session, and give up those used longest ago when there is no room for one more."""
        added = session not in self.pins
        self.pins[session] = (endpoint, until)
        self.pins.move_to_end(session)
        if added:
            for _ in range(min(len(self.pins) - max_pins, PINS_TRIMMED)):
                self.pins.popitem(last=False)

    def take(self, charge: OpenCharge) -> None:
        """Count what a charge holds in flight."""
        endpoint = charge.reservation.endpoint
        sequences, output_tokens = self.decode.get(endpoint, (0, 0.0))
        self.decode[endpoint] = sequences + charge.sequences, output_tokens + charge.output_tokens

    def give_back(self, charge: OpenCharge) -> None:
        """Count no longer what a charge held in flight; never below none."""
        endpoint = charge.reservation.endpoint
        sequences, output_tokens = self.decode.pop(endpoint, (0, 0.0))
        if sequences > charge.sequences:
            left = max(0.0, output_tokens - charge.output_tokens)
            self.decode[endpoint] = sequences - charge.sequences, left


class MemoryStore(MemoryBoard, MemoryFeed, MemoryQuota, MemoryDocuments):
    """A `Store` in plain dictionaries, with time from `clock`.

    Args:
        clock: where leases, pins and backlogs take their time from.
    """

    def __init__(self, clock: Clock) -> None:
        MemoryBoard.__init__(self, clock)
        MemoryFeed.__init__(self, clock)
        MemoryQuota.__init__(self, clock)
        MemoryDocuments.__init__(self, clock)
        self._clock = clock
        self._pools: dict[str, _Pool] = {}

    def _pool(self, name: str) -> _Pool:
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = _Pool()
        return pool

    async def reserve(self, ask: Reserve) -> Reservation:
        """See `Store.reserve`."""
        check(ask)
        pool, now = self._pool(ask.pool), self._clock.monotonic()
        known = pool.flights.get(ask.replica, {}).get(ask.charge_id)
        if known is not None:
            return known.reservation
        loads = [floored(each, pool.load(each.endpoint, now)) for each in ask.candidates]
        pin = pool.pinned(ask.pin_key, now) if ask.pin_key else ""
        choice = pick(ask, loads, pin)
        if choice.index < 0:
            return Reservation("", absent_pin=pin)
        candidate, load = ask.candidates[choice.index], loads[choice.index]
        reservation = Reservation(
            candidate.endpoint,
            choice.cost_ms,
            load.backlog_tokens,
            load.running,
            load.output_tokens,
            pinned=choice.pinned,
            moved=choice.moved,
        )
        self._charge(ask, candidate, reservation)
        return reservation

    def adopt(self, ask: Reserve, reservation: Reservation) -> None:
        """Charge what another store decided, and take over what it knows of the picked endpoint's backlog."""
        pool = self._pool(ask.pool)
        if ask.charge_id in pool.flights.get(ask.replica, {}):
            return
        # A repeated charge may have been picked among other candidates than these.
        unknown = Candidate(reservation.endpoint, 0.0, 0.0, ask.candidates[0].rate)
        candidate = next((each for each in ask.candidates if each.endpoint == unknown.endpoint), unknown)
        self._charge(ask, candidate, reservation)

    def _charge(self, ask: Reserve, candidate: Candidate, reservation: Reservation) -> None:
        pool, now, endpoint = self._pool(ask.pool), self._clock.monotonic(), candidate.endpoint
        pool.buckets[endpoint] = Bucket(reservation.backlog_tokens + candidate.tokens, now, candidate.rate)
        alone = msgspec.structs.replace(ask, candidates=(candidate,))
        charge = OpenCharge(alone, reservation, candidate.tokens, *decode_charge(ask))
        pool.take(charge)
        pool.flights.setdefault(ask.replica, {})[ask.charge_id] = charge
        pool.leases[ask.replica] = now + ask.lease_ms / 1000
        if key := ask.next_pin_key or ask.pin_key:
            pool.pin(key, endpoint, now + ask.pin_ttl_ms / 1000, ask.max_pins)

    def open_charges(self, pool: str, replica: str | None = None) -> Iterator[OpenCharge]:
        """Charges of a pool not settled yet, of one replica or of all; a copy is walked, so they may end meanwhile."""
        for owner, flight in list(self._pool(pool).flights.items()):
            if replica is None or owner == replica:
                yield from list(flight.values())

    def newest_pins(self, pool: str, most: int) -> list[str]:
        """Keys of pins, the one used last first, `most` at most; some may have ended."""
        return list(islice(reversed(self._pool(pool).pins), most))

    def pin_left(self, pool: str, pin_key: str) -> tuple[str, float]:
        """Endpoint of a pin, and the seconds of life left in it: 0 or less for one that has ended or never was."""
        endpoint, until = self._pool(pool).pins.get(pin_key, ("", -math.inf))
        return endpoint, until - self._clock.monotonic()

    def open_charge(self, pool: str, replica: str, charge_id: str) -> OpenCharge | None:
        """A charge as it is now; None for one that was not reserved, or is settled."""
        return self._pool(pool).flights.get(replica, {}).get(charge_id)

    async def settle(self, end: Settle) -> bool:
        """See `Store.settle`."""
        pool = self._pool(end.pool)
        flight = pool.flights.get(end.replica, {})
        charge = flight.pop(end.charge_id, None)
        if charge is None:
            return False
        if not flight:
            del pool.flights[end.replica]
        pool.give_back(charge)
        if end.refund:
            pool.shift(charge.reservation.endpoint, -charge.tokens, self._clock.monotonic())
        return True

    async def move(self, move: Move) -> bool:
        """See `Store.move`."""
        check_move(move)
        pool, now = self._pool(move.pool), self._clock.monotonic()
        flight = pool.flights.get(move.replica, {})
        charge = flight.get(move.charge_id)
        if charge is None or charge.reservation.endpoint == move.endpoint:
            return charge is not None
        served = Candidate(move.endpoint, 0.0, move.tokens, move.rate)
        moved = msgspec.structs.replace(
            charge,
            ask=msgspec.structs.replace(charge.ask, candidates=(served,)),
            reservation=msgspec.structs.replace(charge.reservation, endpoint=move.endpoint),
            tokens=move.tokens,
        )
        pool.give_back(charge)
        pool.shift(charge.reservation.endpoint, -charge.tokens, now)
        pool.shift(move.endpoint, move.tokens, now, move.rate)
        pool.take(moved)
        flight[move.charge_id] = moved
        return True

    async def pin(self, pool: str, pin_key: str, endpoint: str, pin_ttl_ms: int, max_pins: int = MAX_PINS) -> None:
        """See `Store.pin`."""
        check_pins(max_pins)
        self._pool(pool).pin(pin_key, endpoint, self._clock.monotonic() + pin_ttl_ms / 1000, max_pins)

    async def pinned(self, pool: str, pin_key: str) -> str:
        """See `Store.pinned`."""
        return self._pool(pool).pinned(pin_key, self._clock.monotonic())

    async def heartbeat(self, pool: str, replica: str, lease_ms: int) -> Beat:
        """See `Store.heartbeat`."""
        ledger, now = self._pool(pool), self._clock.monotonic()
        ledger.leases[replica] = now + lease_ms / 1000
        lapsed = [each for each, until in ledger.leases.items() if until <= now]
        reaped = sum(self._forget(ledger, each) for each in lapsed)
        ledger.buckets = {key: each for key, each in ledger.buckets.items() if each.level(now) > 0}
        # Those used longest ago end first, except after a change of their life; a pin's end is tested when it is read.
        while ledger.pins and next(iter(ledger.pins.values()))[1] <= now:
            ledger.pins.popitem(last=False)
        return Beat(reaped, len(ledger.flights.get(replica, {})))

    async def release(self, pool: str, replica: str) -> None:
        """See `Store.release`."""
        self._forget(self._pool(pool), replica)

    @staticmethod
    def _forget(pool: _Pool, replica: str) -> int:
        """Drop lease and charges of a replica; returns how many charges there were."""
        pool.leases.pop(replica, None)
        charges = pool.flights.pop(replica, {})
        for charge in charges.values():
            pool.give_back(charge)
        return len(charges)

    async def loads(self, pool: str) -> Mapping[str, Load]:
        """See `Store.loads`."""
        ledger, now = self._pool(pool), self._clock.monotonic()
        loads = {endpoint: ledger.load(endpoint, now) for endpoint in {*ledger.buckets, *ledger.decode}}
        return {endpoint: load for endpoint, load in loads.items() if load.backlog_tokens > 0 or load.running}

    async def ping(self, pool: str = "") -> None:
        """See `Store.ping`; memory always answers."""

    async def close(self) -> None:
        """See `Store.close`; there is nothing to release."""

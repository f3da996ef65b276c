"""What a ledger does, written down a second time from the definitions of its verbs, in plain dictionaries.

Nothing drains in it, and all prices are in one unit, so that every number is a small integer or a multiple of 1/1024.
Time is counted in seconds that pass between two verbs.
"""

from collections import Counter

import msgspec

from extproc.state.values import Beat, Candidate, Move, Reserve, Settle

# A token of backlog costs 1e12 ms, and so does all else that is counted here: prices are in these units. A hundredth of
# one is a tie, which swallows what real time drains.
STILL, UNIT_MS, TIE = 1e-9, 1e12, 0.01
# Output tokens are held in steps of 1/1024; the model counts the steps.
STEPS = 1024
# Nothing here lies near a multiple of the time that passes at once: real time passes too.
QUANTUM_S = 250
LEASE_MS, PIN_TTL_MS = 600_000, 1_100_000
TRIMMED = 8


class Held(msgspec.Struct, frozen=True):
    """An open charge."""

    endpoint: str
    tokens: int
    sequences: int
    output_steps: int


class Place(msgspec.Struct, frozen=True):
    """A pin, until it is given up: one that ended keeps its place until somebody looks for such."""

    endpoint: str
    until: float


class Decided(msgspec.Struct, frozen=True):
    """What a reservation has to answer; cost in units, output tokens in steps."""

    endpoint: str
    pinned: bool = False
    moved: bool = False
    absent_pin: str = ""
    cost: float = 0.0
    backlog: float = 0.0
    running: int = 0
    output_steps: int = 0


class Model:
    """One pool."""

    def __init__(self) -> None:
        self.now = 0.0
        self.flush()

    def flush(self) -> None:
        """Everything is lost."""
        self.charges: dict[tuple[str, str], Held] = {}
        self.answers: dict[tuple[str, str], Decided] = {}
        self.backlog: Counter[str] = Counter()
        self.leases: dict[str, float] = {}
        # The one used longest ago first.
        self.places: dict[str, Place] = {}

    def in_flight(self, endpoint: str) -> tuple[int, int]:
        """Sequences, and steps of output tokens."""
        held = [each for each in self.charges.values() if each.endpoint == endpoint]
        return sum(each.sequences for each in held), sum(each.output_steps for each in held)

    def load(self, each: Candidate) -> tuple[float, int, int]:
        """Backlog, sequences and output steps that count for a candidate."""
        in_ledger, steps = self.in_flight(each.endpoint)
        running = max(in_ledger, each.floor_running)
        views = [self.backlog[each.endpoint], each.floor_tokens, each.stalled_tokens * running]
        return max(views), running, steps

    def price(self, each: Candidate) -> float:
        """Cost of a candidate in units."""
        backlog, running, steps = self.load(each)
        return round(each.static_ms / UNIT_MS) + backlog + running + steps / STEPS

    def reserve(self, ask: Reserve) -> Decided:
        """Decide, charge and pin."""
        key = ask.replica, ask.charge_id
        if key in self.charges:
            return msgspec.structs.replace(self.answers[key], endpoint=self.charges[key].endpoint)
        price = {each.endpoint: self.price(each) for each in ask.candidates}
        least, pin = min(price.values()), self.pinned(ask.pin_key)
        if pin and pin not in price and not ask.ignore_pin:
            return Decided("", absent_pin=pin)
        allowed = least + ask.break_out_ms / UNIT_MS
        if pin and not ask.ignore_pin and (ask.strict or price[pin] <= allowed):
            endpoint = pin
        else:
            endpoint = next(each for each in price if price[each] <= least + ask.tie_ms / UNIT_MS)
        picked = next(each for each in ask.candidates if each.endpoint == endpoint)
        backlog, running, steps = self.load(picked)
        honoured = endpoint == pin and not ask.ignore_pin and (ask.strict or price[pin] <= allowed)
        moved = pin not in {"", endpoint}
        decided = Decided(endpoint, honoured, moved, "", price[endpoint], backlog, running, steps)
        self.charges[key] = Held(endpoint, int(picked.tokens), ask.sequences, round(ask.output_tokens * STEPS))
        self.answers[key] = decided
        self.backlog[endpoint] = int(backlog) + int(picked.tokens)
        self.leases[ask.replica] = self.now + ask.lease_ms / 1000
        if written := ask.next_pin_key or ask.pin_key:
            self.pin(written, endpoint, ask.max_pins)
        return decided

    def settle(self, end: Settle) -> bool:
        """End a charge."""
        held = self.charges.pop((end.replica, end.charge_id), None)
        if held is not None and end.refund:
            self.grow(held.endpoint, -held.tokens)
        return held is not None

    def move(self, move: Move) -> bool:
        """Move a charge."""
        key = move.replica, move.charge_id
        held = self.charges.get(key)
        if held is not None and held.endpoint != move.endpoint:
            self.grow(held.endpoint, -held.tokens)
            self.grow(move.endpoint, int(move.tokens))
            self.charges[key] = msgspec.structs.replace(held, endpoint=move.endpoint, tokens=int(move.tokens))
        return held is not None

    def grow(self, endpoint: str, tokens: int) -> None:
        """Change a backlog, to none at least."""
        self.backlog[endpoint] = max(0, self.backlog[endpoint] + tokens)

    def pin(self, session: str, endpoint: str, max_pins: int) -> None:
        """Pin a session; one that is added may push out some used longest ago."""
        added = self.places.pop(session, None) is None
        self.places[session] = Place(endpoint, self.now + PIN_TTL_MS / 1000)
        if added:
            for gone in list(self.places)[: min(TRIMMED, max(0, len(self.places) - max_pins))]:
                del self.places[gone]

    def pinned(self, session: str) -> str:
        """Endpoint of a live pin."""
        place = self.places.get(session)
        return place.endpoint if place is not None and self.now < place.until else ""

    def heartbeat(self, replica: str) -> Beat:
        """Renew a lease, reap, and forget pins that ended."""
        self.leases[replica] = self.now + LEASE_MS / 1000
        reaped = sum(self.release(dead) for dead in [who for who, until in self.leases.items() if until <= self.now])
        self.places = {session: place for session, place in self.places.items() if self.now < place.until}
        return Beat(reaped, sum(owner == replica for owner, _ in self.charges))

    def release(self, replica: str) -> int:
        """Forget a replica; how many charges it had."""
        self.leases.pop(replica, None)
        gone = [key for key in self.charges if key[0] == replica]
        for key in gone:
            del self.charges[key]
        return len(gone)

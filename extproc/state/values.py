"""The plain values that the verbs of the shared store take and return."""

from collections.abc import Sequence
from typing import Literal

import msgspec

MAX_PINS = 200_000
"""Pins that a pool keeps where nobody says otherwise."""


class Candidate(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One endpoint that may be picked, with its cost by local knowledge.

    Attributes:
        endpoint: endpoint id.
        static_ms: cost in milliseconds known to the caller, shared backlog and running requests left out.
        tokens: uncached prompt tokens this request would add to the endpoint's backlog.
        rate: prefill tokens a second the backlog drains at; positive.
        floor_tokens: backlog that the engine's own queue proves, whatever the ledger says; 0 when it proves none.
        floor_running: sequences that the engine itself reports, whatever the ledger says: others may use it too.
        stalled_tokens: prefill tokens that each sequence in flight still waits for, because the engine stands still;
            0 for an engine that works.
    """

    endpoint: str
    static_ms: float
    tokens: float
    rate: float
    floor_tokens: float = 0.0
    floor_running: int = 0
    stalled_tokens: float = 0.0


class Reserve(msgspec.Struct, frozen=True, gc=False):
    """One decision to be made and charged atomically.

    The store picks the candidate with the least `static_ms + backlog/rate * 1000 * backlog_weight +
    running * running_ms + outputs * output_ms`. There `running` is at least `floor_running`, and `backlog` at least
    `floor_tokens` and at least `stalled_tokens * running`. Among those within `tie_ms` of the least it picks the one
    that stands first in `candidates`. A live pin wins unless its cost exceeds the least by more than `break_out_ms`
    (never, when `strict`). The pick is pinned under `next_pin_key`, or under `pin_key` when that is empty.

    Attributes:
        pool: pool name; all keys of a pool share its hash tag.
        charge_id: unique id of the charge, chosen by the caller, used again to settle it.
        replica: id of the calling worker; its lease owns the charge.
        candidates: at most 32, in tie-break order.
        pin_key: hashed session key whose pin is honoured; empty for requests without a session.
        next_pin_key: key to pin the pick under when it is another one than `pin_key`: the next turn of an inferred
            conversation, or of a stored response, will ask for it.
        pin_ttl_ms: sliding life of the pin.
        max_pins: pins that the pool keeps, 1 at least; the one used longest ago goes for the next. A lowered bound is
            reached a few at a time, as sessions come that had no pin. A pin that ended has its place until a heartbeat.
        break_out_ms: how much dearer a pinned endpoint may be.
        strict: a strict pin holds while its endpoint is among the candidates.
        ignore_pin: decide as if no pin existed, then pin the result (used when the pinned endpoint cannot serve).
        sequences: answers that the engine generates for this request, at least 1; charged until it is settled.
        output_tokens: output tokens expected of all of them; charged until it is settled.
        running_ms: cost of one sequence in flight.
        output_ms: cost of one output token expected of the requests in flight.
        backlog_weight: 1 to count the shared backlog, 0 for policies that ignore load.
        tie_ms: costs this close are equal.
        lease_ms: how long the replica's charges outlive its last sign of life.
    """

    pool: str
    charge_id: str
    replica: str
    candidates: Sequence[Candidate]
    pin_key: str = ""
    next_pin_key: str = ""
    pin_ttl_ms: int = 1_800_000
    max_pins: int = MAX_PINS
    break_out_ms: float = 1000.0
    strict: bool = False
    ignore_pin: bool = False
    sequences: int = 1
    output_tokens: float = 0.0
    running_ms: float = 2.0
    output_ms: float = 0.0
    backlog_weight: float = 1.0
    tie_ms: float = 0.0
    lease_ms: int = 15_000


class Reservation(msgspec.Struct, frozen=True, gc=False):
    """What `reserve` decided.

    Attributes:
        endpoint: the picked endpoint, charged; empty when `absent_pin` is set and nothing was charged.
        cost_ms: full cost of the picked endpoint.
        backlog_tokens: its backlog before this charge, floor included.
        running: its sequences in flight before this charge.
        output_tokens: output tokens expected of those.
        pinned: the session's pin was honoured.
        moved: the session had a pin elsewhere and was moved (break-out, or `ignore_pin`).
        absent_pin: endpoint the session is pinned to, which is not among the candidates. Call again with it
            among them, or with `ignore_pin`.
    """

    endpoint: str
    cost_ms: float = 0.0
    backlog_tokens: float = 0.0
    running: int = 0
    output_tokens: float = 0.0
    pinned: bool = False
    moved: bool = False
    absent_pin: str = ""


class Settle(msgspec.Struct, frozen=True, gc=False):
    """End of a charge. Settling twice, or settling what was never reserved, changes nothing.

    Attributes:
        pool: pool of the charge.
        charge_id: id given to `reserve`.
        replica: replica that reserved it.
        refund: give the charge's tokens back to the backlog (the endpoint never prefilled them).
    """

    pool: str
    charge_id: str
    replica: str
    refund: bool = False


class Move(msgspec.Struct, frozen=True, gc=False):
    """Another endpoint serves a charge than the one picked: what it holds in flight, and its tokens, go there.

    Attributes:
        pool: pool of the charge.
        charge_id: id given to `reserve`.
        replica: replica that reserved it.
        endpoint: endpoint that serves it.
        tokens: prompt tokens that the new endpoint has to prefill for it; the old one gets its own back.
        rate: prefill tokens a second that the new endpoint's backlog drains at; positive.
    """

    pool: str
    charge_id: str
    replica: str
    endpoint: str
    tokens: float
    rate: float


class Beat(msgspec.Struct, frozen=True, gc=False):
    """What a heartbeat found.

    Attributes:
        reaped: charges taken from replicas whose lease ran out.
        known: open charges that the store has of the replica itself. Fewer than the replica has open were lost (a
            flushed store, a lease that ran out while its process stood still): they are to be reserved again. A charge
            that was damaged counts until the next count, a lease later at most.
        emptied: the store lost everything since the replica's last heartbeat, pins of idle sessions too.
    """

    reaped: int
    known: int
    emptied: bool = False


class Load(msgspec.Struct, frozen=True, gc=False):
    """Shared load of one endpoint now: prefill backlog in tokens (drained up to now), sequences in flight, outputs.

    `output_tokens` is what is expected of the requests in flight, in tokens.
    """

    backlog_tokens: float = 0.0
    running: int = 0
    output_tokens: float = 0.0


class FeedEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a pool's feed: its id (ordered, opaque) and its bytes."""

    id: str
    payload: bytes


class Snapshot(msgspec.Struct, frozen=True, gc=False):
    """Something as a whole, for who joins: `at` is the last feed entry that it includes, `parts` its bytes."""

    at: str
    parts: Sequence[bytes]


class BreakerRules(msgspec.Struct, frozen=True, gc=False):
    """When a breaker opens.

    Attributes:
        strikes: strikes in a row that open it, 1 at least.
        open_ms: how long it stays open the first time.
        max_open_ms: how long at most; one that was closed for so long starts anew with `open_ms`.
    """

    strikes: int
    open_ms: float
    max_open_ms: float


class Breaker(msgspec.Struct, frozen=True, gc=False):
    """The breaker of one endpoint now.

    Attributes:
        state: closed, open, or half open: one request at a time may try the endpoint.
        strikes: strikes in a row, while it is closed.
        openings: how often it opened lately.
        left_ms: how long it still stays open.
    """

    state: Literal["closed", "open", "half_open"] = "closed"
    strikes: int = 0
    openings: int = 0
    left_ms: float = 0.0

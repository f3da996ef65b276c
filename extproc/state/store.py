"""The verbs of the shared store.

Two implementations serve them: `memory.MemoryStore` (one process, tests, the fallback when Redis is gone) and
`redis.RedisStore`. One contract suite runs on both. A store knows endpoints by their id and nothing of pools'
policies; all arithmetic that must be atomic across replicas lives behind the verbs of the ledger.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from extproc.govern.breaker import Verdict
from extproc.state.document_store import DocumentStore
from extproc.state.quota_store import QuotaStore
from extproc.state.values import (
    MAX_PINS,
    Beat,
    Breaker,
    BreakerRules,
    FeedEntry,
    Load,
    Move,
    Reservation,
    Reserve,
    Settle,
    Snapshot,
)

READ_LIMIT = 256
"""Most entries that one `read` returns: who joins a full feed must not hold Redis up with one reply of all of it."""


class Store(QuotaStore, DocumentStore, Protocol):
    """What every replica shares. Methods raise `StoreError` when the store cannot answer, and nothing else."""

    async def reserve(self, ask: Reserve) -> Reservation:
        """Pick, charge and pin in one atomic step. Raises ValueError for what cannot be priced or charged."""
        ...

    async def settle(self, end: Settle) -> bool:
        """End a charge; True when it was still open."""
        ...

    async def move(self, move: Move) -> bool:
        """Move an open charge to the endpoint that serves it; False, and nothing changed, for one that is not open.

        One that is there already stays as it is, and the answer is True. Raises ValueError for numbers that cannot be
        charged.
        """
        ...

    async def pin(self, pool: str, pin_key: str, endpoint: str, pin_ttl_ms: int, max_pins: int = MAX_PINS) -> None:
        """Pin a session, whatever it was pinned to. Raises ValueError for a `max_pins` below 1."""
        ...

    async def pinned(self, pool: str, pin_key: str) -> str:
        """Endpoint that a live pin names, the pin's life left as it is; empty without one."""
        ...

    async def heartbeat(self, pool: str, replica: str, lease_ms: int) -> Beat:
        """Renew the replica's lease and reap charges of replicas whose lease ran out."""
        ...

    async def release(self, pool: str, replica: str) -> None:
        """Give up the lease and all open charges of this replica (clean shutdown)."""
        ...

    async def loads(self, pool: str) -> Mapping[str, Load]:
        """Current load per endpoint id; endpoints without any are absent."""
        ...

    async def put_states(self, pool: str, states: Mapping[str, bytes]) -> None:
        """Publish the latest state of endpoints (opaque bytes), replacing only the ids given."""
        ...

    async def drop_states(self, pool: str, endpoints: Collection[str]) -> None:
        """Take back what was published of these endpoints; those without anything are passed over."""
        ...

    async def states(self, pool: str) -> Mapping[str, bytes]:
        """Latest published state per endpoint id."""
        ...

    async def hold(self, pool: str, group: str, holder: str, names: Collection[str], lease_ms: int) -> Collection[str]:
        """Share work that is done once for the whole fleet; returns the names that `holder` has until its lease ends.

        Each name belongs to one living holder of its group at most. A holder keeps what it has while it calls again
        within `lease_ms`; what a holder loses, gives up or never had goes to those that have least. Holders end up with
        equally many, one more or less: who has more than its share gives some up when it calls. Names that are not
        asked for are given up.

        A holder makes one call at a time, and begins no work while it waits: with the answer others may have its names
        already. It stops work on names before it leaves them out. After a call that failed, what it has stays its own
        until `lease_ms` after it sent the last call that did not. A store that loses its data (a flush, a failover)
        forgets who has what; then two may have one name until both have called again.

        Args:
            pool: pool name.
            group: kind of work, and those who share it.
            holder: id of the process that would do it.
            names: all of the work, as this holder sees it; empty to leave the group at once.
            lease_ms: how long what it has stays its own without another call.
        """
        ...

    async def judge(self, pool: str, endpoint: str, verdict: Verdict, rules: BreakerRules) -> Breaker:
        """Take in what an answer says of its endpoint; returns its breaker afterwards (see `breakers.after`)."""
        ...

    async def probe(self, pool: str, endpoint: str, lease_ms: float) -> bool:
        """Whether the caller may send one request to an endpoint whose breaker is half open.

        Nobody else may until a verdict has come, or `lease_ms` are over.
        """
        ...

    async def breakers(self, pool: str) -> Mapping[str, Breaker]:
        """Breakers by endpoint id; those that are closed and have no strikes may be absent."""
        ...

    async def drop_breakers(self, pool: str, endpoints: Collection[str]) -> None:
        """Forget the breakers of endpoints that left."""
        ...

    async def put_snapshot(self, pool: str, name: str, at: str, parts: Sequence[bytes]) -> None:
        """Replace a snapshot as a whole: readers see the old one or the new one.

        Args:
            pool: pool name.
            name: what it is a snapshot of.
            at: id of the last feed entry that it includes.
            parts: its bytes, in pieces that the store may take one after the other; 64 KiB each at most.
        """
        ...

    async def snapshots(self, pool: str) -> Mapping[str, str]:
        """By name, the id of the last feed entry that each snapshot includes."""
        ...

    async def snapshot(self, pool: str, name: str) -> Snapshot | None:
        """A snapshot as it was put; None when there is none, or it was replaced again and again meanwhile."""
        ...

    async def drop_snapshots(self, pool: str, names: Collection[str]) -> None:
        """Take snapshots back; names without one are passed over."""
        ...

    async def append(self, pool: str, payload: bytes, cap: int) -> str:
        """Add an entry to the pool's feed, keep about the newest `cap`; returns its id."""
        ...

    async def read(self, pool: str, after: str, wait_ms: int) -> Sequence[FeedEntry]:
        """The oldest entries newer than the id `after` ("0" for all kept), `READ_LIMIT` at most.

        Waits up to `wait_ms` for the first one. A feed that started over (it was lost, and the clock that dates its
        entries stands earlier) is read from its beginning: ids older than `after` tell that.
        """
        ...

    async def ping(self, pool: str = "") -> None:
        """Raise `StoreError` unless the part of the store that has this pool answers; any part without a pool."""
        ...

    async def close(self) -> None:
        """Release connections; the store is not usable afterwards."""
        ...

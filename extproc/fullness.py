"""How full a pool is, as one worker sees it: the engines' pages, the shared ledger, and what it sent itself since."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import msgspec

from extproc.choose import filters
from extproc.choose.fleet import Endpoint, Pool
from extproc.clock import Clock
from extproc.config_overload import Saturation
from extproc.errors import StoreError
from extproc.govern.saturation import UNKNOWN, Batches, Member, Room, Thresholds, full_by_page, room
from extproc.state.store import Store
from extproc.state.values import Load


class Fullness:
    """One pool.

    Attributes:
        room: what it could take at the last look.
        in_flight: sequences that this worker has there.
        coming: sequences that were let through and are not in the ledger yet.
        coming_tokens: prompt tokens of these.
        at_work: at the last look, somebody had requests there; True while nobody could tell.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self.room = UNKNOWN
        self.in_flight = 0
        self.coming = 0
        self.coming_tokens = 0.0
        self.at_work = True
        self._store = store
        self._clock = clock
        self._batches = Batches()
        self._seen: Pool | None = None

    async def look(self, pool: Pool, settings: Saturation, subset: AbstractSet[str] | None = None) -> Room:
        """Read the ledger, and say what the pool can take beside what is on its way.

        Args:
            pool: the latest snapshot.
            settings: when an endpoint is saturated.
            subset: `ip:port` of the endpoints that count; None for all.
        """
        try:
            loads = await self._store.loads(pool.name)
        except StoreError:
            # A worker answers from its own ledger when Redis is gone; where there is none, nobody is turned away.
            self.room, self.at_work = UNKNOWN, True
            return UNKNOWN
        found = self._room(pool, settings, loads, subset)
        if subset is None:
            self.room = found
            mine = self.in_flight + self.coming > 0
            self.at_work = mine or any(load.running > 0 for load in loads.values())
        return msgspec.structs.replace(
            found, sequences=found.sequences - self.coming, tokens=found.tokens - self.coming_tokens
        )

    def passes(self, sequences: int, tokens: float) -> None:
        """A request is let through: until it is charged, the ledger does not show it."""
        self.coming += sequences
        self.coming_tokens += tokens

    def arrived(self, sequences: int, tokens: float) -> None:
        """It was charged, or came to nothing."""
        self.coming -= sequences
        self.coming_tokens = self.coming_tokens - tokens if self.coming else 0.0

    def _room(
        self, pool: Pool, settings: Saturation, loads: Mapping[str, Load], subset: AbstractSet[str] | None
    ) -> Room:
        now = self._clock.monotonic()
        limits = Thresholds(settings.waiting, settings.kv_usage, settings.backlog_ms)
        if pool is not self._seen:
            self._seen = pool
            for each in pool.endpoints:
                full = full_by_page(each.waiting, each.kv_usage, limits)
                self._batches.saw(each.id, each.running, each.waiting, now, full=full)
            self._batches.keep({each.id for each in pool.endpoints}, now)
        able = filters.usable(pool.endpoints, subset)
        members = [_member(each, loads.get(each.id)) for each in able]
        return room(members, self._batches.of(each.id for each in able), limits)


def _member(endpoint: Endpoint, load: Load | None) -> Member:
    return Member(
        id=endpoint.id,
        in_flight=max(load.running if load else 0, endpoint.floor_running),
        backlog_tokens=load.backlog_tokens if load else 0.0,
        rate=endpoint.rate,
        waiting=endpoint.waiting,
        kv_usage=endpoint.kv_usage,
        silent=endpoint.silent_ms > 0.0,
    )

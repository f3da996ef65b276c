"""Which part of the fleet's work this keeper does: leases in the store, believed by this host's own clock alone.

Rules:
- A lease counts from before the call that brought it was sent, so that it ends here before it ends in the store. Who
  was frozen sees on its own clock that its lease is over, and must not act before it has called again.
- A keeper that cannot reach the store goes on until its lease is over, because others may take its work then. When the
  store was silent for one more lease, nobody else can take anything either, and the keeper does by itself what it held
  last: it is *alone*. One that never heard from the store does not know what others do, and does everything. Who is
  alone works slowly, so that many of them do not multiply the work, and publishes nothing.
"""

import asyncio
import logging
import math
from collections.abc import Collection, Mapping
from typing import Final, Protocol

import msgspec

from extproc.clock import Clock
from extproc.config import Config
from extproc.errors import StoreError

_STEADY: Final = 3
"""Calls a lease while nothing changes: two may be lost."""
_RESTLESS: Final = 10
"""Calls a lease after a change, for one lease: names that another keeper gives up are picked up within a tenth."""

_log = logging.getLogger(__name__)


class Sharer(Protocol):
    """The verb of `state.store.Store` that is needed here."""

    async def hold(self, pool: str, group: str, holder: str, names: Collection[str], lease_ms: int) -> Collection[str]:
        """See `Store.hold`."""
        ...


class _Share(msgspec.Struct):
    """What is held in one pool.

    Attributes:
        names: by the last answer, less what was not asked for since.
        until: end of the lease, on the monotonic clock.
        heard: the store answered at least once.
        deaf_since: first of the calls in a row that failed, up to now.
    """

    names: frozenset[str] = frozenset()
    until: float = -math.inf
    heard: bool = False
    deaf_since: float = math.inf


class Holding:
    """This keeper's share of one kind of work in all pools.

    Args:
        store: where the work is shared.
        group: kind of work.
        holder: id of this keeper.
        clock: dates the leases, by monotonic time.
    """

    def __init__(self, store: Sharer, group: str, holder: str, clock: Clock) -> None:
        self.holder = holder
        self._store = store
        self._group = group
        self._clock = clock
        self._lease_ms = 3000
        self._shares: dict[str, _Share] = {}
        self._asked: dict[str, frozenset[str]] = {}
        self._next = -math.inf
        self._restless_until = -math.inf

    def apply(self, config: Config) -> None:
        """Take the length of a lease from a configuration; holds from the next call on."""
        self._lease_ms = config.redis.hold_ms

    @property
    def _lease_s(self) -> float:
        return self._lease_ms / 1000

    def due(self, work: Mapping[str, Collection[str]]) -> bool:
        """Whether it is time to call `renew`: a part of a lease has passed, or the work is other than at the last."""
        return self._clock.monotonic() >= self._next or self._asked != _frozen(work)

    async def renew(self, work: Mapping[str, Collection[str]]) -> dict[str, frozenset[str]]:
        """Renew the leases; never raises. Begin nothing while it goes on.

        Args:
            work: by pool, the names of all of it.

        Returns:
            By pool, names that somebody else may have worked on since this keeper last did.
        """
        asked = _frozen(work)
        before = {pool: share.names for pool, share in self._shares.items()}
        pools = [*asked, *(self._shares.keys() - asked.keys())]
        told = await asyncio.gather(*(self._renew(pool, asked.get(pool, frozenset())) for pool in pools))
        now = self._clock.monotonic()
        if self._asked != asked or before != {pool: share.names for pool, share in self._shares.items()}:
            self._restless_until = now + self._lease_s
        self._asked = asked
        restless = now < self._restless_until or any(self.deaf(pool) for pool in asked)
        self._next = now + self._lease_s / (_RESTLESS if restless else _STEADY)
        return dict(zip(pools, told, strict=True))

    async def _renew(self, pool: str, names: frozenset[str]) -> frozenset[str]:
        share = self._shares.setdefault(pool, _Share())
        share.names &= names
        begun = self._clock.monotonic()
        try:
            got = frozenset(await self._store.hold(pool, self._group, self.holder, names, self._lease_ms))
        except StoreError as error:
            if not self.deaf(pool):
                _log.warning("the keepers' work is not shared", extra={"pool": pool, "error": str(error)})
                share.deaf_since = self._clock.monotonic()
            return frozenset()
        # Looked at afterwards: a call that took long may have come after the lease's end.
        unbroken = share.names if self._clock.monotonic() < share.until else frozenset()
        if self.deaf(pool):
            _log.warning("the keepers' work is shared again", extra={"pool": pool})
        if got != share.names:
            _log.info("this keeper's share of the work", extra={"pool": pool, "work": self._group, "held": len(got)})
        if names:
            self._shares[pool] = _Share(got, begun + self._lease_s, heard=True)
        else:
            del self._shares[pool]
        return got - unbroken

    async def leave(self) -> None:
        """Give everything up; never raises. Stop all work before."""
        await self.renew({})
        self._shares.clear()

    def held(self, pool: str) -> frozenset[str]:
        """Names of a pool that this keeper may work on now, by its lease."""
        share = self._shares.get(pool)
        return share.names if share and self._clock.monotonic() < share.until else frozenset()

    def deaf(self, pool: str) -> bool:
        """Whether the store did not answer the last call."""
        share = self._shares.get(pool)
        return share is not None and share.deaf_since < math.inf

    def alone(self, pool: str) -> bool:
        """Whether the store has been silent for so long that this keeper goes on by itself."""
        share, now = self._shares.get(pool), self._clock.monotonic()
        return share is not None and now >= share.until and now >= share.deaf_since + self._lease_s

    def own(self, pool: str) -> frozenset[str]:
        """Names that are this keeper's by the last it heard, whether its lease is over or not; all when it never did.

        All, too, only once it is alone.
        """
        share = self._shares.get(pool)
        if share is None:
            return frozenset()
        if share.heard:
            return share.names
        return self._asked.get(pool, frozenset()) if self.alone(pool) else frozenset()


def _frozen(work: Mapping[str, Collection[str]]) -> dict[str, frozenset[str]]:
    return {pool: frozenset(names) for pool, names in work.items() if names}

"""What waits for a pool at each worker, in the store: by it workers share what becomes free."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from extproc.clock import Clock
from extproc.errors import StoreError
from extproc.govern.shares import Demand
from extproc.request.session import pin_key
from extproc.state.store import Store

BOARD: Final = "~queues"
"""Added to a pool's name for the place where its workers' queues stand; no pool's own name has such a sign."""
_FRESH_S: Final = 1.0
"""What a worker told is believed so long after it last changed: it tells anew every 50 ms while somebody waits."""
_GONE_S: Final = 30.0
_MOST: Final = 256
"""Tenants of one worker that are told, those with most tokens first."""

_Note = tuple[int, list[tuple[int, str, float]]]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Note).decode


def mark(secret: bytes, tenant: str) -> str:
    """What stands for a tenant in the store, which its name does not enter: who reads it cannot test names either."""
    return pin_key(secret, "queues", tenant)


class QueueBoard:
    """The queues of one pool, as this worker sees them."""

    def __init__(self, store: Store, pool: str, replica: str, clock: Clock) -> None:
        self._store = store
        self._pool = pool + BOARD
        self._replica = replica
        self._clock = clock
        self._number = 0
        self._told = False
        self._others: dict[str, tuple[bytes, float]] = {}

    async def tell(self, mine: Demand) -> None:
        """Put up what waits here, by class and tenant's mark; an empty demand is told once."""
        if not mine and not self._told:
            return
        self._number += 1
        most = sorted(((band, name, tokens) for (band, name), tokens in mine.items()), key=lambda each: -each[2])[
            :_MOST
        ]
        try:
            await self._store.put_states(self._pool, {self._replica: _encode((self._number, most))})
        except StoreError:
            return
        self._told = bool(mine)

    async def others(self) -> Sequence[Demand]:
        """What waits at the other workers, of those that told it lately."""
        try:
            notes = await self._store.states(self._pool)
        except StoreError:
            return ()
        now, found = self._clock.monotonic(), list[Demand]()
        for replica, note in notes.items():
            if replica == self._replica:
                continue
            known = self._others.get(replica)
            if known is None or known[0] != note:
                # One that is seen for the first time may be long dead: it counts from its next change on.
                known = self._others[replica] = note, now if known is not None else now - _FRESH_S
            if now - known[1] < _FRESH_S and (demand := _read(note)):
                found.append(demand)
        await self._forget(notes, now)
        return found

    async def leave(self) -> None:
        """Take down what this worker told."""
        if self._number:
            await self._drop([self._replica])

    async def _forget(self, notes: Mapping[str, bytes], now: float) -> None:
        for gone in self._others.keys() - notes.keys():
            del self._others[gone]
        if old := [name for name, (_, since) in self._others.items() if now - since > _GONE_S]:
            await self._drop(old)

    async def _drop(self, replicas: Sequence[str]) -> None:
        try:
            await self._store.drop_states(self._pool, replicas)
        except StoreError:
            return


def _read(note: bytes) -> Demand:
    """What a note says; nothing where another version of Warmpath wrote it."""
    try:
        _, told = _decode(note)
    except msgspec.MsgspecError:
        return {}
    return {(band, name): tokens for band, name, tokens in told if tokens > 0.0}

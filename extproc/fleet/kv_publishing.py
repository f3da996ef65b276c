"""Brings precise profiles into a pool's feed, where workers read them like what any replica tells.

Rules:
- Entries are numbered, so that workers notice one that they missed, and catch up from one another's snapshots.
- A little is taken at a time, `BLOCKS_A_S` at the most: a profile of 100,000 blocks that is told anew goes out in less
  than a second, and takes workers some 10 % of that. A fleet of 100 busy engines fills a third of this.
- Nothing is taken while the store refuses what was taken before. What changes meanwhile waits in the profiles, which
  bound it themselves.
- A store that was gone, and not just slow, may have lost what it took: all profiles of the pool are told anew when it
  is back. So are they when the feed started over, which shows in ids that go back.
- What was taken but not sent must not be told any more once the endpoints may belong to another keeper: it is given up,
  and all is told anew under another name, whose numbers begin again.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from extproc.errors import StoreError
from extproc.fleet.kv_telling import Telling
from extproc.state.deltas import Cached, Delta, Evicted, is_sound
from extproc.state.keys import parse_feed_id
from extproc.state.trouble import StoreDeadlineError
from extproc.state.window import Window

BLOCKS_A_S: Final = 160_000
"""Most blocks told in a second: 1.3 MB, in entries of 64 KB."""
_LEAST: Final = 8192
_MOST_DELTAS: Final = 5000
"""An outbox takes 10,000."""
_LONGEST_S: Final = 0.5
"""A keeper that comes late, because its host is busy, takes what has gathered since, up to this time."""
FEED_BYTES: Final = 64 * 1024 * 1024
"""As in `gossip`: most bytes of a pool's feed. Only what this keeper writes is counted here; workers count all."""
RETRY_S: Final = 0.25

_log = logging.getLogger(__name__)


class Box(Protocol):
    """What is needed of `outbox.Outbox`."""

    def put(self, delta: Delta) -> bool:
        """See `Outbox.put`."""
        ...

    def entry(self) -> bytes:
        """See `Outbox.entry`."""
        ...

    def sent(self) -> object:
        """See `Outbox.sent`."""
        ...


class Feed(Protocol):
    """The verb of `state.store.Store` that is needed here."""

    async def append(self, pool: str, payload: bytes, cap: int) -> str:
        """See `Store.append`."""
        ...


class Publishing:
    """One pool's feed, as this keeper writes it.

    Args:
        pool: pool name.
        store: where the feed is.
        new_box: makes an empty outbox, each under another name.
        cap: entries that the feed keeps.
    """

    def __init__(self, pool: str, store: Feed, new_box: Callable[[], Box], cap: int) -> None:
        self._pool = pool
        self._store = store
        self._new_box = new_box
        self._box = new_box()
        self._window = Window(cap, FEED_BYTES)
        self._last = (0, 0)
        self._failed_at: float | None = None
        self._was_gone = False
        self._unsent = False
        self._turn = 0
        self._taken_at: float | None = None

    def give_up(self) -> bool:
        """Take back what was not sent yet, because others may have its endpoints now; False when there is nothing."""
        if not self._unsent:
            return False
        self._box, self._unsent = self._new_box(), False
        return True

    async def flush(self, tellings: Sequence[Telling], now: float) -> bool:
        """Send what is to be told; never raises.

        Args:
            tellings: profiles of endpoints that this keeper has now.
            now: monotonic time, seconds.

        Returns:
            False when the store may have lost what it took: all must be told anew.
        """
        if self._failed_at is not None and now < self._failed_at + RETRY_S:
            return True
        if not self._unsent:
            late_s = 0.0 if self._taken_at is None else min(now - self._taken_at, _LONGEST_S)
            self._take(tellings, max(_LEAST, int(BLOCKS_A_S * late_s)))
            self._taken_at = now
        while entry := self._box.entry():
            self._unsent = True
            try:
                at = parse_feed_id(await self._store.append(self._pool, entry, self._window.entries))
            except StoreError as error:
                self._failed(error, now)
                return True
            self._box.sent()
            self._window.saw(at, len(entry))
            if self._failed_at is not None:
                self._failed_at = None
                _log.warning("KV events reach the workers again", extra={"pool": self._pool})
            back, self._last = at < self._last, at
            if back or self._was_gone:
                self._was_gone = False
                self._unsent = bool(self._box.entry())
                return False
        self._unsent = False
        return True

    def _take(self, tellings: Sequence[Telling], left: int) -> None:
        """Queue the next deltas, about so many blocks of them; every profile has its turn."""
        count, queued = len(tellings), 0
        for place in range(count):
            telling = tellings[(self._turn + place) % count]
            if not telling.is_due:
                continue
            deltas = telling.take(left)
            for delta in filter(is_sound, deltas):
                # It was emptied before, and takes more than one flush. What cannot be (an absurd size of blocks) it
                # would refuse, which readers would take for a loss of everything.
                self._box.put(delta)
            queued += len(deltas)
            left -= sum(len(delta.blocks) // 8 for delta in deltas if isinstance(delta, Cached | Evicted))
            if left <= 0 or queued >= _MOST_DELTAS:
                self._turn = (self._turn + place + 1) % count
                break

    def _failed(self, error: StoreError, now: float) -> None:
        if self._failed_at is None:
            _log.warning("KV events do not reach the workers", extra={"pool": self._pool, "error": str(error)})
        self._failed_at = now
        self._was_gone = self._was_gone or not isinstance(error, StoreDeadlineError)

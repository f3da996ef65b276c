"""Takes in one pool's feed: what it skips, how old it is, and whether something is missing. No I/O."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import msgspec

from extproc.state import feed
from extproc.state.feed import Batch, DamagedError, Delta, OtherVersionError
from extproc.state.keys import parse_feed_id
from extproc.state.knowledge import PoolKnowledge
from extproc.state.values import FeedEntry
from extproc.state.window import Window

Key = tuple[int, int]
"""A feed id as numbers: milliseconds of the store's clock, and a sequence number."""

BEGINNING: Key = (0, 0)
_PREFILL_S = 60.0
"""A prefill that was decided longer ago is over."""
_ORIGINS = 4096
"""Replicas whose last number is remembered; each process is one."""

log = logging.getLogger(__name__)


class Counts(msgspec.Struct):
    """Counters since the start, for metrics.

    Attributes:
        other_version: entries and snapshots that were skipped because a worker of another version wrote them.
        damaged: entries and snapshots that could not be read, or said what cannot be.
        lost: deltas given up because the store did not take them for too long; only other replicas miss them.
        gaps: times that entries were missed which others had sent.
        started_over: times that a feed was found to have started over.
        restored: snapshots taken over.
        written: snapshots written.
    """

    other_version: int = 0
    damaged: int = 0
    lost: int = 0
    gaps: int = 0
    started_over: int = 0
    restored: int = 0
    written: int = 0


class Follower:
    """One pool's feed, as one worker reads it.

    Attributes:
        cursor: last entry read.
        frontier: newest entry ever read; `cursor` is before it while entries are read again.
        taken: last entry that was taken in as a whole.
        missed: entry at which something was found to be missing that was not caught up since; None for none.
        window: how much of the feed is kept.
    """

    def __init__(
        self,
        known: PoolKnowledge,
        replica: str,
        window: Window,
        counts: Counts,
        publish: Callable[[Delta], None],
    ) -> None:
        """Start at the beginning.

        Args:
            known: what deltas are applied to.
            replica: this worker, which knows already what it told.
            window: filled here.
            counts: counted here.
            publish: takes corrections that the other replicas should be told.
        """
        self.cursor = self.frontier = self.taken = BEGINNING
        self.missed: Key | None = None
        self.window = window
        self._known = known
        self._replica = replica
        self._counts = counts
        self._publish = publish
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._taking = ("", 0)  # who told what is not taken in as a whole yet, and the number before it
        self._expected: dict[str, tuple[Key, str, int]] = {}
        self._heard: tuple[Key, Mapping[str, int]] | None = None
        self._goal: Key | None = None
        self._goal_at = 0.0
        # What snapshots include, and up to where the rest was applied before they were taken over.
        self._included: dict[str, Key] = {}
        self._applied = BEGINNING
        self._until = BEGINNING
        self._own = 0

    @property
    def caught_up(self) -> bool:
        """It has read all that was there when it joined, and knows of nothing that it missed since."""
        reached = self._goal is not None and self.cursor >= max(self._goal, self.frontier)
        return reached and self.missed is None

    @property
    def after(self) -> str:
        """Id to read on from."""
        return as_id(self.cursor)

    @property
    def numbers(self) -> Mapping[str, int]:
        """Last number of each replica that told something, up to `taken`: for snapshots."""
        origin, before = self._taking
        return {**self._numbers, origin: before} if origin else self._numbers

    def heard(self, key: Key, numbers: Mapping[str, int]) -> None:
        """By a snapshot of the pool, what had the last number of each replica been at this entry.

        Who joins misses something too when it is not there any more. Until it has read up to this entry, what it reads
        may have these numbers or earlier ones.
        """
        self._heard = key, numbers

    def expect(self, endpoint: str, key: Key, owner: str, number: int) -> None:
        """An exact profile was taken over that has what its owner had told by this entry, up to this number of it.

        When what comes next was cut off from the feed already, the profile is not to be had.
        """
        if number:
            self._expected[endpoint] = key, owner, number

    def joined(self, goal: Key, now: float) -> None:
        """The feed ended at `goal` at this time: what is older was decided before."""
        self._goal, self._goal_at = goal, now

    def age_s(self, key: Key) -> float:
        """How long before it joined an entry was written, in seconds; 0 for one that was written later."""
        return max(0.0, (self._goal[0] - key[0]) / 1000) if self._goal else 0.0

    def then(self, key: Key, now: float) -> float:
        """When an entry was written, by this worker's clock; present time for one written since it joined."""
        age_s = self.age_s(key)
        return self._goal_at - age_s if age_s else now

    def resume(self, included: Mapping[str, Key], start: Key, own: int) -> None:
        """Snapshots were taken over: read on from an entry before this one, without what is known already.

        Args:
            included: by subject, the last entry that its snapshot includes.
            start: where to read on from; not after any of those, nor after the frontier.
            own: last number under which this worker told something that the snapshots may lack.
        """
        self._included = dict(included)
        self._applied = self.frontier
        self._until = max(self.frontier, *included.values()) if included else self.frontier
        self.cursor = self.taken = min(start, self.frontier) if self.frontier > BEGINNING else start
        self._own = own

    def take(self, entry: FeedEntry, now: float) -> Iterator[None]:
        """Take in the next entry, delta by delta; `now` is this worker's clock, in seconds.

        One of 64 KB takes 4 ms in all, if each of its deltas has a hundred blocks.
        """
        key = parse_feed_id(entry.id)
        yield from self._take(key, entry, now)
        self.taken, self._taking = key, ("", 0)

    def _take(self, key: Key, entry: FeedEntry, now: float) -> Iterator[None]:
        if key <= self.cursor:
            self._start_over()
        self.cursor = key
        if self._heard and key > self._heard[0]:
            for origin, number in self._heard[1].items():
                self._numbers[origin] = max(number, self._numbers.get(origin, 0))
            self._heard = None
        fresh = key > self.frontier
        if fresh:
            self.frontier = key
            self.window.saw(key, len(entry.payload))
        batch = self._read(entry.payload)
        if batch is None or (fresh and not self._next(batch, key)):
            return
        if self._expected:
            self._continued(batch, key)
        own, again = batch.origin == self._replica, key <= self._until
        if own and not (self._included and batch.number <= self._own):
            return
        then, old = self.then(key, now), self.age_s(key) > _PREFILL_S
        for delta in chain.from_iterable(map(feed.in_pieces, batch.deltas)):
            about = feed.subject(delta)
            known = own and about not in self._included
            if known or (again and key <= self._included.get(about, self._applied)):
                continue
            for correction in self._known.apply(delta, then, old=old, origin=batch.origin):
                self._publish(correction)
            yield

    def _read(self, payload: bytes) -> Batch | None:
        try:
            return feed.decode(payload)
        except OtherVersionError as error:
            if not self._counts.other_version:
                log.warning("feed entries of another version are skipped", extra={"error": str(error)})
            self._counts.other_version += 1
        except DamagedError as error:
            if not self._counts.damaged:
                log.warning("damaged feed entries are skipped", extra={"error": str(error)})
            self._counts.damaged += 1
        return None

    def _next(self, batch: Batch, key: Key) -> bool:
        """Whether a batch is one that was not seen before; notes it when some are missing before it."""
        origin, number = batch.origin, batch.number
        if number == 0:
            return True
        last = self._numbers.get(origin)
        if last is not None and number <= last:
            return False
        self._taking = origin, last or 0
        self._numbers[origin] = number
        self._numbers.move_to_end(origin)
        if len(self._numbers) > _ORIGINS:
            self._numbers.popitem(last=False)
        if last is not None and number > last + 1 and origin != self._replica:
            self._counts.gaps += 1
            self.missed = key
            # A profile that lacks an eviction is wrong for as long as the block is not stored again.
            self._known.caches.exact.index.missed(origin)
        return True

    def _continued(self, batch: Batch, key: Key) -> None:
        """See whether exact profiles that were taken over are continued by this batch."""
        for endpoint, (at, owner, number) in tuple(self._expected.items()):
            if owner == batch.origin and key > at and batch.number > number:
                del self._expected[endpoint]
                if batch.number > number + 1:
                    self._known.caches.exact.index.suspend(endpoint)

    def _start_over(self) -> None:
        self._counts.started_over += 1
        log.warning("a feed started over; following it from its beginning")
        self.window.started_over()
        self.frontier = self.taken = self._applied = self._until = BEGINNING
        self._included.clear()
        self._expected.clear()
        if self._goal is not None:
            self._goal = BEGINNING


def as_id(key: Key) -> str:
    """A key as the store takes it."""
    return f"{key[0]}-{key[1]}"

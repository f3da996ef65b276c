"""The precise profile of one rank of one endpoint, as its events build it, and when workers are told to use it.

Rules:
- In a pool of `precise` profiles it is told as soon as the stream is in step, with what is known by then. It knows too
  little of an engine that was joined late, and completes itself as the engine's cache turns over.
- In a pool of `auto` ones it is told when it is complete (see `kv_chain`); the estimated one counts until then.
- Once told it stays in use while it is kept up without a gap.
- Workers may have been told a profile by the keeper that read the endpoint before. It is in use until this one is told
  instead; if that takes longer than `_GRACE_S`, or cannot be yet, workers go back to the estimated one.
- A batch that cannot be read may have had removals in it: all is forgotten, and nothing is told for `_PAUSE_S`, so that
  an engine whose every batch is unreadable does not make workers change from one profile to the other all the time.
  A stream that had to be forgotten over and over is not told of for `_RESTLESS_S`.
- A profile whose stream is out of step for `_APART_S` may promise what is gone: workers go back to the estimated one,
  and are told it anew when the stream is in step again. A replay takes a second. The same goes for one that was put
  aside because its keeper stood still.
- So is it done for `_DISTRUST_S` with an engine that does not tell what it removes: its profile promises what is gone.
- All is told anew under another start of the engine: workers drop what they were told of an earlier one. If the events
  began after that start, they are of this life already and stay; otherwise they are asked for again.
"""

import math
from collections.abc import Iterator
from typing import Final

import msgspec

from extproc.config import ProfileMode
from extproc.engines.kv_values import Cleared, EventBatch, Moved, Removed, Stored
from extproc.fleet.kv_chain import Chain, Emptied, LeftOut
from extproc.fleet.kv_tally import Tally
from extproc.fleet.kv_telling import Telling

_PAUSE_S: Final = 10.0
_RESTLESS_S: Final = 30.0
_DISTRUST_S: Final = 600.0
_GRACE_S: Final = 3.0
_APART_S: Final = 5.0
_CATCH_UP_S: Final = 1.0
"""After a keeper stood still, what came meanwhile is first read from the network by libzmq's own thread."""
_SLACK_S: Final = 5.0
"""Events this long before an engine's start are of its new life: the start may be the keeper's guess, a scrape late. No
engine starts again so soon."""


class Counts(msgspec.Struct):
    """What happened to the events of one pool, since this process started.

    Attributes:
        stored: events that blocks were stored.
        removed: events that blocks were removed.
        moved: events that a block changed its tier.
        cleared: events that a cache was emptied.
        skipped: events of kinds that are not known or do not count.
        malformed: messages that are no batch.
        unreadable: batches whose events cannot be read.
        gap: profiles forgotten because events were lost for good.
        restart: profiles forgotten because the engine had started again.
        apart: profiles that workers were told to put aside, because something was missing for too long, or the keeper
            stood still.
        overfull: profiles forgotten because more blocks were told of than the cache can hold.
        retold: profiles told anew because too much waited to be told.
        left_out: blocks that were not taken in.
        streams: what was missing and asked for again.
    """

    stored: int = 0
    removed: int = 0
    moved: int = 0
    cleared: int = 0
    skipped: int = 0
    malformed: int = 0
    unreadable: int = 0
    gap: int = 0
    restart: int = 0
    apart: int = 0
    overfull: int = 0
    retold: int = 0
    left_out: LeftOut = msgspec.field(default_factory=LeftOut)
    streams: Tally = msgspec.field(default_factory=Tally)


class Engine(msgspec.Struct, frozen=True):
    """What is known of an engine beside its events.

    Attributes:
        mode: mode of profiles in its pool.
        started_at: start of its process, seconds since the epoch; 0 when unknown.
        block_tokens: tokens in a block by its metrics; 0 when unknown.
        rank_blocks: blocks in the GPU cache of one rank; 0 when unknown.
        copies: it tells of each copy of a block; see `kv_chain`.
    """

    mode: ProfileMode
    started_at: float = 0.0
    block_tokens: int = 0
    rank_blocks: int = 0
    copies: bool = False


class Profile:
    """One rank of one endpoint.

    Attributes:
        chain: what is cached.
        telling: what of it the workers have not been told yet.
        lag_s: from the engine's clock when it published the last batch to ours; 0 when it does not tell.
    """

    def __init__(self, endpoint: str, rank: int, counts: Counts, now: float) -> None:
        """Know nothing; what happens is counted in `counts`; `now` is monotonic time in seconds."""
        self.chain = Chain(counts.left_out)
        self.telling = Telling(endpoint, rank, self.chain)
        self.lag_s = 0.0
        self._counts = counts
        self._known = False
        self._tells_copies = True
        self._began_at = 0.0
        self._paused_until = 0.0
        self._started_at = -1.0
        self._answer_by = now + _GRACE_S
        self._in_step_at = now

    @property
    def is_partial(self) -> bool:
        """Blocks may be cached of which nobody told us."""
        return not self.chain.is_complete(0)

    def forget(self, engine: Engine) -> None:
        """Know nothing, and have workers go back to the estimated profile."""
        if self.telling.is_open:
            self.telling.end(engine.started_at)
        self.chain.begin(from_start=False)
        self._known = False

    def begin(self, engine: Engine, *, from_start: bool) -> None:
        """Know nothing yet of what the coming events tell."""
        copies = engine.copies and self._tells_copies
        self.chain.begin(from_start=from_start, block_tokens=engine.block_tokens, copies=copies)
        self.telling.note(Emptied())
        self._known = True
        self._began_at = 0.0

    def lose(self, engine: Engine, now: float) -> None:
        """Events came that cannot be read."""
        self._counts.unreadable += 1
        self.forget(engine)
        self.begin(engine, from_start=False)
        self._paused_until = max(self._paused_until, now + _PAUSE_S)

    def pause(self, now: float) -> None:
        """Tell nothing for a while: it was forgotten too often."""
        self._paused_until = max(self._paused_until, now + _RESTLESS_S)

    def put_aside(self, engine: Engine, now: float) -> None:
        """What is known may be old: workers use the estimated profile until the events were caught up with."""
        self._paused_until = max(self._paused_until, now + _CATCH_UP_S)
        if self.telling.is_open:
            self._counts.apart += 1
            self.telling.end(engine.started_at)

    def apply(self, batch: EventBatch, wall: float) -> Iterator[None]:
        """Take in a batch, in steps of about 1 ms.

        Args:
            batch: the batch.
            wall: present time, seconds since the epoch; counts for batches that have none.
        """
        counts = self._counts
        counts.skipped += batch.skipped
        self.lag_s = max(0.0, wall - batch.at) if batch.at else 0.0
        self._began_at = self._began_at or batch.at or wall
        for event in batch.events:
            match event:
                case Stored():
                    counts.stored += 1
                case Removed():
                    counts.removed += 1
                case Moved():
                    counts.moved += 1
                case Cleared():
                    counts.cleared += 1
            for change in self.chain.apply(event):
                counts.retold += not self.telling.note(change)
                yield
            yield  # for events that change nothing: a batch may have very many of them

    def settle(self, engine: Engine, now: float, *, in_step: bool) -> bool:
        """Tell the workers of it when it is time; False when its events are to be had from the beginning again.

        Args:
            engine: what is known of the engine.
            now: monotonic time, seconds.
            in_step: nothing is missing as far as is known.
        """
        before, self._started_at = self._started_at, engine.started_at
        other = before > 0 and before != engine.started_at
        if other and 0 < self._began_at < engine.started_at - _SLACK_S:
            return False
        if self.chain.tells_too_much(engine.rank_blocks):
            self._tells_copies = False
            self.forget(engine)
            self.begin(engine, from_start=False)
        if self.chain.lacks_removals(engine.rank_blocks):
            self._counts.overfull += 1
            self.forget(engine)
            self.begin(engine, from_start=False)
            self._paused_until = now + _DISTRUST_S
        if in_step:
            self._in_step_at = now
        if self.telling.is_open:
            if now - self._in_step_at > _APART_S:
                self.put_aside(engine, now)
            elif before != engine.started_at:
                self.telling.begin(engine.started_at)
            return True
        ready = in_step and self._known and self.chain.block_tokens > 0 and now >= self._paused_until
        if ready and (engine.mode == "precise" or self.chain.is_complete(engine.rank_blocks)):
            self._answer_by = math.inf
            self.telling.begin(engine.started_at)
        elif ready or now >= self._answer_by:
            if self._answer_by < math.inf:
                self.telling.end(engine.started_at)
            self._answer_by = math.inf
        return True

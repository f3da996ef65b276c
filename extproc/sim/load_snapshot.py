"""What SGLang says of its load: numbers that are refreshed from time to time, not at every step."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from extproc.sim.engine import Engine
from extproc.sim.sequence import Sequence

LOADS_EVERY = 15
"""Decode steps between two snapshots of `/v1/loads` (`--load-snapshot-publish-interval`)."""
GAUGES_EVERY = 40
"""Decode steps between two updates of the gauges of `/metrics` (`--decode-log-interval`)."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The load of one rank at a moment.

    Attributes:
        at: seconds since the epoch.
        running: requests in the batch.
        waiting: requests in the queue.
        waiting_tokens: their tokens.
        used_tokens: tokens that running requests hold.
        evictable_tokens: tokens that are cached and that nobody holds.
        usage: share of the cache that running requests hold, 0 to 1.
        throughput: generated tokens a second since the snapshot before.
        hit_rate: share of the prompts' tokens found in the cache, since the start.
        adapters: different adapters in the batch.
        prefilled_tokens: prompt tokens that were computed since the start.
        decode_steps: steps without prefill since the start.
    """

    at: float
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    used_tokens: int = 0
    evictable_tokens: int = 0
    usage: float = 0.0
    throughput: float = 0.0
    hit_rate: float = 0.0
    adapters: int = 0
    prefilled_tokens: int = 0
    decode_steps: int = 0


class LoadSnapshots:
    """A `StepWatch` that takes both snapshots of a rank when they are due: at every prefill, and when idle, too.

    Attributes:
        loads: what `/v1/loads` shows.
        gauges: what `/metrics` shows.
    """

    def __init__(self, engine: Engine, wall: Callable[[], float] = time.time) -> None:
        """Watch `engine`; `wall` gives seconds since the epoch."""
        self._engine = engine
        self._wall = wall
        self._decodes = 0
        self._tokens = 0
        self._busy_s = 0.0
        self.loads = self.gauges = Snapshot(wall())

    def stepped(self, batch: list[Sequence], began: float, end: float) -> None:
        """See `StepWatch.stepped`."""
        del began, end
        if any(one.in_prefill for one in batch):
            self.loads = self.gauges = self._take(batch)
            return
        self._decodes += 1
        if self._decodes % LOADS_EVERY == 0:
            self.loads = self._take(batch)
        if self._decodes % GAUGES_EVERY == 0:
            self.gauges = self._take(batch)

    def idle(self) -> None:
        """See `StepWatch.idle`."""
        self.loads = self.gauges = self._take([])

    def _take(self, batch: list[Sequence]) -> Snapshot:
        engine = self._engine
        stats, pool, size = engine.stats, engine.pool, engine.settings.block_size
        tokens, busy_s = stats.generation_tokens - self._tokens, stats.busy_s - self._busy_s
        self._tokens, self._busy_s = stats.generation_tokens, stats.busy_s
        return Snapshot(
            at=self._wall(),
            running=stats.running,
            waiting=stats.waiting,
            waiting_tokens=engine.queued_tokens,
            used_tokens=(pool.usable - pool.free) * size,
            evictable_tokens=min(pool.cached, pool.free) * size,
            usage=stats.cache_usage,
            throughput=tokens / busy_s if busy_s else 0.0,
            hit_rate=stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0,
            adapters=len({one.adapter for one in batch if one.adapter}),
            prefilled_tokens=stats.prompt_tokens - stats.prompt_tokens_cached,
            decode_steps=self._decodes,
        )

"""What TensorRT-LLM keeps until somebody takes it: events of the cache, and a record of every iteration."""

import time
from collections import deque
from typing import Any

from extproc.sim.block_log import Cleared, Event
from extproc.sim.encodings import data_of
from extproc.sim.engine import Engine
from extproc.sim.sequence import Sequence

ITERATIONS = 1000
"""Records kept: TensorRT-LLM's default `iter_stats_max_iterations`."""


class EventBuffer:
    """The events of one start, numbered from 0. Taking them empties it; when it is full, the oldest are lost."""

    def __init__(self, blocks: int, window: int, ranks: int, size: int) -> None:
        """Begin with the event of the cache's creation.

        Args:
            blocks: usable blocks of a rank.
            window: tokens of the attention window, which is the context here.
            ranks: with more than one, events tell whose they are.
            size: most events kept.
        """
        self._window = window
        self._ranks = ranks
        self._kept: deque[dict[str, Any]] = deque(maxlen=size)
        self._next = 0
        self.losing = 0
        for rank in range(ranks):
            self._add({"type": "created", "num_blocks_per_cache_level": [blocks, 0]}, rank)

    def publish(self, events: list[Event], rank: int) -> None:
        """Take in the events of a step, or lose them if that was ordered."""
        written = [data_of(event) for event in events if not isinstance(event, Cleared)]
        if self.losing > 0:
            self.losing -= 1
            self._next += len(written)
            return
        for data in written:
            self._add(data, rank)

    def take(self) -> list[dict[str, Any]]:
        """Return what is kept and forget it."""
        taken = list(self._kept)
        self._kept.clear()
        return taken

    def _add(self, data: dict[str, Any], rank: int) -> None:
        event = {"event_id": self._next, "data": data, "window_size": self._window}
        if self._ranks > 1:
            event["attention_dp_rank"] = rank
        self._kept.append(event | {"hash_algo": "v1_block_key", "layer_group_id": 0})
        self._next += 1


class Iterations:
    """A `StepWatch` that keeps a record of each iteration, and the last one's numbers as of the last completion.

    Attributes:
        shown: the numbers that `/prometheus/metrics` shows: those of the record that was newest when a request last
            completed, so they are old during long answers. Empty before the first completion.
    """

    def __init__(self, engine: Engine, rank: int, ranks: int) -> None:
        """Watch `engine`, one of `ranks`."""
        self._engine = engine
        self._rank = rank if ranks > 1 else None
        self._kept: deque[dict[str, Any]] = deque(maxlen=ITERATIONS)
        self.shown: dict[str, Any] = {}

    def stepped(self, batch: list[Sequence], began: float, end: float) -> None:
        """See `StepWatch.stepped`."""
        record = self._record(batch, end - began)
        self._kept.append(record)
        if record["numCompletedRequests"]:
            self.shown = record

    def idle(self) -> None:
        """See `StepWatch.idle`: no iteration, no record."""

    def take(self) -> list[dict[str, Any]]:
        """Return the records since the last call and forget them."""
        taken = list(self._kept)
        self._kept.clear()
        return taken

    def _record(self, batch: list[Sequence], lasted_s: float) -> dict[str, Any]:
        engine = self._engine
        stats, settings, pool = engine.stats, engine.settings, engine.pool
        context = [one for one in batch if not one.produced or (one.produced == 1 and one.chunk > 1)]
        reused, looked = stats.prefix_hits // settings.block_size, stats.prefix_queries // settings.block_size
        completed = sum(one.finished is not None for one in batch)
        return {
            "timestamp": time.strftime("%m-%d-%Y %H:%M:%S.000000"),
            "iter": stats.steps,
            "iterLatencyMS": lasted_s * 1000,
            "newActiveRequestsQueueLatencyMS": 0.0,
            "numNewActiveRequests": sum(one.computed == one.chunk for one in batch),
            "numActiveRequests": stats.running,
            "numQueuedRequests": stats.waiting,
            "numCompletedRequests": completed,
            "maxNumActiveRequests": settings.max_num_seqs,
            "maxBatchSizeStatic": settings.max_num_seqs,
            "maxBatchSizeTunerRecommended": 0,
            "maxBatchSizeRuntime": settings.max_num_seqs,
            "maxNumTokensStatic": settings.token_budget,
            "maxNumTokensTunerRecommended": 0,
            "maxNumTokensRuntime": settings.token_budget,
            "gpuMemUsage": 0,
            "cpuMemUsage": 0,
            "pinnedMemUsage": 0,
            "kvCacheStats": {
                "maxNumBlocks": pool.usable,
                "freeNumBlocks": pool.free,
                "usedNumBlocks": pool.usable - pool.free,
                "tokensPerBlock": settings.block_size,
                "allocTotalBlocks": looked - reused,
                "allocNewBlocks": looked - reused,
                "reusedBlocks": reused,
                "missedBlocks": looked - reused,
                "cacheHitRate": reused / looked if looked else 0.0,
            },
            "inflightBatchingStats": {
                "numScheduledRequests": len(batch),
                "numContextRequests": len(context),
                "numGenRequests": len(batch) - len(context),
                "numPausedRequests": 0,
                "numCtxTokens": sum(one.chunk for one in context),
                "microBatchId": 0,
                "avgNumDecodedTokensPerIter": 1.0 if len(batch) > len(context) else 0.0,
            },
            "attentionDpRank": self._rank,
        }

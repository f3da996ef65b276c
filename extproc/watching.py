"""Watches the requests that Envoy tells this worker of: which have no first token in time, which stand still.

Any worker may be told of a request, mostly another one than decided it. What is kept here is small and can be lost: a
worker that is told for the first time of a request takes it as one that has just begun.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from extproc.clock import Clock
from extproc.envoy.contract import Running, Served
from extproc.govern.stages import Limits, Progress, Sight, Stage, judge
from extproc.request.model import OPENED_EARLY
from extproc.telemetry.limit_metrics import LimitMetrics

_MOST: Final = 65_536
"""Requests watched at once, some 250 bytes each. Those that were not heard of for longest make room."""


class Watching:
    """Implements `envoy.contract.Watcher` for one worker.

    Args:
        clock: time.
        end: told of every request whose limit has run out, again and again until it is over.
        metrics: counts.
    """

    def __init__(self, clock: Clock, end: Callable[[str, Stage], None], metrics: LimitMetrics) -> None:
        self._clock = clock
        self._end = end
        self._metrics = metrics
        self._seen: OrderedDict[str, Progress] = OrderedDict()

    def running(self, running: Running) -> None:
        """See `Watcher.running`."""
        if running.age_s < 0.0 and not running.sent_bytes:
            return  # It is not at an endpoint yet.
        limits = Limits(first_token_s=running.first_token_s, stall_s=running.stall_s)
        sight = Sight(running.sent_bytes, running.at, self._clock.monotonic(), running.age_s, running.attempt)
        early = running.kind in OPENED_EARLY
        progress, stage = judge(limits, self._seen.pop(running.charge_id, None), sight, opened_early=early)
        self._seen[running.charge_id] = progress
        if len(self._seen) > _MOST:
            self._seen.popitem(last=False)
        if stage is not None:
            self._end(running.charge_id, stage)

    def over(self, served: Served) -> None:
        """See `Watcher.over`."""
        progress = self._seen.pop(served.charge_id, None)
        if progress is not None and progress.begun:
            self._metrics.silence(served.pool, progress.longest_s)
        if served.stage:
            self._metrics.ran_out(served.pool, served.stage, str(served.metadata.get("model", "")))

"""What is learnt of one endpoint beside its profile."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median

from extproc.state.capacity import CapacityShare, Prefills
from extproc.state.feed import Answered
from extproc.state.learnt import EndpointLearnt
from extproc.state.rate import RateEstimator

DEFAULT_BLOCK_TOKENS = 16
"""vLLM's block size unless it was started with another (`DEFAULT_BLOCK_SIZE`, vLLM 0.33)."""
_GAIN = 1 / 16
_MOST_PROMPT = 1e8
"""Longest prompt in tokens that is believed; anything above it is a broken usage."""
_MARKS = 8
"""Times in a profile's life at which its clock is noted: its age is known to this part of it."""
_SILENT_S = 10.0
_LOST_S = 60.0


class Facts:
    """One endpoint. All times are those that the caller passes.

    Attributes:
        rate: prefill speed and overhead.
        share: how much of the claimed cache holds prefixes.
        prefills: which of its requests are over.
        kv_tokens: claimed cache in tokens; 0 when unknown.
        block_tokens: tokens in a KV block.
        started_at: start of the engine, seconds since the epoch; 0 when unknown.
        untold: it was read, and its start is not known.
        caching: the engine reuses prefixes at all.
        reports: it has reported cached tokens since its start. One that never does reports 0 for every prompt, or is
            behind something that takes them out, and proves nothing of its cache by that.
        missed: its last answer, of those that were predicted any cached tokens, reported none.
        inserted: blocks put into its profile since its start.
        life: counts how often its cache was emptied.
    """

    def __init__(self, prior_rate: float) -> None:
        self.rate = RateEstimator(prior_rate)
        self.kv_tokens = 0
        self.block_tokens = DEFAULT_BLOCK_TOKENS
        self.started_at = 0.0
        self.untold = False
        self.caching = True
        self.life = 0
        self._uncached: float | None = None
        self._heard = (0.0, 0)
        self._lost_since: float | None = None
        self._fresh()

    def _fresh(self) -> None:
        self.share = CapacityShare()
        self.prefills = Prefills()
        self.reports = False
        self.missed = False
        self.inserted = 0
        self._marks: deque[tuple[float, int]] = deque()

    def emptied(self) -> None:
        """Its cache is empty: a new life begins, of whose size and reports nothing is known."""
        self.life += 1
        self._fresh()

    def learnt(self, endpoint: str, now: float, turns: list[tuple[bytes, float, float]]) -> EndpointLearnt:
        """What another worker needs to go on from here; `now` as in `aged`."""
        return EndpointLearnt(
            endpoint=endpoint,
            started_at=self.started_at,
            kv_tokens=self.kv_tokens,
            block_tokens=self.block_tokens,
            share=self.share.share,
            reports=self.reports,
            uncached=-1.0 if self._uncached is None else self._uncached,
            rate=self.rate.state(),
            marks=[(max(0.0, now - then), clock) for then, clock in self._marks],
            turns=turns,
        )

    def resume(self, learnt: EndpointLearnt, then: float, clock: int) -> None:
        """Go on from what another worker knew, in a life of its own.

        Args:
            learnt: what it knew.
            then: when it knew that, by the clock of `aged`.
            clock: what its readings of the profile's use counter are counted from.
        """
        self.emptied()
        self.started_at = max(self.started_at, learnt.started_at)
        self.kv_tokens = self.kv_tokens or max(0, learnt.kv_tokens)
        self.block_tokens = learnt.block_tokens if learnt.block_tokens > 0 else self.block_tokens
        self.share.told(learnt.share)
        self.reports = learnt.reports
        self._uncached = learnt.uncached if 0.0 <= learnt.uncached <= _MOST_PROMPT else None
        self.rate.resume(learnt.rate)
        self._marks.extend((then - age, clock + reading) for age, reading in learnt.marks[-2 * _MARKS :])

    @property
    def uncached(self) -> float:
        """Mean uncached tokens of the requests it answered; 0 before the first."""
        return self._uncached or 0.0

    def answered(self, answer: Answered) -> None:
        """Learn speed and size from an answer of this endpoint."""
        if answer.work_tokens > 0.0:
            self.rate.observe(answer.work_tokens, answer.ttft_s, answer.backlog_tokens)
        uncached = answer.prompt_tokens - max(answer.cached_tokens, 0.0)
        if answer.prompt_tokens < 0.0:
            uncached = answer.work_tokens - answer.backlog_tokens
        if 0.0 <= uncached <= _MOST_PROMPT:
            before = uncached if self._uncached is None else self._uncached
            self._uncached = before + _GAIN * (uncached - before)

    def aged(self, now: float, clock: int, ttl_s: float) -> int | None:
        """Note the profile's clock; returns the reading at which uses are `ttl_s` old, when a further one is."""
        old = None
        while self._marks and now - self._marks[0][0] >= ttl_s:
            old = self._marks.popleft()[1]
        if not self._marks or now - self._marks[-1][0] >= ttl_s / _MARKS:
            self._marks.append((now, clock))
        return old

    def listened(self, now: float) -> None:
        """Nothing heard for ten seconds: the rate goes back towards what it was."""
        if self.rate.answers != self._heard[1]:
            self._heard = (now, self.rate.answers)
        elif now - self._heard[0] >= _SILENT_S:
            self._heard = (now, self.rate.answers)
            self.rate.relax()

    def lost(self, now: float, *, unreachable: bool) -> bool:
        """Whether it has been unreachable for a minute; True once."""
        if not unreachable:
            self._lost_since = None
            return False
        if self._lost_since is None:
            self._lost_since = now
        over = now - self._lost_since >= _LOST_S
        if over:
            self._lost_since = math.inf
        return over


def learnt_rates(facts: Mapping[str, Facts], endpoints: Iterable[str], prior: float) -> Mapping[str, float]:
    """Prefill speeds in tokens a second: of each endpoint its own, else the median of the pool's, else the prior."""
    learnt = {name: each.rate.rate for name, each in facts.items() if each.rate.learnt}
    usual = median(learnt.values()) if learnt else prior
    return {name: learnt.get(name, usual) for name in endpoints}

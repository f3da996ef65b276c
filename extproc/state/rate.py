"""An endpoint's prefill speed and what its TTFT has besides, learnt from its own answers.

    TTFT = overhead + (backlog + uncached) / rate

`uncached` is the request's own uncached tokens, as the engine reported them, and `backlog` what the ledger had in
front of it. Pure estimators: every worker sees the same answers through the feed and so comes to the same numbers.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

import msgspec

_WINDOW = 256
_FIT_EVERY = 8
_CHECK_EVERY = 4
_LEAST_TOKENS = 256.0
_LEAST_WORK = 2048.0
_MOST_WEIGHT = 2048.0
_SHARE = 0.95
_BOUND = 20.0
_RECENT = 8
_AGREED = 48
_FAR = 3.0
_ABSURD = 1e12


class _Sample(msgspec.Struct, frozen=True, gc=False):
    uncached: float
    backlog: float
    ttft_s: float


class LearntRate(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a `RateEstimator` came to, for another worker's to go on from.

    Attributes:
        rate: tokens a second.
        overhead_s: see `RateEstimator.overhead_s`.
        once: speed that several dozen answers agreed on; 0 for none.
        answers: answers seen.
        learnt: see `RateEstimator.learnt`.
        samples: the last answers, oldest first: uncached tokens, backlog, TTFT in seconds.
    """

    rate: float
    overhead_s: float
    once: float
    answers: int
    learnt: bool
    samples: list[tuple[float, float, float]]


class RateEstimator:
    """Prefill speed of one endpoint in tokens a second, and the overhead of its TTFT in seconds.

    No answer comes sooner than its own prefill takes, so `uncached / TTFT` of any answer is a lower bound of the speed,
    whatever queued in front of it. The estimate is the bound that nineteen twentieths of the tokens of the last 256
    answers stay under: the highest ones of prompts that found the engine idle, less a twentieth for reports that are
    wrong. It cannot run away, because the ledger's backlog, which follows from the estimate itself, has no part in it.
    A regression of TTFT on backlog and uncached tokens has: in replays at 80 % load it came to 14 to 160 thousand
    tokens a second where the truth was 20, and TTFT to 1.5 to 15 times that of this estimate.

    When TTFT leaves the prediction by a factor of three, in the median of eight answers, the endpoint is not what it
    was, and older answers are forgotten at once. The result is kept within 20 times of the prior.
    """

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._rate = prior
        self._overhead_s = 0.0
        self._once = 0.0
        self._samples: deque[_Sample] = deque(maxlen=_WINDOW)
        self._learnt = False
        self.answers = 0

    @property
    def rate(self) -> float:
        """Best estimate; the prior until enough was seen."""
        return self._rate

    @property
    def learnt(self) -> bool:
        """Whether answers of this endpoint, and not the prior, made the estimate."""
        return self._learnt

    @property
    def overhead_s(self) -> float:
        """What TTFT has besides prefill: the step in progress, the network, the tokenizer. 0 until eight answers."""
        return self._overhead_s

    def state(self) -> LearntRate:
        """What it came to."""
        samples = [(one.uncached, one.backlog, one.ttft_s) for one in self._samples]
        return LearntRate(self._rate, self._overhead_s, self._once, self.answers, self._learnt, samples)

    def resume(self, state: LearntRate) -> None:
        """Go on from what another worker's came to; what cannot be is kept out as in `observe`."""
        self._samples.clear()
        for uncached, backlog, ttft_s in state.samples:
            if uncached >= 0.0 and backlog >= 0.0 and 0.0 < uncached + backlog < _ABSURD and ttft_s > 1 / _ABSURD:
                self._samples.append(_Sample(uncached, backlog, min(ttft_s, _ABSURD)))
        if 0.0 < state.rate < _ABSURD and 0.0 <= state.overhead_s < _ABSURD:
            self._rate = self._bounded(state.rate)
            self._once = self._bounded(state.once) if state.once > 0.0 else 0.0
            self._overhead_s, self._learnt = state.overhead_s, state.learnt
        self.answers = max(0, state.answers)

    def observe(self, work_tokens: float, ttft_s: float, backlog_tokens: float = 0.0) -> None:
        """Add one answer.

        Args:
            work_tokens: its own uncached tokens and the backlog in front of it.
            ttft_s: request sent to first byte of the answer's body.
            backlog_tokens: the backlog alone.
        """
        if not (0.0 < work_tokens < _ABSURD and 1.0 / _ABSURD < ttft_s < _ABSURD):
            return
        backlog = min(max(backlog_tokens, 0.0), work_tokens)
        self._samples.append(_Sample(work_tokens - backlog, backlog, ttft_s))
        self.answers += 1
        if self.answers % _CHECK_EVERY == 0:
            self._forget_what_is_no_longer_true()
        if self.answers % _FIT_EVERY == 0:
            self._fit()

    def relax(self) -> None:
        """Nothing was heard of the endpoint for a while: go half way back (in logarithms) to what it was once.

        One that had slowed gets few requests while it is believed slow, and could never prove the contrary. What it was
        once is what several dozen answers agreed on.
        """
        if self._rate < self._once:
            self._rate = math.sqrt(self._rate * self._once)
            self._samples.clear()

    def _forget_what_is_no_longer_true(self) -> None:
        recent = list(self._samples)[-_RECENT:]
        ratios = [sample.ttft_s / self._predicted_s(sample) for sample in recent if sample.uncached >= _LEAST_TOKENS]
        if len(ratios) > _RECENT // 2 and median(ratios) > _FAR:
            self._samples = deque(recent, _WINDOW)
            self._fit()

    def _predicted_s(self, sample: _Sample) -> float:
        return predict_ttft_ms(self._rate, self._overhead_s, sample.backlog, sample.uncached) / 1000.0

    def _bounded(self, rate: float) -> float:
        return min(max(rate, self._prior / _BOUND), self._prior * _BOUND)

    def _fit(self) -> None:
        # Of short prompts the step that they wait for is the greater part.
        bounds = sorted(
            (one.uncached / one.ttft_s, min(one.uncached, _MOST_WEIGHT))
            for one in self._samples
            if one.uncached >= _LEAST_TOKENS
        )
        # A single wrong report must not be the estimate, however few there are.
        bounds = bounds[:-1] if len(bounds) >= _FIT_EVERY else bounds
        if sum(weight for _, weight in bounds) >= _LEAST_WORK:
            self._rate = self._bounded(_quantile(bounds, _SHARE))
            self._learnt = True
        if len(self._samples) >= _AGREED:
            self._once = self._rate
        # Weighted by 1/TTFT, the median makes relative errors least: long prompts say little of what all have. On a
        # simulated engine with nine tenths cached it brought the median error of predictions from 30 to 20 %.
        recent = list(self._samples)[-_AGREED:]
        rest = [(one.ttft_s - (one.backlog + one.uncached) / self._rate, 1.0 / one.ttft_s) for one in recent]
        self._overhead_s = max(0.0, _quantile(rest, 0.5))


def _quantile(values: Sequence[tuple[float, float]], share: float) -> float:
    """The value that `share` of the weight does not exceed; `values` are (value, weight), not empty."""
    ordered = sorted(values)
    left = share * sum(weight for _, weight in ordered)
    for value, weight in ordered:
        left -= weight
        if left <= 0.0:
            return value
    return ordered[-1][0]


def predict_ttft_ms(rate: float, overhead_s: float, backlog_tokens: float, uncached_tokens: float) -> float:
    """TTFT in milliseconds of a request on an endpoint.

    Args:
        rate: its prefill speed in tokens a second, as learnt: without the share that policies believe.
        overhead_s: what its TTFT has besides prefill.
        backlog_tokens: prefill work in front.
        uncached_tokens: the request's own.
    """
    return (overhead_s + (backlog_tokens + uncached_tokens) / rate) * 1000.0

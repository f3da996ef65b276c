"""What an engine counts about itself. Seconds are engine seconds."""

from bisect import bisect_left
from dataclasses import dataclass, field


def one_two_five(limit: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 … up to `limit`: vLLM's buckets for token counts."""
    values: list[float] = []
    scale = 1
    while True:
        for factor in (1, 2, 5):
            if factor * scale > limit:
                return tuple(values)
            values.append(float(factor * scale))
        scale *= 10


FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = tuple(float(n) for n in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
"""Bucket bounds of vLLM 0.33 (`vllm/v1/metrics/buckets.py`)."""


class Histogram:
    """Counts of observations by bucket, with their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(slots=True)
class EngineStats:
    """Counters and histograms of one engine since its start, and the gauges as of its last step.

    vLLM publishes its gauges once a step: while a long step runs they are stale, and here too.

    Attributes:
        deferred: sequences among the `waiting` that lack only a place for their adapter.
        adapters: for each set of adapters that had live sequences, as comma-joined names, the engine second in which
            that was last so. Kept only by an engine that serves adapters.
    """

    context_tokens: int
    running: int = 0
    waiting: int = 0
    deferred: int = 0
    cache_usage: float = 0.0
    steps: int = 0
    busy_s: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
    )
    rejected: int = 0
    adapters: dict[str, float] = field(default_factory=dict)
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_S))
    token_gap: Histogram = field(default_factory=lambda: Histogram(TOKEN_GAP_S))
    time_per_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_GAP_S))
    whole: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    queued: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    inference: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    prefill: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    decode: Histogram = field(default_factory=lambda: Histogram(REQUEST_S))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS))
    choices: Histogram = field(default_factory=lambda: Histogram(CHOICES))
    preempted: Histogram = field(default_factory=lambda: Histogram(PREEMPTIONS))
    prompt_length: Histogram = field(init=False)
    answer_length: Histogram = field(init=False)
    max_tokens: Histogram = field(init=False)
    computed_length: Histogram = field(init=False)

    def __post_init__(self) -> None:
        """Make the histograms whose bounds depend on the longest sequence."""
        bounds = one_two_five(self.context_tokens)
        self.prompt_length = Histogram(bounds)
        self.answer_length = Histogram(bounds)
        self.max_tokens = Histogram(bounds)
        self.computed_length = Histogram(bounds)

"""What one candidate costs by local knowledge, in milliseconds. Each scorer is a formula of a few lines.

Scorers must not count the shared backlog or what is in flight: the store adds both atomically.
"""

from extproc.choose.fleet import Endpoint

HIT_MS = 1000.0
"""Policy `weighted` weighs a whole prompt in the cache against so many milliseconds of load: a weight is in seconds."""

_MOST_WAITING = 3
"""Waiting requests that count as KV pressure. Enough that short sessions leave a full engine: twenty waiting prompts of
250 tokens are 0.3 s of prefill. The gauge is as old as the last scrape: counting all of them sent whole bursts to
whoever looked best then (replay of mixed lengths on engines of 20,000 tokens, mean TTFT: 5.1 s with none, 4.0 s with
three, 4.6 s with all)."""


def cached_tokens(matched_tokens: float, prompt_tokens: float, block_tokens: int) -> float:
    """Prompt tokens an engine will reuse when its cache holds the first `matched_tokens` of the prompt.

    An engine recomputes at least the last token and reuses whole blocks: floor(min(m, n - 1) / B) * B.
    """
    reusable = min(matched_tokens, prompt_tokens - 1.0)
    if reusable <= 0:
        return 0.0
    return reusable - reusable % block_tokens


def prefill_ms(uncached_tokens: float, rate: float, weight: float) -> float:
    """Time to prefill what the endpoint has not cached: weight * uncached / rate. Leans to affinity."""
    return weight * uncached_tokens / rate * 1000.0


def kv_pressure_ms(endpoint: Endpoint, watermark: float, penalty_ms: float) -> float:
    """Grows from 0 at the watermark to `penalty_ms` at full KV usage, in a straight line. Leans to spreading.

    A request that meets others in the queue of such an engine waits until they have found room, whatever its prompt
    is: each adds as much again, up to `_MOST_WAITING`.
    """
    if endpoint.kv_usage <= watermark:
        return 0.0
    waits = 1 + min(endpoint.waiting, _MOST_WAITING)
    return waits * penalty_ms * (endpoint.kv_usage - watermark) / (1.0 - watermark)


def miss_ms(uncached_tokens: float, prompt_tokens: float, weight: float) -> float:
    """What the part of the prompt that is not cached costs, whatever its length: weight * uncached / prompt."""
    return weight * HIT_MS * uncached_tokens / prompt_tokens if prompt_tokens > 0 else 0.0


def silence_ms(endpoint: Endpoint) -> float:
    """What is still to come of a standstill: about as much as it has lasted so far.

    Of a standstill of unknown length t that has lasted s, P(t > s + x | t > s) = s / (s + x) if nothing else is known
    (a prior of 1/t): its median is x = s.
    """
    return endpoint.silent_ms


def busy_ms(endpoint: Endpoint) -> float:
    """An endpoint that has just answered 429 or 503 has no room; its gauges may not tell before the next scrape."""
    return endpoint.busy_ms

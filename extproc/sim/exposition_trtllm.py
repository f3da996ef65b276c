"""`GET /prometheus/metrics` of TensorRT-LLM."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from extproc.sim.core import Core
from extproc.sim.iterations import Iterations
from extproc.sim.page import counter, gauge, histogram, labelled
from extproc.sim.stats import EngineStats, Histogram

_COUNTS = (
    ("trtllm_num_requests_running", "numActiveRequests", "Number of requests being served."),
    ("trtllm_num_requests_waiting", "numQueuedRequests", "Number of requests waiting."),
    ("trtllm_max_num_active_requests", "maxNumActiveRequests", "Most requests that can be active."),
    ("trtllm_max_batch_size_runtime", "maxBatchSizeRuntime", "Largest batch at runtime."),
)
_CACHE = (
    ("trtllm_kv_cache_max_blocks", "maxNumBlocks", "KV cache blocks in all."),
    ("trtllm_kv_cache_free_blocks", "freeNumBlocks", "KV cache blocks that are free."),
    ("trtllm_kv_cache_used_blocks", "usedNumBlocks", "KV cache blocks that are used."),
)
_BATCH = (
    ("trtllm_num_scheduled_requests", "numScheduledRequests", "Number of scheduled requests."),
    ("trtllm_num_context_requests", "numContextRequests", "Number of requests in their context phase."),
    ("trtllm_num_generation_requests", "numGenRequests", "Number of requests in their generation phase."),
    ("trtllm_num_paused_requests", "numPausedRequests", "Number of paused requests."),
)
_HISTOGRAMS = (
    ("trtllm_e2e_request_latency_seconds", "whole", "Histogram of end to end request latency in seconds."),
    ("trtllm_time_to_first_token_seconds", "first_token", "Histogram of time to first token in seconds."),
    ("trtllm_time_per_output_token_seconds", "time_per_token", "Histogram of time per output token in seconds."),
    ("trtllm_request_queue_time_seconds", "queued", "Histogram of time spent in WAITING phase for request."),
    ("trtllm_request_prefill_time_seconds", "prefill", "Histogram of time spent in PREFILL phase for request."),
    ("trtllm_request_decode_time_seconds", "decode", "Histogram of time spent in DECODE phase for request."),
    ("trtllm_request_inference_time_seconds", "inference", "Histogram of time spent in RUNNING phase for request."),
)


class MetricsPage:
    """Renders one server's page.

    The gauges have the numbers of the time a request last completed, and a label with the process id, since the
    client library runs in its multiprocess mode. Before the first completion they have no samples.
    """

    def __init__(self, core: Core, iterations: Sequence[Iterations]) -> None:
        self._core = core
        self._iterations = iterations
        own = {"model_name": core.settings.model, "engine_type": "trtllm"}
        self._own = own
        self._labels = labelled(**own)
        self._gauge_labels = labelled(**own, pid=str(os.getpid()))

    def render(self) -> bytes:
        """Return the page."""
        all_stats = [rank.engine.stats for rank in self._core.ranks]
        lines = [*self._gauges([one.shown for one in self._iterations if one.shown])]
        reasons = {
            labelled(**self._own, finished_reason=name): float(sum(stats.finished[name] for stats in all_stats))
            for name in ("stop", "length")
        }
        text = "Count of successfully processed requests."
        lines += counter("trtllm_request_success", text, reasons, None)
        for name, value, text in _totals(self._core, all_stats):
            lines += counter(name, text, {self._labels: value}, None)
        for name, attribute, text in _HISTOGRAMS:
            lines += histogram(name, text, {self._labels: _sum([getattr(one, attribute) for one in all_stats])}, None)
        engine = self._core.settings.engine
        told = labelled(**self._own, tokens_per_block=str(engine.block_size), enable_block_reuse="True")
        lines += gauge("trtllm_kv_cache_config_info", "KV cache configuration.", {told: 1.0})
        return ("\n".join(lines) + "\n").encode()

    def _gauges(self, records: list[dict[str, Any]]) -> Iterator[str]:
        for name, key, text in _COUNTS:
            yield from self._gauge(name, text, [record[key] for record in records])
        caches = [record["kvCacheStats"] for record in records]
        for name, key, text in _CACHE:
            yield from self._gauge(name, text, [cache[key] for cache in caches])
        for name, key, text in _BATCH:
            yield from self._gauge(name, text, [record["inflightBatchingStats"][key] for record in records])
        used, of = sum(one["usedNumBlocks"] for one in caches), sum(one["maxNumBlocks"] for one in caches)
        sizes = [cache["tokensPerBlock"] for cache in caches[:1]]
        hits = [cache["cacheHitRate"] for cache in caches]
        text = "KV cache utilization, used blocks of all blocks."
        yield from self._gauge("trtllm_kv_cache_utilization", text, [used / of] if of else [])
        yield from self._gauge("trtllm_kv_cache_tokens_per_block", "Tokens in a KV cache block.", sizes)
        rate = [sum(hits) / len(hits)] if hits else []
        yield from self._gauge("trtllm_kv_cache_hit_rate", "KV cache hit rate.", rate)
        lasted = [record["iterLatencyMS"] / 1000 for record in records[-1:]]
        yield from self._gauge("trtllm_iteration_latency_seconds", "Latency of the iteration.", lasted)

    def _gauge(self, name: str, text: str, values: list[float]) -> Iterator[str]:
        yield from gauge(name, text, {self._gauge_labels: sum(values)} if values else {})


def _totals(core: Core, all_stats: list[EngineStats]) -> Iterator[tuple[str, float, str]]:
    """Yield name, value and help of the counters, which count when a request completes."""
    size = core.settings.engine.block_size
    prompts = sum(stats.prompt_length.total for stats in all_stats)
    computed = sum(stats.computed_length.total for stats in all_stats)
    looked = sum(stats.prefix_queries for stats in all_stats) // size
    reused = sum(stats.prefix_hits for stats in all_stats) // size
    completed = sum(sum(stats.whole.counts) for stats in all_stats)
    yield "trtllm_request_error", 0, "Count of requests that failed."
    yield "trtllm_prompt_tokens", prompts, "Number of prompt tokens."
    yield "trtllm_prompt_cached_tokens", prompts - computed, "Number of prompt tokens found in the cache."
    yield "trtllm_generation_tokens", sum(one.answer_length.total for one in all_stats), "Number of generated tokens."
    yield "trtllm_num_requests_completed", completed, "Number of requests that completed."
    yield "trtllm_kv_cache_reused_blocks", reused, "Number of KV cache blocks that were reused."
    yield "trtllm_kv_cache_missed_blocks", looked - reused, "Number of KV cache blocks that were missed."


def _sum(histograms: list[Histogram]) -> Histogram:
    together = Histogram(histograms[0].bounds)
    for one in histograms:
        together.counts = [a + b for a, b in zip(together.counts, one.counts, strict=True)]
        together.total += one.total
    return together

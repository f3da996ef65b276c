"""`GET /metrics` of vLLM: the names, labels and buckets of each version."""

import time
from collections.abc import Iterator

from extproc.sim.core import Core
from extproc.sim.page import CONTENT_TYPE, counter, family, gauge, histogram, labelled, number
from extproc.sim.ranks import Rank
from extproc.sim.stats import EngineStats

__all__ = ["CONTENT_TYPE", "MetricsPage"]

_HISTOGRAMS = (
    ("vllm:request_prompt_tokens", "prompt_length", "Number of prefill tokens processed."),
    ("vllm:request_generation_tokens", "answer_length", "Number of generation tokens processed."),
    ("vllm:iteration_tokens_total", "step_tokens", "Histogram of number of tokens per engine_step."),
    ("vllm:request_params_n", "choices", "Histogram of the n request parameter."),
    ("vllm:request_params_max_tokens", "max_tokens", "Histogram of the max_tokens request parameter."),
    ("vllm:time_to_first_token_seconds", "first_token", "Histogram of time to first token in seconds."),
    ("vllm:inter_token_latency_seconds", "token_gap", "Histogram of inter-token latency in seconds."),
    ("vllm:request_time_per_output_token_seconds", "time_per_token", "Histogram of time per output token."),
    ("vllm:e2e_request_latency_seconds", "whole", "Histogram of e2e request latency in seconds."),
    ("vllm:request_queue_time_seconds", "queued", "Histogram of time spent in WAITING phase."),
    ("vllm:request_inference_time_seconds", "inference", "Histogram of time spent in RUNNING phase."),
    ("vllm:request_prefill_time_seconds", "prefill", "Histogram of time spent in PREFILL phase."),
    ("vllm:request_decode_time_seconds", "decode", "Histogram of time spent in DECODE phase."),
    ("vllm:request_num_preemptions", "preempted", "Histogram of how often a request was preempted."),
    ("vllm:request_prefill_kv_computed_tokens", "computed_length", "Histogram of new KV tokens in prefill."),
)
_COUNTERS = (
    ("vllm:prefix_cache_queries", "prefix_queries", "Prefix cache queries, in queried tokens."),
    ("vllm:prefix_cache_hits", "prefix_hits", "Prefix cache hits, in cached tokens."),
    ("vllm:num_preemptions", "preemptions", "Cumulative number of preemptions."),
    ("vllm:prompt_tokens", "prompt_tokens", "Number of prefill tokens processed."),
    ("vllm:generation_tokens", "generation_tokens", "Number of generation tokens processed."),
)
_OLD_HISTOGRAMS = (
    ("vllm:time_per_output_token_seconds", "token_gap", "Histogram of time per output token in seconds. DEPRECATED."),
)
"""Gone in 0.15."""
_OLD_COUNTERS = (
    ("vllm:gpu_prefix_cache_queries", "prefix_queries", "GPU prefix cache queries, in tokens. DEPRECATED."),
    ("vllm:gpu_prefix_cache_hits", "prefix_hits", "GPU prefix cache hits, in tokens. DEPRECATED."),
)
"""Gone in 0.12."""
_NEW_IN_CONFIG = ("hash_block_size", "kv_cache_size_tokens", "user_specified_block_size")
"""Of the cache's configuration, what 0.11 does not tell."""
_FIRST_REASONS = ("stop", "length", "abort")


class MetricsPage:
    """Renders one engine's page; what never changes is made ready once."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._profile = core.settings.about
        self._started = core.started
        self._model = core.settings.model
        self._own = {rank.index: {"model_name": self._model, "engine": str(rank.index)} for rank in core.ranks}
        self._labels = {index: labelled(**own) for index, own in self._own.items()}
        self._static = "\n".join(self._constant_lines())
        old = self._profile.old_names
        self._counters = _COUNTERS + (_OLD_COUNTERS if old else ())
        self._histograms = _HISTOGRAMS + (_OLD_HISTOGRAMS if old else ())

    def render(self, sleeping: int | None) -> bytes:
        """Return the page; `sleeping` is the level of sleep, None for awake."""
        lines = [self._static]
        ranks, started = list(self._core.ranks), self._started
        lines += self._sleep_state(sleeping)
        lines += self._gauges(ranks)
        lines += self._adapters(ranks)
        for name, attribute, text in self._counters:
            values = {self._labels[rank.index]: getattr(rank.engine.stats, attribute) for rank in ranks}
            lines += counter(name, text, values, started)
        if not self._profile.old_names:
            lines += self._newer_counters(ranks)
        kept = _FIRST_REASONS if self._profile.old_names else None
        reasons = {
            self._with(rank, finished_reason=name): value
            for rank in ranks
            for name, value in rank.engine.stats.finished.items()
            if kept is None or name in kept
        }
        lines += counter("vllm:request_success", "Count of successfully processed requests.", reasons, started)
        if self._profile.admission_limit:
            refused = sum(rank.engine.stats.rejected for rank in ranks)
            values = {labelled(model_name=self._model, reason="max_num_queued_reqs"): refused}
            lines += counter("vllm:admission_rejections", "Admission attempts rejected by a limit.", values, started)
        for name, attribute, text in self._histograms:
            observed = {self._labels[rank.index]: getattr(rank.engine.stats, attribute) for rank in ranks}
            lines += histogram(name, text, observed, started)
        return ("\n".join(lines) + "\n").encode()

    def _with(self, rank: Rank, **labels: str) -> str:
        return labelled(**self._own[rank.index], **labels)

    def _each(self, ranks: list[Rank], attribute: str) -> dict[str, float]:
        return {self._labels[rank.index]: getattr(rank.engine.stats, attribute) for rank in ranks}

    def _gauges(self, ranks: list[Rank]) -> Iterator[str]:
        running, waiting = self._each(ranks, "running"), self._each(ranks, "waiting")
        yield from gauge("vllm:num_requests_running", "Number of requests in model execution batches.", running)
        yield from gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", waiting)
        if not self._profile.old_names:
            reasons: dict[str, float] = {}
            for rank in ranks:
                stats = rank.engine.stats
                reasons[self._with(rank, reason="capacity")] = stats.waiting - stats.deferred
                reasons[self._with(rank, reason="deferred")] = stats.deferred
            yield from gauge("vllm:num_requests_waiting_by_reason", "Number of waiting requests by reason.", reasons)
        usage, text = self._each(ranks, "cache_usage"), "KV-cache usage. 1 means 100 percent usage."
        yield from gauge("vllm:kv_cache_usage_perc", text, usage)
        if self._profile.old_names:
            yield from gauge("vllm:gpu_cache_usage_perc", f"GPU {text} DEPRECATED.", usage)

    def _newer_counters(self, ranks: list[Rank]) -> Iterator[str]:
        cached = {self._labels[rank.index]: rank.engine.stats.prompt_tokens_cached for rank in ranks}
        yield from counter("vllm:prompt_tokens_cached", "Number of cached prompt tokens.", cached, self._started)
        sources: dict[str, float] = {}
        for rank in ranks:
            for name, value in _by_source(rank.engine.stats).items():
                sources[self._with(rank, source=name)] = value
        text = "Number of prompt tokens by source."
        yield from counter("vllm:prompt_tokens_by_source", text, sources, self._started)

    def _adapters(self, ranks: list[Rank]) -> Iterator[str]:
        """Yield a series for each set of adapters that had live requests, with the time at which it last was so.

        Both labels name the same adapters: which of them run and which wait cannot be told from vLLM's page.
        """
        now, settings = time.time(), self._core.settings
        limit = str(settings.engine.max_loras or 1)
        values: dict[str, float] = {}
        for rank in ranks:
            passed = rank.pacer.now()
            for names, at in rank.engine.stats.adapters.items():
                labels = labelled(max_lora=limit, running_lora_adapters=names, waiting_lora_adapters=names)
                values[labels] = max(values.get(labels, 0.0), now - (passed - at) / settings.time_factor)
        if values:
            yield from gauge("vllm:lora_requests_info", "Running stats on lora requests.", values)

    def _sleep_state(self, sleeping: int | None) -> Iterator[str]:
        name = "vllm:engine_sleep_state"
        states = {"awake": sleeping in (None, 0), "weights_offloaded": sleeping == 1, "discard_all": sleeping == 2}
        values: dict[str, float] = {}
        for rank in self._core.ranks:
            for state, value in states.items():
                values[self._with(rank, sleep_state=state)] = value
        yield from gauge(name, "Engine sleep state; awake = 0 means engine is sleeping.", values)

    def _constant_lines(self) -> Iterator[str]:
        name = "process_start_time_seconds"
        yield from family(name, "gauge", "Start time of the process since unix epoch in seconds.")
        yield f"{name} {number(self._started)}"
        engine = self._core.settings.engine
        config = {
            "block_size": engine.block_size,
            "cache_dtype": "auto",
            "enable_prefix_caching": engine.prefix_caching,
            "gpu_memory_utilization": 0.9,
            "hash_block_size": engine.block_size,
            "kv_cache_size_tokens": engine.capacity_tokens,
            "num_cpu_blocks": None,
            "num_gpu_blocks": engine.blocks,
            "num_gpu_blocks_override": None,
            "prefix_caching_hash_algo": "sha256",
            "sliding_window": None,
            "user_specified_block_size": False,
        }
        if self._profile.old_names:
            config = {name: value for name, value in config.items() if name not in _NEW_IN_CONFIG}
        told = {key: str(value) for key, value in config.items()}
        values = {labelled(**told, engine=str(rank.index)): 1.0 for rank in self._core.ranks}
        yield from gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", values)


def _by_source(stats: EngineStats) -> dict[str, int]:
    computed = stats.prompt_tokens - stats.prompt_tokens_cached
    return {"local_compute": computed, "local_cache_hit": stats.prompt_tokens_cached, "external_kv_transfer": 0}

"""`GET /metrics`: vLLM's names, labels and buckets in Prometheus text form."""

from collections.abc import Iterator, Mapping

from extproc.sim.settings import SimSettings
from extproc.sim.stats import EngineStats, Histogram

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

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
    ("vllm:prompt_tokens_cached", "prompt_tokens_cached", "Number of cached prompt tokens."),
    ("vllm:generation_tokens", "generation_tokens", "Number of generation tokens processed."),
)


def number(value: float) -> str:
    """Return `value` as Prometheus clients print it."""
    return repr(float(value))


def labelled(**labels: str) -> str:
    """Return a label set with its braces; values hold neither quotes nor line ends, or are escaped."""
    escaped = (
        (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for name, value in labels.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"


class MetricsPage:
    """Renders one engine's page; what never changes is made ready once."""

    def __init__(self, settings: SimSettings, started: float) -> None:
        self._started = started
        self._model = settings.model
        self._own = {"model_name": settings.model, "engine": "0"}
        self._labels = labelled(**self._own)
        self._static = "\n".join(self._constant_lines(settings))

    def render(self, stats: EngineStats) -> bytes:
        """Return the page for `stats`."""
        lines = [self._static]
        lines += self._gauges(stats)
        for name, attribute, text in _COUNTERS:
            lines += self._counter(name, text, {self._labels: getattr(stats, attribute)})
        computed = stats.prompt_tokens - stats.prompt_tokens_cached
        sources = {"local_compute": computed, "local_cache_hit": stats.prompt_tokens_cached}
        by_source = self._by("source", {**sources, "external_kv_transfer": 0})
        lines += self._counter("vllm:prompt_tokens_by_source", "Number of prompt tokens by source.", by_source)
        reasons = self._by("finished_reason", stats.finished)
        lines += self._counter("vllm:request_success", "Count of successfully processed requests.", reasons)
        rejected = {labelled(model_name=self._model, reason="max_num_queued_reqs"): stats.rejected}
        lines += self._counter("vllm:admission_rejections", "Admission attempts rejected by a limit.", rejected)
        for name, attribute, text in _HISTOGRAMS:
            lines += self._histogram(name, text, getattr(stats, attribute))
        return ("\n".join(lines) + "\n").encode()

    def _by(self, label: str, values: Mapping[str, int]) -> dict[str, int]:
        return {labelled(**self._own, **{label: name}): value for name, value in values.items()}

    def _gauges(self, stats: EngineStats) -> Iterator[str]:
        own = self._labels
        yield from _family("vllm:num_requests_running", "gauge", "Number of requests in model execution batches.")
        yield f"vllm:num_requests_running{own} {number(stats.running)}"
        yield from _family("vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed.")
        yield f"vllm:num_requests_waiting{own} {number(stats.waiting)}"
        name = "vllm:num_requests_waiting_by_reason"
        yield from _family(name, "gauge", "Number of waiting requests by reason.")
        yield f"{name}{labelled(**self._own, reason='capacity')} {number(stats.waiting)}"
        yield f"{name}{labelled(**self._own, reason='deferred')} 0.0"
        yield from _family("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.")
        yield f"vllm:kv_cache_usage_perc{own} {number(stats.cache_usage)}"

    def _counter(self, name: str, text: str, values: Mapping[str, int]) -> Iterator[str]:
        yield from _family(f"{name}_total", "counter", text)
        for labels, value in values.items():
            yield f"{name}_total{labels} {number(value)}"
        yield from _family(f"{name}_created", "gauge", text)
        for labels in values:
            yield f"{name}_created{labels} {number(self._started)}"

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Iterator[str]:
        yield from _family(name, "histogram", text)
        inner = self._labels[1:-1]
        seen = 0
        bounds = (*map(number, histogram.bounds), "+Inf")
        for bound, count in zip(bounds, histogram.counts, strict=True):
            seen += count
            yield f'{name}_bucket{{{inner},le="{bound}"}} {number(seen)}'
        yield f"{name}_count{self._labels} {number(seen)}"
        yield f"{name}_sum{self._labels} {number(histogram.total)}"
        yield from _family(f"{name}_created", "gauge", text)
        yield f"{name}_created{self._labels} {number(self._started)}"

    def _constant_lines(self, settings: SimSettings) -> Iterator[str]:
        name = "process_start_time_seconds"
        yield from _family(name, "gauge", "Start time of the process since unix epoch in seconds.")
        yield f"{name} {number(self._started)}"
        name = "vllm:engine_sleep_state"
        yield from _family(name, "gauge", "Engine sleep state; awake = 0 means engine is sleeping.")
        for state, value in (("awake", 1), ("weights_offloaded", 0), ("discard_all", 0)):
            yield f"{name}{labelled(**self._own, sleep_state=state)} {number(value)}"
        engine = settings.engine
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
        name = "vllm:cache_config_info"
        yield from _family(name, "gauge", "Information of the LLMEngine CacheConfig")
        yield f"{name}{labelled(**{key: str(value) for key, value in config.items()}, engine='0')} 1.0"


def _family(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"

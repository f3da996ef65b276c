"""`GET /metrics` of SGLang with `--enable-metrics`."""

from collections.abc import Iterator, Mapping, Sequence

from extproc.sim.core import Core
from extproc.sim.load_snapshot import LoadSnapshots, Snapshot
from extproc.sim.page import counter, gauge, histogram, labelled
from extproc.sim.ranks import Rank

_HISTOGRAMS = (
    ("sglang:inter_token_latency_seconds", "token_gap", "Histogram of inter-token latency in seconds."),
    ("sglang:request_time_per_output_token_seconds", "time_per_token", "Histogram of time per output token."),
    ("sglang:e2e_request_latency_seconds", "whole", "Histogram of End-to-end request latency in seconds"),
    ("sglang:queue_time_seconds", "queued", "Histogram of queueing time in seconds."),
)


class MetricsPage:
    """Renders one server's page: the scheduler of each rank with its labels, the tokenizer without."""

    def __init__(self, core: Core, snapshots: Sequence[LoadSnapshots]) -> None:
        self._core = core
        self._snapshots = snapshots
        self._own = {"model_name": core.settings.model, "engine_type": "unified"}

    def render(self) -> bytes:
        """Return the page."""
        started, ranks = self._core.started, list(self._core.ranks)
        engine = self._core.settings.engine
        shown = {self._labels(rank): self._snapshots[rank.index].gauges for rank in ranks}
        lines: list[str] = []
        for name, text, values in self._gauges(shown):
            lines += gauge(name, text, values)
        own = labelled(**self._own)
        stats = [rank.engine.stats for rank in ranks]
        cached = sum(one.prompt_tokens_cached for one in stats)
        by_source = {labelled(**self._own, cache_source="device"): float(cached)}
        requests, aborted = sum(sum(one.whole.counts) for one in stats), sum(one.finished["abort"] for one in stats)
        counters: tuple[tuple[str, str, Mapping[str, float]], ...] = (
            ("sglang:prompt_tokens", "Number of prefill tokens processed.", {own: sum(s.prompt_tokens for s in stats)}),
            (
                "sglang:generation_tokens",
                "Number of generation tokens processed.",
                {own: sum(s.generation_tokens for s in stats)},
            ),
            ("sglang:cached_tokens", "Number of cached prompt tokens.", by_source),
            ("sglang:num_requests", "Number of requests processed.", {own: requests}),
            ("sglang:num_aborted_requests", "Number of requests aborted.", {own: aborted}),
        )
        for name, text, values in counters:
            lines += counter(name, text, values, started)
        streamed = labelled(**self._own, is_streaming="True")
        text = "Histogram of time to first token in seconds."
        lines += histogram("sglang:time_to_first_token_seconds", text, {streamed: stats[0].first_token}, started)
        for name, attribute, text in _HISTOGRAMS:
            lines += histogram(name, text, {own: getattr(stats[0], attribute)}, started)
        sizes = {labels: float(engine.block_size) for labels in shown}
        lines += gauge("sglang:page_size", "Tokens in a page.", sizes)
        lines += gauge("sglang:num_pages", "Pages in all.", {labels: float(engine.blocks - 1) for labels in shown})
        return ("\n".join(lines) + "\n").encode()

    def _labels(self, rank: Rank) -> str:
        labels = self._own | {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
        return labelled(**labels, **({"dp_rank": str(rank.index)} if len(self._core.ranks) > 1 else {}))

    def _gauges(self, shown: Mapping[str, Snapshot]) -> Iterator[tuple[str, str, Mapping[str, float]]]:
        engine = self._core.settings.engine
        total = engine.capacity_tokens
        slots = engine.max_loras or 8

        def each(name: str) -> dict[str, float]:
            return {labels: getattr(one, name) for labels, one in shown.items()}

        def always(value: float) -> dict[str, float]:
            return dict.fromkeys(shown, value)

        available = {labels: total - one.used_tokens - one.evictable_tokens for labels, one in shown.items()}
        taken = {labels: one.adapters / slots for labels, one in shown.items()}
        yield "sglang:num_running_reqs", "The number of running requests.", each("running")
        yield "sglang:num_queue_reqs", "The number of requests in the waiting queue.", each("waiting")
        yield "sglang:num_grammar_queue_reqs", "The number of requests in the grammar queue.", always(0)
        yield "sglang:num_paused_reqs", "The number of paused requests.", always(0)
        yield "sglang:token_usage", "The token usage.", each("usage")
        yield "sglang:full_token_usage", "The token usage of full attention layers.", each("usage")
        yield "sglang:num_used_tokens", "The number of used tokens.", each("used_tokens")
        yield "sglang:kv_used_tokens", "Tokens of the KV cache that are used.", each("used_tokens")
        yield "sglang:kv_available_tokens", "Tokens of the KV cache that are free.", available
        yield "sglang:kv_evictable_tokens", "Tokens of the KV cache that can be evicted.", each("evictable_tokens")
        yield "sglang:cache_hit_rate", "The prefix cache hit rate.", each("hit_rate")
        yield "sglang:gen_throughput", "The generation throughput (token/s).", each("throughput")
        yield "sglang:max_total_num_tokens", "Tokens the KV cache can hold.", always(total)
        yield "sglang:context_len", "The longest sequence in tokens.", always(engine.context_tokens)
        if self._core.settings.adapters or self._core.settings.runtime_adapters:
            yield "sglang:lora_pool_slots_used", "Slots for adapters that are used.", each("adapters")
            yield "sglang:lora_pool_slots_total", "Slots for adapters.", always(slots)
            yield "sglang:lora_pool_utilization", "Share of the slots for adapters that is used.", taken

"""TensorRT-LLM's pages (`trtllm-serve`), 1.2 and later.

`GET /prometheus/metrics` needs `return_perf_metrics: true`, and has numbers of load since 1.3, with
`enable_iter_perf_stats: true`. `GET /metrics` is JSON, needs the latter alone on the PyTorch backend, and is emptied by
each call: who else calls it takes records away. Only the keeper that holds the endpoint's lease does.

Names: `tensorrt_llm/metrics/collector.py`, `cpp/tensorrt_llm/executor/jsonSerialization.cpp`,
`tensorrt_llm/serve/openai_server.py` of TensorRT-LLM.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from extproc.config_pools import EngineKind
from extproc.engines.adapter import About, Reading
from extproc.engines.cards import MODELS_PAGE, cards
from extproc.engines.kv_values import EventSource
from extproc.engines.numbers import (
    Page,
    amount,
    believed,
    count,
    decoded,
    most,
    named,
    rows,
    share,
    short,
    table,
    total,
)
from extproc.engines.prometheus import read
from extproc.errors import EngineError

_PROMETHEUS_PAGE: Final = "/prometheus/metrics"
_RECORDS_PAGE: Final = "/metrics"
_VERSION_PAGE: Final = "/version"
_INFO_PAGE: Final = "/server_info"
_EVENTS_PAGE: Final = "/kv_cache_events"

_RUNNING = "trtllm_num_requests_running"
_WAITING = "trtllm_num_requests_waiting"
_USAGE = "trtllm_kv_cache_utilization"
_USED = "trtllm_kv_cache_used_blocks"
_BLOCKS = "trtllm_kv_cache_max_blocks"
_BLOCK_TOKENS = "trtllm_kv_cache_tokens_per_block"
_PROMPT = "trtllm_prompt_tokens_total"
_CACHED = "trtllm_prompt_cached_tokens_total"
_OUTPUT = "trtllm_generation_tokens_total"
_ANY = "trtllm_request_success_total"
_NAMES = frozenset({_RUNNING, _WAITING, _USAGE, _USED, _BLOCKS, _BLOCK_TOKENS, _PROMPT, _CACHED, _OUTPUT, _ANY})

_V1_HASH: Final = "v1_block_key"
"""How blocks are hashed by an engine that does not say."""


class TensorRtAdapter:
    """`adapter.Adapter` of TensorRT-LLM's OpenAI server."""

    kind: EngineKind = "tensorrt_llm"
    load_pages = (_PROMETHEUS_PAGE, _RECORDS_PAGE)
    about_pages = ((MODELS_PAGE,), (_VERSION_PAGE,), (_INFO_PAGE,))

    def read(self, path: str, page: bytes) -> Reading:
        """See `Adapter.read`."""
        return _records(page) if path == _RECORDS_PAGE else _metrics(page)

    def about(self, path: str, page: bytes) -> About:
        """See `Adapter.about`.

        An engine whose list of models can be read is said to have events: whether they are switched on shows only when
        they are asked for, and that takes them out.
        """
        if path == MODELS_PAGE:
            served = cards(page)
            events = EventSource(way="drain", endpoint=_EVENTS_PAGE)
            return About(models=served.models, adapters=served.adapters, sources=(events,), hash_algo=_V1_HASH)
        told = table(decoded(page))
        return About(
            version=named(told, "version"),
            block_tokens=int(amount(told, "tokens_per_block")),
            hash_algo=named(told, "kv_cache_hash_algo"),
        )


def _metrics(page: bytes) -> Reading:
    """`GET /prometheus/metrics`.

    Gauges carry the label `pid`, with a series for each server process that ever wrote one. All of them are about the
    one engine, so that the greatest counts; nothing tells which is the newest. Counters are sums already.
    """
    short(page)
    found = read(page, _NAMES)
    if not any(True for _ in believed(found, _RUNNING)):
        if any(name in found for name in (_ANY, _PROMPT)):
            raise EngineError(f"{_PROMETHEUS_PAGE} has no gauges: see `enable_iter_perf_stats`", "not_found")
        raise EngineError(f"the metrics page has no {_RUNNING}: is this a TensorRT-LLM engine?", "other_kind")
    prompt = total(believed(found, _PROMPT))
    return Reading(
        running=count([most(believed(found, _RUNNING))]),
        waiting=count([most(believed(found, _WAITING))]),
        kv_usage=_usage(found),
        block_tokens=count([most(believed(found, _BLOCK_TOKENS))]),
        kv_blocks=count([most(believed(found, _BLOCKS))]),
        prefix_queries=prompt,
        prefix_hits=total(believed(found, _CACHED)),
        tokens=prompt + total(believed(found, _OUTPUT)),
        lags=True,
    )


def _usage(found: Page) -> float:
    if _USAGE in found:
        return share(most(believed(found, _USAGE)))
    blocks = most(believed(found, _BLOCKS))
    return share(most(believed(found, _USED)) / blocks) if blocks else 0.0


def _records(page: bytes) -> Reading:
    """`GET /metrics`: a record for each step since the last call. The latest of each attention-DP rank counts."""
    if not page[:64].lstrip().startswith(b"["):
        raise EngineError("the page of step records is no array: is this a TensorRT-LLM engine?", "other_kind")
    answer = decoded(page)
    ranks = {amount(row, "attentionDpRank"): row for row in rows(answer) if "numActiveRequests" in row}.values()
    if not ranks:
        if answer:
            raise EngineError(
                "the step records have no `numActiveRequests`: is this a TensorRT-LLM engine?", "other_kind"
            )
        return Reading(kept=True)
    caches = [table(rank.get("kvCacheStats")) for rank in ranks]
    block_tokens = int(most(amount(cache, "tokensPerBlock") for cache in caches))
    hits, misses = (sum(amount(cache, f"{name}Blocks") for cache in caches) for name in ("reused", "missed"))
    return Reading(
        running=count(amount(rank, "numActiveRequests") for rank in ranks),
        waiting=count(amount(rank, "numQueuedRequests") for rank in ranks),
        kv_usage=_fullest(caches),
        block_tokens=block_tokens,
        kv_blocks=int(sum(amount(cache, "maxNumBlocks") for cache in caches)),
        prefix_queries=(hits + misses) * block_tokens,
        prefix_hits=hits * block_tokens,
        ranks=len(ranks),
    )


def _fullest(caches: Sequence[Mapping[str, object]]) -> float:
    shares = (
        amount(cache, "usedNumBlocks") / blocks for cache in caches if (blocks := amount(cache, "maxNumBlocks")) > 0
    )
    return share(most(shares))

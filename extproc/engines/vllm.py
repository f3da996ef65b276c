"""vLLM's metrics page, from 0.8 to 0.33.

Names and meanings: `vllm/v1/metrics/loggers.py` of vLLM. Every engine metric has one series per data-parallel rank
(label `engine`) and served model, so a gauge is never read from its first line.
"""

from collections.abc import Iterator, Mapping, Sequence

from extproc.engines.adapter import MAX_PAGE_BYTES, Reading
from extproc.engines.prometheus import Sample, read
from extproc.errors import EngineError

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_SLEEP = "vllm:engine_sleep_state"
_CONFIG = "vllm:cache_config_info"
_STARTED = "process_start_time_seconds"

# A metric's names, newest first; 0.9 to 0.11 write both, 0.12 dropped the older.
_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
_PROMPT = "vllm:prompt_tokens_total"
_OUTPUT = "vllm:generation_tokens_total"

_NAMES = frozenset({_RUNNING, _WAITING, _SLEEP, _CONFIG, _STARTED, _PROMPT, _OUTPUT, *_KV_USAGE, *_QUERIES, *_HITS})

_BELIEVED = 1e15
"""No gauge or counter of an engine goes beyond it; larger values do not even fit the integers they are published as."""

_Page = Mapping[str, Sequence[Sample]]


class VllmAdapter:
    """`adapter.Adapter` of vLLM's OpenAI server."""

    metrics_path = "/metrics"

    def read(self, page: bytes) -> Reading:
        """See `Adapter.read`. NaN, infinite and absurdly large samples count as not told."""
        if len(page) > MAX_PAGE_BYTES:
            raise EngineError(f"the metrics page is longer than {MAX_PAGE_BYTES} bytes")
        found = read(page, _NAMES)
        running = list(_finite(found, _RUNNING))
        if not running:
            raise EngineError(f"the metrics page has no {_RUNNING}: is this a vLLM engine?")
        block_tokens, kv_blocks = _cache(found.get(_CONFIG, ()))
        return Reading(
            running=_count(running),
            waiting=_count(_finite(found, _WAITING)),
            kv_usage=min(1.0, max(0.0, 0.0, *_finite(found, *_KV_USAGE))),
            block_tokens=block_tokens,
            kv_blocks=kv_blocks,
            started_at=max(0.0, 0.0, *_finite(found, _STARTED)),
            asleep=_asleep(found.get(_SLEEP, ())),
            prefix_queries=sum(_finite(found, *_QUERIES)),
            prefix_hits=sum(_finite(found, *_HITS)),
            prefix_caching=_caching(found.get(_CONFIG, ())),
            tokens=sum(_finite(found, _PROMPT)) + sum(_finite(found, _OUTPUT)),
        )


def _finite(page: _Page, *names: str) -> Iterator[float]:
    """Believable values of the first of `names` that the page has."""
    for name in names:
        if name in page:
            return (sample.value for sample in page[name] if abs(sample.value) <= _BELIEVED)
    return iter(())


def _count(values: Sequence[float] | Iterator[float]) -> int:
    return max(0, round(sum(values)))


def _asleep(samples: Sequence[Sample]) -> bool:
    """Whether any rank says that it is not awake: a request may land on it and hang."""
    return any(sample.labels.get("sleep_state") == "awake" and sample.value == 0 for sample in samples)


def _caching(ranks: Sequence[Sample]) -> bool:
    """Whether prefixes are reused on every rank; `--no-enable-prefix-caching` is the one way to switch it off."""
    return all(rank.labels.get("enable_prefix_caching") != "False" for rank in ranks)


def _cache(ranks: Sequence[Sample]) -> tuple[int, int]:
    """Tokens of a block, and blocks of all ranks together.

    `kv_cache_size_tokens` is preferred: models whose layers share the block pool in groups keep fewer tokens than
    `num_gpu_blocks * block_size`. Older versions tell only the latter.
    """
    block_tokens = max((_whole(rank, "block_size") for rank in ranks), default=0)
    if block_tokens == 0:
        return 0, 0
    blocks = sum(
        _whole(rank, "kv_cache_size_tokens") // block_tokens or _whole(rank, "num_gpu_blocks") for rank in ranks
    )
    return block_tokens, blocks


def _whole(sample: Sample, label: str) -> int:
    """A label as a whole number; 0 for a label that is absent, `None`, or anything else."""
    text = sample.labels.get(label, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else 0

"""vLLM's pages, from 0.8 to 0.33.

Names and meanings: `vllm/v1/metrics/loggers.py` of vLLM. Every engine metric has one series per data-parallel rank
(label `engine`) and served model, so a gauge is never read from its first line.

An engine that sleeps says so on its metrics page, and is never picked. One that was paused (`POST /pause`, which exists
only with `VLLM_SERVER_DEV_MODE=1`) says so on no page that every server has: it takes requests and lets them hang, and
is noticed as one that stands still.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from extproc.config_pools import EngineKind
from extproc.engines.adapter import About, Reading
from extproc.engines.cards import MODELS_PAGE, cards
from extproc.engines.kv_values import EventSource
from extproc.engines.numbers import (
    LONGEST_NAME,
    MOST_NAMES,
    Page,
    believed,
    count,
    decoded,
    most,
    named,
    share,
    short,
    table,
    total,
    whole,
)
from extproc.engines.prometheus import Sample, read
from extproc.errors import EngineError

_VERSION_PAGE: Final = "/version"
_SOURCES_PAGE: Final = "/kv_event_sources"
"""Since 0.31."""

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_SLEEP = "vllm:engine_sleep_state"
_CONFIG = "vllm:cache_config_info"
_LORA = "vllm:lora_requests_info"
_STARTED = "process_start_time_seconds"

# A metric's names, newest first; 0.9 to 0.11 write both, 0.12 dropped the older.
_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
_PROMPT = "vllm:prompt_tokens_total"
_OUTPUT = "vllm:generation_tokens_total"

_NAMES = frozenset({_RUNNING, _WAITING, _SLEEP, _CONFIG, _STARTED, _PROMPT, _OUTPUT, *_KV_USAGE, *_QUERIES, *_HITS})


class VllmAdapter:
    """`adapter.Adapter` of vLLM's OpenAI server."""

    kind: EngineKind = "vllm"
    load_pages = ("/metrics",)
    about_pages = ((MODELS_PAGE,), (_VERSION_PAGE,), (_SOURCES_PAGE,))

    def read(self, path: str, page: bytes) -> Reading:  # noqa: ARG002
        """See `Adapter.read`. NaN, infinite and absurdly large samples count as not told."""
        short(page)
        found = read(page, _NAMES, greatest=(_LORA,))
        running = list(believed(found, _RUNNING))
        if not running:
            raise EngineError(f"the metrics page has no {_RUNNING}: is this a vLLM engine?", "other_kind")
        config = found.get(_CONFIG, ())
        block_tokens, kv_blocks = _cache(config)
        active, slots = _adapters(found)
        return Reading(
            running=count(running),
            waiting=count(believed(found, _WAITING)),
            kv_usage=share(most(believed(found, *_KV_USAGE))),
            block_tokens=block_tokens,
            kv_blocks=kv_blocks,
            started_at=most(believed(found, _STARTED)),
            asleep=_asleep(found.get(_SLEEP, ())),
            prefix_queries=total(believed(found, *_QUERIES)),
            prefix_hits=total(believed(found, *_HITS)),
            prefix_caching=_caching(config),
            tokens=total(believed(found, _PROMPT)) + total(believed(found, _OUTPUT)),
            ranks=len({sample.labels.get("engine", "") for sample in found[_RUNNING]}),
            active_adapters=active,
            max_adapters=slots,
            hash_algo=_told(config, "prefix_caching_hash_algo"),
        )

    def about(self, path: str, page: bytes) -> About:
        """See `Adapter.about`."""
        if path == MODELS_PAGE:
            served = cards(page)
            return About(models=served.models, adapters=served.adapters)
        if path == _SOURCES_PAGE:
            return About(sources=_sources(page))
        return About(version=named(table(decoded(page)), "version"))


def _asleep(samples: Sequence[Sample]) -> bool:
    """Whether any rank says that it is not awake: a request may land on it and hang."""
    return any(sample.labels.get("sleep_state") == "awake" and sample.value == 0 for sample in samples)


def _caching(ranks: Sequence[Sample]) -> bool | None:
    """Whether prefixes are reused on every rank; `--no-enable-prefix-caching` is the one way to switch it off."""
    return all(rank.labels.get("enable_prefix_caching") != "False" for rank in ranks) if ranks else None


def _cache(ranks: Sequence[Sample]) -> tuple[int, int]:
    """Tokens of a block, and blocks of all ranks together.

    `kv_cache_size_tokens` is preferred: models whose layers share the block pool in groups keep fewer tokens than
    `num_gpu_blocks * block_size`. Older versions tell only the latter.
    """
    block_tokens = max((whole(rank, "block_size") for rank in ranks), default=0)
    if block_tokens == 0:
        return 0, 0
    blocks = sum(whole(rank, "kv_cache_size_tokens") // block_tokens or whole(rank, "num_gpu_blocks") for rank in ranks)
    return block_tokens, blocks


def _told(ranks: Iterable[Sample], label: str) -> str:
    """The first rank's text of a label; empty where it has none."""
    text = next((rank.labels.get(label, "") for rank in ranks), "")
    return text if text != "None" and len(text) <= LONGEST_NAME else ""


def _adapters(found: Page) -> tuple[tuple[str, ...], int]:
    """Adapters with a request in the engine, and how many one batch may mix.

    vLLM adds a series for each set of names that it ever had, and its value is when it was last true. Both labels list
    the same adapters (0.33, `LoRARequestStates.update_scheduler_stats`): which of them run and which wait is not told.
    """
    for latest in found.get(_LORA, ()):
        labels = (latest.labels.get(f"{state}_lora_adapters", "") for state in ("running", "waiting"))
        names = {name for label in labels for name in label.split(",") if 0 < len(name) <= LONGEST_NAME}
        return tuple(sorted(names))[:MOST_NAMES], whole(latest, "max_lora")
    return (), 0


def _sources(page: bytes) -> tuple[EventSource, ...]:
    """`GET /kv_event_sources`: `KVEventsConfig` by data-parallel rank, with the endpoints that were bound."""
    answer = decoded(page)
    if not isinstance(answer, dict):
        raise EngineError("the page of KV event sources is no object", "other_kind")
    found = list[EventSource]()
    for rank, value in answer.items():
        settings = table(value)
        published = settings.get("enable_kv_cache_events") is True and settings.get("publisher") in (None, "zmq")
        endpoint = named(settings, "endpoint")
        if published and endpoint and rank.isascii() and rank.isdigit() and len(rank) <= 6:
            replay, topic = named(settings, "replay_endpoint"), named(settings, "topic")
            found.append(EventSource(int(rank), "zmq", endpoint, replay, topic))
    return tuple(sorted(found, key=lambda source: source.rank))[:MOST_NAMES]

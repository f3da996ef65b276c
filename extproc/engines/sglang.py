"""SGLang's pages, from 0.5.4 to 0.5.23.

`GET /v1/loads` is the best of them: it needs no flag, and its numbers are 15 steps of decoding old at most. `/metrics`
needs `--enable-metrics`, and its gauges move every 40 steps. `/get_load` is all that versions before 0.5.9 have without
the flag; 0.5.14 is the last that has it. Sources: `srt/entrypoints/v1_loads.py`, `srt/managers/load_snapshot.py`,
`srt/observability/metrics_collector.py`, `srt/entrypoints/http_server.py` of SGLang.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from extproc.config_pools import EngineKind
from extproc.engines.adapter import About, Reading
from extproc.engines.cards import MODELS_PAGE, cards
from extproc.engines.kv_values import EventSource
from extproc.engines.numbers import (
    MOST_NAMES,
    amount,
    believed,
    count,
    credible,
    decoded,
    most,
    named,
    rows,
    share,
    short,
    table,
    total,
    whole,
)
from extproc.engines.prometheus import Sample, read
from extproc.errors import EngineError

_LOADS_PAGE: Final = "/v1/loads?include=core"
_METRICS_PAGE: Final = "/metrics"
_GET_LOAD_PAGE: Final = "/get_load"
_INFO_PAGE: Final = "/server_info"
_OLD_INFO_PAGE: Final = "/get_server_info"

_RUNNING = "sglang:num_running_reqs"
_WAITING = "sglang:num_queue_reqs"
_USAGE = "sglang:token_usage"
_CAPACITY = "sglang:max_total_num_tokens"
_PAGE_SIZE = "sglang:page_size"
_PROMPT = "sglang:prompt_tokens_total"
_OUTPUT = "sglang:generation_tokens_total"
_CACHED = "sglang:cached_tokens_total"
_CONFIG = "sglang:cache_config_info"
"""0.5.9 writes it, 0.5.23 no longer does."""
_SLOTS = "sglang:lora_pool_slots_total"
_STARTED = "process_start_time_seconds"
_NAMES = frozenset(
    {_RUNNING, _WAITING, _USAGE, _CAPACITY, _PAGE_SIZE, _PROMPT, _OUTPUT, _CACHED, _CONFIG, _SLOTS, _STARTED}
)

_STEPS = 0
"""Place of the number of decoding steps in `decode_moments`."""


class SglangAdapter:
    """`adapter.Adapter` of SGLang's HTTP server."""

    kind: EngineKind = "sglang"
    load_pages = (_LOADS_PAGE, _METRICS_PAGE, _GET_LOAD_PAGE)
    about_pages = ((MODELS_PAGE,), (_INFO_PAGE, _OLD_INFO_PAGE))

    def read(self, path: str, page: bytes) -> Reading:
        """See `Adapter.read`."""
        return _READERS[path](page)

    def about(self, path: str, page: bytes) -> About:
        """See `Adapter.about`."""
        if path == MODELS_PAGE:
            served = cards(page)
            return About(models=served.models, adapters=served.adapters)
        return _info(page)


def _info(page: bytes) -> About:
    """`GET /server_info`, `/get_server_info` in versions before it: the flags, what became of them, and the version."""
    info = table(decoded(page))
    if "page_size" not in info:
        raise EngineError("the server information has no `page_size`: is this an SGLang engine?", "other_kind")
    ranks = int(amount(info, "dp_size"))
    disabled = info.get("disable_radix_cache")
    return About(
        version=named(info, "version"),
        sources=_sources(table(info.get("kv_events"))),
        block_tokens=int(amount(info, "page_size")),
        kv_tokens=int(amount(info, "max_total_num_tokens")) * max(1, ranks),
        ranks=ranks,
        max_adapters=int(amount(info, "max_loras_per_batch")) if info.get("enable_lora") is True else 0,
        prefix_caching=not disabled if isinstance(disabled, bool) else None,
    )


def _loads(page: bytes) -> Reading:
    """`GET /v1/loads`: one object for each data-parallel rank."""
    answer = table(decoded(page))
    if not isinstance(answer.get("loads"), list):
        raise EngineError("the page of loads has no `loads`: is this an SGLang engine?", "other_kind")
    ranks = {amount(row, "dp_rank"): row for row in rows(answer["loads"]) if "num_running_reqs" in row}.values()
    if not ranks:
        raise EngineError("the page of loads has no rank with `num_running_reqs`")
    return Reading(
        running=count(amount(rank, "num_running_reqs") for rank in ranks),
        waiting=count(amount(rank, "num_waiting_reqs") for rank in ranks),
        kv_usage=share(max(_usage(rank) for rank in ranks)),
        version=named(answer, "version"),
        tokens=sum(_worked(rank) for rank in ranks),
        kv_tokens=int(sum(amount(rank, "max_total_num_tokens") for rank in ranks)),
        ranks=len(ranks),
        max_adapters=int(most(amount(table(rank.get("lora")), "slots_total") for rank in ranks)),
    )


def _usage(rank: Mapping[str, object]) -> float:
    """Share of the tokens in use. `token_usage` is the same, rounded so far that short steps do not show in it."""
    capacity = amount(rank, "max_total_num_tokens")
    return amount(rank, "num_used_tokens") / capacity if capacity else amount(rank, "token_usage")


def _worked(rank: Mapping[str, object]) -> float:
    """Prompt tokens that were computed, and steps of decoding that were made."""
    moments = rank.get("decode_moments")
    steps = moments[_STEPS] if isinstance(moments, list) and moments else 0
    return amount(rank, "total_prefill_uncached_tokens") + amount({"steps": steps}, "steps")


def _get_load(page: bytes) -> Reading:
    """`GET /get_load`: `num_reqs` counts running and waiting requests."""
    ranks = [row for row in rows(decoded(page)) if "num_reqs" in row]
    if not ranks:
        raise EngineError("the page of loads has no rank with `num_reqs`: is this an SGLang engine?", "other_kind")
    waiting = count(amount(rank, "num_waiting_reqs") for rank in ranks)
    return Reading(
        running=max(0, count(amount(rank, "num_reqs") for rank in ranks) - waiting),
        waiting=waiting,
        ranks=len({amount(rank, "dp_rank") for rank in ranks}),
    )


def _metrics(page: bytes) -> Reading:
    """`GET /metrics`. The ranks of tensor and pipeline parallelism tell the same; those of data parallelism add up."""
    short(page)
    found = read(page, _NAMES)
    running = _by_rank(found.get(_RUNNING, ()))
    if not running:
        raise EngineError(f"the metrics page has no {_RUNNING}: is this an SGLang engine?", "other_kind")
    cached = found.get(_CACHED, ())
    totals = [sample for sample in cached if sample.labels.get("cache_source") == "total"]
    prompt = total(believed(found, _PROMPT))
    return Reading(
        running=count(running.values()),
        waiting=count(_by_rank(found.get(_WAITING, ())).values()),
        kv_usage=share(most(believed(found, _USAGE))),
        block_tokens=int(most(believed(found, _PAGE_SIZE))) or _old_page_size(found.get(_CONFIG, ())),
        started_at=most(believed(found, _STARTED)),
        prefix_queries=prompt,
        prefix_hits=total(believed({_CACHED: totals or cached}, _CACHED)),
        tokens=prompt + total(believed(found, _OUTPUT)),
        kv_tokens=int(sum(_by_rank(found.get(_CAPACITY, ())).values())),
        ranks=len(running),
        max_adapters=int(most(believed(found, _SLOTS))),
        lags=True,
    )


def _by_rank(samples: Sequence[Sample]) -> dict[str, float]:
    """A gauge by data-parallel rank: the greatest of the copies that its other ranks tell.

    With priority scheduling, the series without a priority is the sum of those with one.
    """
    copies = dict[tuple[str, ...], dict[str, float]]()
    for sample in credible(samples):
        labels = sample.labels
        copy = tuple(labels.get(name, "") for name in ("dp_rank", "tp_rank", "pp_rank", "moe_ep_rank", "model_name"))
        copies.setdefault(copy, {})[labels.get("priority", "")] = sample.value
    ranks = dict[str, float]()
    for (rank, *_), by_priority in copies.items():
        value = by_priority.get("", sum(by_priority.values()))
        ranks[rank] = max(ranks.get(rank, 0.0), value)
    return ranks


def _old_page_size(samples: Sequence[Sample]) -> int:
    return max((whole(sample, "page_size") for sample in samples), default=0)


def _sources(described: Mapping[str, object]) -> tuple[EventSource, ...]:
    """Key `kv_events` of the server information: rank r publishes on `endpoint_port_base` + r.

    Null where events are off, and for publishers that bind no port.
    """
    port, replay = (int(amount(described, f"{name}_port_base")) for name in ("endpoint", "replay_endpoint"))
    host = named(described, "endpoint_host") or "*"
    if described.get("publisher") != "zmq" or not 0 < port < 65_536:
        return ()
    ranks = min(max(1, int(amount(described, "dp_size"))), MOST_NAMES)
    return tuple(
        EventSource(
            rank,
            "zmq",
            f"tcp://{host}:{port + rank}",
            f"tcp://{host}:{replay + rank}" if replay else "",
            named(described, "topic"),
        )
        for rank in range(ranks)
    )


_READERS: Final[Mapping[str, Callable[[bytes], Reading]]] = {
    _LOADS_PAGE: _loads,
    _METRICS_PAGE: _metrics,
    _GET_LOAD_PAGE: _get_load,
}

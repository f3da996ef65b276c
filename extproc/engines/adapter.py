"""The contract of an engine: where its numbers stand, and how they become a `Reading` and an `About`. No I/O here."""

from typing import Literal, Protocol

import msgspec

from extproc.config_pools import EngineKind
from extproc.engines.kv_values import EventSource

MAX_PAGE_BYTES = 4 * 1024 * 1024
"""Longest page that is read. One vLLM engine writes 63 KB of metrics, and about as much again for each further
data-parallel rank and served model name."""

Fault = Literal[
    "unreachable",
    "silent",
    "broken",
    "not_found",
    "forbidden",
    "status",
    "redirect",
    "content_type",
    "encoding",
    "too_long",
    "malformed",
    "other_kind",
]
"""Why a page could not be read; `EngineError.fault` and the label of a metric.

`unreachable` no connection; `silent` connected, and no page in time; `broken` the connection broke; `not_found` HTTP
404; `forbidden` 401 or 403; `redirect` 3xx, which is never followed; `status` any other HTTP error; `content_type` an
HTML page; `encoding` compressed in a way that is not known, or badly; `too_long` over `MAX_PAGE_BYTES`; `malformed`
broken; `other_kind` a page without what this kind of engine writes.
"""


class Reading(msgspec.Struct, frozen=True, gc=False):
    """What a page of load told. A number that the engine does not tell keeps its default.

    Attributes:
        running: requests in the batch, all data-parallel ranks together.
        waiting: requests in the queue, all ranks together.
        kv_usage: share of KV blocks in use on the fullest rank, 0 to 1.
        block_tokens: tokens in one KV block; 0 when not told.
        kv_blocks: blocks of `block_tokens` tokens that the cache holds, all ranks together; 0 when not told.
        started_at: start of the engine's process, seconds since the epoch; 0 when not told.
        asleep: the engine takes requests and lets them hang until it is woken.
        prefix_queries: prompt tokens looked up in the prefix cache since the start.
        prefix_hits: of these, found.
        prefix_caching: it reuses the prefixes of earlier prompts; None when not told.
        version: the engine's version; empty when not told.
        tokens: what it has worked through since the start, in tokens or, for engines that count only those, in tokens
            of prompts and steps of decoding; 0 when not told.
        kv_tokens: tokens that the cache holds, of engines that tell this instead of `kv_blocks`; 0 when not told.
        ranks: data-parallel ranks that the page shows; 0 when it does not say.
        active_adapters: LoRA adapters with a request in the engine.
        max_adapters: adapters that one batch may mix; 0 when not told.
        hash_algo: how the engine hashes its blocks; empty when not told.
        lags: the numbers may stand still for seconds while the engine works: TensorRT-LLM's gauges move only when a
            request completes, SGLang's every 40 steps of decoding.
        kept: the page had nothing new, as a page that is emptied by each reading has none when no step was made since;
            what the last one told still holds, and all numbers here are defaults.
        kind: engine that wrote the page, filled in by who asked for it.
        page: path of the page, filled in by who asked for it.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    block_tokens: int = 0
    kv_blocks: int = 0
    started_at: float = 0.0
    asleep: bool = False
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0
    prefix_caching: bool | None = None
    version: str = ""
    tokens: float = 0.0
    kv_tokens: int = 0
    ranks: int = 0
    active_adapters: tuple[str, ...] = ()
    max_adapters: int = 0
    hash_algo: str = ""
    lags: bool = False
    kept: bool = False
    kind: str = ""
    page: str = ""


class About(msgspec.Struct, frozen=True, gc=False):
    """What a slow page told of the engine.

    What keeps its default was not told, and what was told before holds. Several pages are put one over the other.

    Attributes:
        models: names that the base model is served as.
        adapters: LoRA adapters that can be asked for. They are loaded; nobody tells which of them are on the GPU.
        version: the engine's version; empty when not told.
        sources: where its KV events are to be had; empty when it has none.
        block_tokens: tokens in one KV block; 0 when not told.
        kv_tokens: tokens that the cache holds, all data-parallel ranks together; 0 when not told.
        ranks: data-parallel ranks; 0 when not told.
        max_adapters: adapters that one batch may mix; 0 when not told.
        hash_algo: how the engine hashes its blocks; empty when not told.
        prefix_caching: it reuses the prefixes of earlier prompts.
    """

    models: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None
    version: str = ""
    sources: tuple[EventSource, ...] | None = None
    block_tokens: int = 0
    kv_tokens: int = 0
    ranks: int = 0
    max_adapters: int = 0
    hash_algo: str = ""
    prefix_caching: bool | None = None


class Adapter(Protocol):
    """One kind of engine. All its pages are asked for with GET."""

    @property
    def kind(self) -> EngineKind:
        """The kind; never `auto`."""
        ...

    @property
    def load_pages(self) -> tuple[str, ...]:
        """Paths of the pages that carry the load, best first. The first that can be read is asked for every round."""
        ...

    @property
    def about_pages(self) -> tuple[tuple[str, ...], ...]:
        """Paths of the pages that carry the rest, asked for at the start, after a restart, and every few seconds.

        Not every version has every page. Of several paths together the first that is there is asked for: it was called
        otherwise in older versions.
        """
        ...

    def read(self, path: str, page: bytes) -> Reading:
        """Turn a page of load into numbers.

        Args:
            path: which of `load_pages` it is.
            page: its body.

        Raises:
            EngineError: the page is longer than `MAX_PAGE_BYTES`, malformed, or not this kind's.
        """
        ...

    def about(self, path: str, page: bytes) -> About:
        """Turn a slow page into what it tells.

        Args:
            path: which of `about_pages` it is.
            page: its body.

        Raises:
            EngineError: the page is too long, malformed, or not this kind's.
        """
        ...

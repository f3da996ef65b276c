"""The contract of an engine: where its numbers stand, and how they become one `Reading`. No I/O here."""

from typing import Protocol

import msgspec

MAX_PAGE_BYTES = 4 * 1024 * 1024
"""Longest metrics page that is read. One vLLM engine writes 63 KB, and about as much again for each further
data-parallel rank and served model name."""


class Reading(msgspec.Struct, frozen=True, gc=False):
    """What one page told. A number that the engine does not tell keeps its default.

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
        prefix_caching: it reuses the prefixes of earlier prompts; True when not told.
        version: the engine's version; empty when not told.
        tokens: prompt and output tokens worked through since the start; 0 when not told.
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
    prefix_caching: bool = True
    version: str = ""
    tokens: float = 0.0


class Adapter(Protocol):
    """One kind of engine."""

    @property
    def metrics_path(self) -> str:
        """Path of the page that `read` understands, with its leading slash."""
        ...

    def read(self, page: bytes) -> Reading:
        """Turn a page into numbers.

        Raises:
            EngineError: the page is longer than `MAX_PAGE_BYTES`, malformed, or not this kind's.
        """
        ...

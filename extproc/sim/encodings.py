"""Events as each engine and version writes them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from extproc.sim.block_keys import Extra, extras
from extproc.sim.block_log import Event, Removed, Stored
from extproc.sim.profiles import Profile
from extproc.sim.tokens import to_ids

_PRIORITY = 35
"""TensorRT-LLM's default retention priority."""


def batch(profile: Profile, events: Sequence[Event], at: float, rank: int) -> bytes:
    """Return a step's events as vLLM and SGLang publish them: msgpack of `[ts, events, rank]`.

    Args:
        profile: whose encoding.
        events: in order.
        at: seconds since the epoch.
        rank: data-parallel rank.
    """
    written: list[Any]
    if profile.engine == "sglang":
        written = [one for event in events for one in _sglang(event)]
    elif profile.event_maps:
        written = [_vllm_map(profile, event) for event in events]
    else:
        written = [_vllm_array(profile, event) for event in events]
    return msgspec.msgpack.encode([at, written, rank])


def data_of(event: Stored | Removed) -> dict[str, Any]:
    """Return `data` of an event of TensorRT-LLM's `/kv_cache_events`."""
    if isinstance(event, Removed):
        return {"type": "removed", "block_hashes": [event.hash]}
    return {
        "type": "stored",
        "parent_hash": event.parent,
        "blocks": [_stored_block(one) for one in event.blocks()],
    }


def _stored_block(block: Stored) -> dict[str, Any]:
    tokens = [{"type": "unique_token", "token_id": one, "token_extra_id": 0} for one in to_ids(block.data)]
    written = {
        "type": "stored_block",
        "block_hash": block.hashes[0],
        "tokens": tokens,
        "cache_level": 0,
        "priority": _PRIORITY,
        "mm_keys": [],
    }
    return written | ({"cache_salt": block.content.salt} if block.content.salt else {})


def _extra_keys(profile: Profile, event: Stored) -> list[tuple[Extra, ...] | None]:
    size = event.block_size
    starts = range(event.start, event.start + size * len(event.hashes), size)
    return [
        extras(profile, event.content, start, start + size, first=event.parent is None and start == event.start) or None
        for start in starts
    ]


def _vllm_map(profile: Profile, event: Event) -> dict[str, Any]:
    if isinstance(event, Stored):
        adapter = event.content.adapter
        return {
            "type": "BlockStored",
            "block_hashes": event.hashes,
            "parent_block_hash": event.parent,
            "token_ids": to_ids(event.data),
            "block_size": event.block_size,
            "lora_id": None if adapter is None else adapter.id,
            "medium": "GPU",
            "lora_name": None if adapter is None else adapter.name,
            "extra_keys": _extra_keys(profile, event),
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    if isinstance(event, Removed):
        return {"type": "BlockRemoved", "block_hashes": [event.hash], "medium": "GPU", "group_idx": 0}
    return {"type": "AllBlocksCleared"}


def _vllm_array(profile: Profile, event: Event) -> list[Any]:
    """Return an event as versions up to 0.23 write it: every field the version knows, by position."""
    minor = profile.minor
    if isinstance(event, Stored):
        adapter = event.content.adapter
        lora_id = None if adapter is None else adapter.id
        written: list[Any] = ["BlockStored", event.hashes, event.parent, to_ids(event.data)]
        written += (event.block_size, lora_id, "GPU")
        if minor >= 14:
            written.append(None if adapter is None else adapter.name)
        if minor >= 17:
            written.append(_extra_keys(profile, event))
        if minor >= 22:
            written += (0, "full_attention", None)
        return written
    if isinstance(event, Removed):
        return ["BlockRemoved", [event.hash], "GPU", *([0] if minor >= 22 else [])]
    return ["AllBlocksCleared"]


def _sglang(event: Event) -> list[dict[str, Any]]:
    """Return an event as SGLang writes it since 0.5.20: one map a page, without what is not set."""
    if isinstance(event, Stored):
        return [_sglang_page(one) for one in event.blocks()]
    if isinstance(event, Removed):
        return [{"type": "BlockRemoved", "block_hashes": [event.hash], "medium": "GPU"}]
    return [{"type": "AllBlocksCleared"}]


def _sglang_page(page: Stored) -> dict[str, Any]:
    tokens = to_ids(page.data)
    written = {
        "type": "BlockStored",
        "block_hashes": page.hashes,
        "parent_block_hash": page.parent,
        "token_ids": tokens,
        "block_size": len(tokens),
        "lora_id": None,
        "medium": "GPU",
    }
    if page.content.salt:
        written["cache_salt"] = page.content.salt
    if page.content.adapter is not None:
        written["lora_name"] = page.content.adapter.name
    return written

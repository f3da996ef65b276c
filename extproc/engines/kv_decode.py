"""KV event batches of vLLM and SGLang: msgpack of every version to `kv_values`. No I/O here.

One core of an AMD EPYC decodes, in batches of 8 events and blocks of 16 tokens, 390,000 BlockStored a second of one
block, 140,000 of 8 and 50,000 of 32, where most of the time goes to token ids, and 780,000 BlockRemoved.
"""

from collections.abc import Generator, Iterator, Sequence
from copy import copy

import msgspec

from extproc.block_extras import named
from extproc.engines.kv_extras import of_block
from extproc.engines.kv_frames import MAX_PAYLOAD_BYTES
from extproc.engines.kv_ids import block_id, block_ids
from extproc.engines.kv_layout import Layout
from extproc.engines.kv_values import Cleared, EventBatch, KvEvent, Removed, Stored, Tier
from extproc.engines.kv_wire import (
    AT_ONCE_BYTES,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Metadata,
    Told,
    read,
    reading,
)
from extproc.errors import EngineError

_MEDIA = {
    "GPU": Tier.GPU,
    "CPU": Tier.CPU,
    "CPU_PINNED": Tier.CPU,
    "STORAGE": Tier.DISK,
    "DISK": Tier.DISK,
    "EXTERNAL": Tier.DISK,
}
_TIERS = _MEDIA | {medium.lower(): tier for medium, tier in _MEDIA.items()}
"""Tiers by the names that engines give media; vLLM's connectors write some of them in lower case."""
_REMOTE = "REMOTE"
"""`locality` of a block that another machine keeps: as far as disk, whatever its medium there."""

_LATEST = 1e10
"""The year 2286, in seconds since the epoch."""
_MOST_RANKS = 4096
_MOST_BLOCK_TOKENS = 1 << 20
_AT_A_TIME = 512
"""Blocks, or events of fewer, between two steps, which take about 1 ms."""


def decode(payload: bytes, layout: Layout | None = None) -> EventBatch:
    """Turn the payload of one message into events.

    Left out and counted in `EventBatch.skipped`: events of unknown kinds and media; of groups of layers that do not
    count; blocks smaller than others, which end a prompt; blocks without token ids, as vLLM's offloading tells some, or
    with pairs of them, as SGLang does under EAGLE; blocks whose hashes, token ids and extra keys do not fit each other.

    A LoRA adapter goes by its name, which is what requests ask for. vLLM up to 0.13 tells only the number it gave it:
    `lora:3` keeps such blocks from being taken for the base model's, but no request asks for them.

    Args:
        payload: msgpack, one batch.
        layout: what earlier batches of this life of the engine told; without it the removals of a hybrid model's groups
            cannot be told apart. None knows nothing yet.

    Raises:
        EngineError: the payload is longer than `MAX_PAYLOAD_BYTES`, is no batch of events, or an event of a known kind
            is malformed.
    """
    _check_length(payload)
    batch, skipped = read(payload)
    _check_rank(batch)
    known = Layout() if layout is None else layout
    for told in batch.events:
        _learn(told, known)
    found = [event for told in batch.events if (event := _event(told, known)) is not None]
    return _batch(batch, found, skipped + len(batch.events) - len(found))


def decoding(payload: bytes, layout: Layout | None = None) -> Generator[None, None, EventBatch]:
    """Do what `decode` does in steps of about 1 ms; see `kv_wire.reading` for those that take longer.

    Long events come in pieces of `_AT_A_TIME` blocks, each of which goes on from the one before: together they say the
    same.

    Raises:
        EngineError: see `decode`.
    """
    if len(payload) <= AT_ONCE_BYTES:
        return decode(payload, layout)
    _check_length(payload)
    batch, skipped = yield from reading(payload)
    _check_rank(batch)
    known = Layout() if layout is None else layout
    for number, told in enumerate(batch.events, start=1):
        _learn(told, known)
        if number % _AT_A_TIME == 0:
            yield
    found, count = list[KvEvent](), 0
    for told in batch.events:
        left_out = True
        for piece in _pieces(told):
            event = _event(piece, known)
            if event is not None:
                found.append(event)
                left_out = False
            count += len(event.hashes) if isinstance(event, Stored | Removed) else 1
            if count >= _AT_A_TIME:
                count = 0
                yield
        skipped += left_out
    return _batch(batch, found, skipped)


def _check_length(payload: bytes) -> None:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise EngineError(f"a batch of KV events is longer than {MAX_PAYLOAD_BYTES} bytes")


def _check_rank(batch: Batch[Told]) -> None:
    if not 0 <= (batch.rank or 0) < _MOST_RANKS:
        raise EngineError(f"a batch of KV events has a data-parallel rank outside 0 to {_MOST_RANKS - 1}")


def _batch(batch: Batch[Told], events: Sequence[KvEvent], skipped: int) -> EventBatch:
    at = batch.ts if 0.0 <= batch.ts < _LATEST else 0.0
    return EventBatch(at, batch.rank or 0, tuple(events), skipped)


def _pieces(told: Told) -> Iterator[Told]:
    """An event in pieces of `_AT_A_TIME` blocks; one that lacks tokens or keys of some blocks stays whole."""
    count = 0 if isinstance(told, AllBlocksCleared) else len(told.block_hashes)
    if (
        isinstance(told, AllBlocksCleared)
        or count <= _AT_A_TIME
        or (isinstance(told, BlockStored) and not _is_whole(told))
    ):
        yield told
        return
    for start in range(0, count, _AT_A_TIME):
        end = start + _AT_A_TIME
        piece = copy(told)
        piece.block_hashes = told.block_hashes[start:end]
        if isinstance(told, BlockStored) and isinstance(piece, BlockStored):
            piece.parent_block_hash = told.block_hashes[start - 1] if start else told.parent_block_hash
            piece.token_ids = told.token_ids[start * told.block_size : end * told.block_size]
            piece.extra_keys = told.extra_keys[start:end] if told.extra_keys else None
        yield piece


def _learn(told: Told, layout: Layout) -> None:
    """Let the layout see an event before any of its batch is read: groups follow each other in no certain order."""
    if not isinstance(told, BlockStored) or (told.block_size == layout.block_tokens and told.group_idx == layout.group):
        return
    layout.learn_group(told.group_idx, told.kv_cache_spec_kind)
    if layout.keeps_group(told.group_idx) and _is_whole(told) and _tier(told.medium, told.locality) is Tier.GPU:
        layout.learn_block(told.block_size)


def _event(told: Told, layout: Layout) -> KvEvent | None:
    """None for an event that is left out."""
    match told:
        case BlockStored():
            return _stored(told, layout)
        case BlockRemoved():
            is_placed = bool(told.medium) or told.locality == _REMOTE
            tier = _tier(told.medium, told.locality) if is_placed else None
            if not told.block_hashes or not layout.keeps_group(told.group_idx) or (is_placed and tier is None):
                return None
            return Removed(block_ids(told.block_hashes), tier)
    return Cleared()


def _stored(told: BlockStored, layout: Layout) -> Stored | None:
    tier = _tier(told.medium, told.locality)
    if tier is None or not layout.keeps_group(told.group_idx) or not _is_whole(told):
        return None
    if not layout.is_full(told.block_size):
        return None
    adapter = _adapter(told)
    parent = None if told.parent_block_hash is None else block_id(told.parent_block_hash)
    extras = _extras(told, adapter, parent is None)
    return Stored(block_ids(told.block_hashes), parent, told.token_ids, told.block_size, tier, adapter, extras)


def _is_whole(told: BlockStored) -> bool:
    """Whether an event has all tokens of its blocks, and extra keys for each if any."""
    count = len(told.block_hashes)
    if not count or not 0 < told.block_size <= _MOST_BLOCK_TOKENS:
        return False
    return len(told.token_ids) == count * told.block_size and (not told.extra_keys or len(told.extra_keys) == count)


def _tier(medium: str | None, locality: str | None) -> Tier | None:
    """The tier of a medium; the GPU when none is told, None for an unknown name."""
    if locality == _REMOTE:
        return Tier.DISK
    return _TIERS.get(medium) if medium else Tier.GPU


def _adapter(told: BlockStored) -> str:
    if isinstance(told.lora_name, str) and told.lora_name:
        return told.lora_name
    return "" if told.lora_id is None else f"lora:{told.lora_id}"


def _extras(told: BlockStored, adapter: str, begins: bool) -> tuple[bytes, ...]:
    """What beside tokens entered each block, without empty ones at the end."""
    keys: Sequence[Sequence[msgspec.Raw] | None] = told.extra_keys or ()
    extras = [of_block(one, adapter) for one in keys] if any(keys) else []
    salt = told.lora_name.cache_salt if isinstance(told.lora_name, Metadata) else told.cache_salt
    if salt and begins:
        # SGLang names the salt in every event of a prompt; it seeds the chain, so the first block's is enough.
        extras[:1] = [(extras[0] if extras else b"") + named(salt)]
    while extras and not extras[-1]:
        extras.pop()
    return tuple(extras)

"""KV event batches of vLLM and SGLang as they are written: msgpack to structs that mirror it, all versions in one.

A batch is `[time, events, rank]`. Events are arrays with their kind in front up to vLLM 0.23 and SGLang 0.5.19, maps
with a key `type` from vLLM 0.24 and SGLang 0.5.20 on; fields came over time, always at the end of the arrays.
Definitions: `vllm/distributed/kv_events.py`, SGLang's `disaggregation/kv_events.py`.
"""

from collections.abc import Generator
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from extproc.errors import EngineError

MAX_EVENTS = 1 << 18
"""Most events of a batch, and most blocks of an event, that are read: what is told in few bytes takes much memory."""
AT_ONCE_BYTES = 32 * 1024
"""Payloads up to here are read in one go: 0.8 ms as engines write them, 4 ms at worst."""
_MOST_KEYS = 256
_EVENT_BYTES = 32
"""What reading an event costs beside reading its bytes, in bytes."""

_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Hash = int | bytes
_Hashes = Annotated[tuple[_Hash, ...], msgspec.Meta(max_length=MAX_EVENTS)]
_Keys = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MOST_KEYS)]


class Metadata(msgspec.Struct, gc=False):
    """What SGLang 0.5.19 writes behind the medium, where vLLM has the adapter's name."""

    cache_salt: str | None = None


class BlockStored(msgspec.Struct, gc=False):
    """Blocks that became cached; fields in the order of the arrays, then those that only maps have."""

    block_hashes: _Hashes
    parent_block_hash: _Hash | None
    token_ids: tuple[_Token, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | Metadata | None = None
    extra_keys: Annotated[list[_Keys | None], msgspec.Meta(max_length=MAX_EVENTS)] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: msgspec.Raw = msgspec.Raw()
    locality: str | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, gc=False):
    """Blocks that are gone; fields likewise."""

    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, gc=False):
    """The cache was emptied."""


Told = BlockStored | BlockRemoved | AllBlocksCleared


class _StoredMap(BlockStored, gc=False, tag="BlockStored"):
    pass


class _RemovedMap(BlockRemoved, gc=False, tag="BlockRemoved"):
    pass


class _ClearedMap(AllBlocksCleared, gc=False, tag="AllBlocksCleared"):
    pass


class _StoredArray(BlockStored, gc=False, tag="BlockStored", array_like=True):
    pass


class _RemovedArray(BlockRemoved, gc=False, tag="BlockRemoved", array_like=True):
    pass


class _ClearedArray(AllBlocksCleared, gc=False, tag="AllBlocksCleared", array_like=True):
    pass


class _KindMap(msgspec.Struct, gc=False):
    """The kind of an event, and nothing else of it."""

    type: str


class _KindArray(_KindMap, gc=False, array_like=True):
    pass


class _PairsMap(msgspec.Struct, gc=False):
    """BlockStored of SGLang under EAGLE: a pair of token ids in the place of each."""

    block_hashes: msgspec.Raw
    parent_block_hash: msgspec.Raw
    token_ids: list[tuple[int, int]]


class _PairsArray(_PairsMap, gc=False, tag="BlockStored", array_like=True):
    pass


_Event = TypeVar("_Event")


class Batch(msgspec.Struct, Generic[_Event], gc=False, array_like=True):
    """One batch; the time in seconds since the epoch."""

    ts: float
    events: Annotated[list[_Event], msgspec.Meta(max_length=MAX_EVENTS)]
    rank: int | None = None


_Map = _StoredMap | _RemovedMap | _ClearedMap
_Array = _StoredArray | _RemovedArray | _ClearedArray

_MAPS = msgspec.msgpack.Decoder(Batch[_Map])
_ARRAYS = msgspec.msgpack.Decoder(Batch[_Array])
_EITHER = msgspec.msgpack.Decoder(Batch[msgspec.Raw])
_MAP = msgspec.msgpack.Decoder(_Map)
_ARRAY = msgspec.msgpack.Decoder(_Array)
_KIND_MAP = msgspec.msgpack.Decoder(_KindMap)
_KIND_ARRAY = msgspec.msgpack.Decoder(_KindArray)
_PAIRS_MAP = msgspec.msgpack.Decoder(_PairsMap)
_PAIRS_ARRAY = msgspec.msgpack.Decoder(_PairsArray)

_KINDS = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def read(payload: bytes) -> tuple[Batch[Told], int]:
    """Read a batch.

    Returns:
        The batch, with the events of known kinds only, and how many others it had: of unknown kinds, or with pairs of
        token ids.

    Raises:
        EngineError: it is no batch of events, or an event of a known kind is malformed.
    """
    for decoder in (_MAPS, _ARRAYS):
        try:
            batch: Any = decoder.decode(payload)
        except _UNREADABLE:
            continue
        return batch, 0
    # Both forms mixed, a kind that nobody here knows, or damage: event by event, to say which.
    try:
        raw = _EITHER.decode(payload)
    except _UNREADABLE as error:
        raise EngineError(f"a batch of KV events cannot be read: {error}") from None
    told = [event for each in raw.events if (event := _one(each)) is not None]
    return Batch(raw.ts, told, raw.rank), len(raw.events) - len(told)


def reading(payload: bytes) -> Generator[None, None, tuple[Batch[Told], int]]:
    """Do what `read` does in steps of `AT_ONCE_BYTES`, which is about 1 ms: 8 MiB take 0.2 to 0.5 s.

    The first step goes over all bytes once, without making anything of them: 15 ms for 8 MiB. An event is never parted:
    one of a million token ids takes 30 ms.

    Raises:
        EngineError: see `read`.
    """
    try:
        raw = _EITHER.decode(payload)
    except _UNREADABLE as error:
        raise EngineError(f"a batch of KV events cannot be read: {error}") from None
    yield
    told, bytes_read = list[Told](), 0
    for each in raw.events:
        event = _one(each)
        if event is not None:
            told.append(event)
        bytes_read += _EVENT_BYTES + memoryview(each).nbytes
        if bytes_read >= AT_ONCE_BYTES:
            bytes_read = 0
            yield
    return Batch(raw.ts, told, raw.rank), len(raw.events) - len(told)


def _one(raw: msgspec.Raw) -> Told | None:
    """Read one event of either form; None for one that is to be left out."""
    is_array = _is_array(memoryview(raw)[0])
    try:
        return (_ARRAY if is_array else _MAP).decode(raw)
    except _UNREADABLE as error:
        _check_unread(raw, is_array, error)
    return None


def _check_unread(raw: msgspec.Raw, is_array: bool, unreadable: Exception) -> None:
    """See that an event may be left out: it is of no known kind, or has pairs of token ids.

    Raises:
        EngineError: it is malformed.
    """
    try:
        kind = (_KIND_ARRAY if is_array else _KIND_MAP).decode(raw).type
    except _UNREADABLE as error:
        raise EngineError(f"a KV event does not say its kind: {error}") from None
    if kind in _KINDS and not (kind == "BlockStored" and _has_pairs(raw, is_array)):
        raise EngineError(f"a KV event {kind} cannot be read: {unreadable}") from None


def _is_array(first: int) -> bool:
    """Whether a msgpack value that begins with this byte is an array."""
    return first & 0xF0 == 0x90 or first in {0xDC, 0xDD}


def _has_pairs(raw: msgspec.Raw, is_array: bool) -> bool:
    try:
        return bool((_PAIRS_ARRAY if is_array else _PAIRS_MAP).decode(raw).token_ids)
    except _UNREADABLE:
        return False

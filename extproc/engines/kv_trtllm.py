"""What TensorRT-LLM's `POST /kv_cache_events` answers: JSON of every version to `kv_values`. No I/O here.

The answer is a list of envelopes, each with one event; reading takes them out, and a full buffer loses the oldest.
Definitions: `KVCacheEventSerializer` in `tensorrt_llm/_utils.py`, `kv_cache_manager_v2/_event_manager.py`.
"""

from collections.abc import Generator, Sequence
from itertools import groupby, pairwise
from typing import Annotated, Generic, TypeVar

import msgspec

from extproc.block_extras import named
from extproc.engines.kv_extras import opaque
from extproc.engines.kv_ids import block_id, block_ids
from extproc.engines.kv_layout import Layout
from extproc.engines.kv_values import Cleared, EventBatch, KvEvent, Moved, Removed, Stored, Tier
from extproc.errors import EngineError

MAX_ANSWER_BYTES = 32 * 1024 * 1024
"""Longest answer that is read: half a million tokens, at some 60 bytes each."""

_AT_A_TIME = 64
"""Envelopes between two steps: 1 ms for blocks of 32 tokens."""
_MOST_RANKS = 4096
_MOST_BLOCK_TOKENS = 1 << 20
_LONGEST_KEYS = 1 << 16

_Hash = int | str
_Level = Annotated[int, msgspec.Meta(ge=0)]
"""A cache level."""


class Drained(msgspec.Struct, frozen=True, gc=False):
    """What one answer held of one rank.

    Nothing was lost when `missing` is 0 and `first` follows the `last` of the answer before; ids count from 0 in each
    life of the engine.

    Attributes:
        batch: the events.
        first: id of the first envelope.
        last: id of the last one.
        missing: ids between these that the answer lacks.
    """

    batch: EventBatch
    first: int
    last: int
    missing: int = 0


class _Token(msgspec.Struct, gc=False):
    """A token; its id is hexadecimal where it stands for a part of an image."""

    token_id: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] | str
    token_extra_id: int | None = 0


class _MmKey(msgspec.Struct, gc=False):
    """An image in a block; where it begins in it the tokens tell."""

    hash: str


class _Block(msgspec.Struct, gc=False):
    block_hash: _Hash
    tokens: list[_Token]
    cache_level: _Level = 0
    mm_keys: msgspec.Raw = msgspec.Raw()
    cache_salt: str | None = None
    lora_id: int | None = None


class _Stored(msgspec.Struct, gc=False, tag="stored"):
    blocks: list[_Block]
    parent_hash: _Hash | None = None
    lora_name: str | None = None


class _Removed(msgspec.Struct, gc=False, tag="removed"):
    block_hashes: list[_Hash]


class _Diff(msgspec.Struct, gc=False):
    new_value: _Level


class _Updated(msgspec.Struct, gc=False, tag="updated"):
    block_hash: _Hash
    cache_level: _Diff | None = None


class _Created(msgspec.Struct, gc=False, tag="created"):
    pass


class _Kind(msgspec.Struct, gc=False):
    type: str


_Data = TypeVar("_Data")


class _Envelope(msgspec.Struct, Generic[_Data], gc=False):
    event_id: Annotated[int, msgspec.Meta(ge=0)]
    data: _Data
    window_size: int | None = None
    attention_dp_rank: Annotated[int, msgspec.Meta(ge=0, lt=_MOST_RANKS)] | None = None
    layer_group_id: int | None = None


_Told = _Stored | _Removed | _Updated | _Created
_RAW = msgspec.json.Decoder(list[_Envelope[msgspec.Raw]] | None)
_ONE = msgspec.json.Decoder(_Told)
_MM_KEYS = msgspec.json.Decoder(list[_MmKey])
_KIND = msgspec.json.Decoder(_Kind)
_KINDS = frozenset({"stored", "removed", "updated", "created"})
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def decode(answer: bytes, layout: Layout | None = None) -> tuple[Drained, ...]:
    """Turn an answer into one batch for each rank that it tells of, by rank; the batches have no time.

    Left out and counted in `EventBatch.skipped`: events of unknown kinds, and of smaller attention windows than the
    largest; a block smaller than others, which ends a prompt. The engine does not tell LoRA adapters in the versions
    that were read; should it, `lora_name` and then `lora_id` (as `lora:3`) are taken.

    Args:
        answer: the body of the answer.
        layout: what earlier answers of this life of the engine told; None knows nothing yet.

    Raises:
        EngineError: the answer is longer than `MAX_ANSWER_BYTES`, is no list of events, or an event of a known kind is
            malformed.
    """
    steps = decoding(answer, layout)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: tuple[Drained, ...] = end.value
            return found


def decoding(answer: bytes, layout: Layout | None = None) -> Generator[None, None, tuple[Drained, ...]]:
    """Do what `decode` does in steps of about 1 ms: a buffer that nobody read for long takes a second or more.

    Raises:
        EngineError: see `decode`.
    """
    if len(answer) > MAX_ANSWER_BYTES:
        raise EngineError(f"the answer with KV events is longer than {MAX_ANSWER_BYTES} bytes")
    known = Layout() if layout is None else layout
    envelopes = yield from _read(answer)
    _learn(envelopes, known)
    ranks: dict[int, list[_Envelope[_Told | None]]] = {}
    for envelope in envelopes:
        ranks.setdefault(envelope.attention_dp_rank or 0, []).append(envelope)
    found = list[Drained]()
    for rank in sorted(ranks):
        found += [(yield from _drained(rank, ranks[rank], known))]
    return tuple(found)


def _read(answer: bytes) -> Generator[None, None, Sequence[_Envelope[_Told | None]]]:
    """Read the envelopes; those of unknown kinds have no data."""
    try:
        raw = _RAW.decode(answer) or []
    except _UNREADABLE as error:
        raise EngineError(f"the answer with KV events cannot be read: {error}") from None
    yield
    envelopes = list[_Envelope[_Told | None]]()
    for number, each in enumerate(raw, start=1):
        data = _one(each.data)
        envelopes.append(_Envelope(each.event_id, data, each.window_size, each.attention_dp_rank, each.layer_group_id))
        if number % _AT_A_TIME == 0:
            yield
    return envelopes


def _one(raw: msgspec.Raw) -> _Told | None:
    try:
        return _ONE.decode(raw)
    except _UNREADABLE:
        pass
    try:
        kind = _KIND.decode(raw).type
    except _UNREADABLE as error:
        raise EngineError(f"a KV event does not say its type: {error}") from None
    if kind not in _KINDS:
        return None
    try:
        return _ONE.decode(raw)
    except _UNREADABLE as error:
        raise EngineError(f"a KV event of type {kind} cannot be read: {error}") from None


def _learn(envelopes: Sequence[_Envelope[_Told | None]], layout: Layout) -> None:
    """Let the layout see all events before any is read: windows and sizes come in no certain order."""
    for envelope in envelopes:
        layout.learn_window(envelope.window_size or 0, envelope.layer_group_id or 0)
    for envelope in envelopes:
        if isinstance(envelope.data, _Stored) and _is_kept(envelope, layout):
            for block in envelope.data.blocks:
                if len(block.tokens) <= _MOST_BLOCK_TOKENS:
                    layout.learn_block(len(block.tokens))


def _is_kept(envelope: _Envelope[_Told | None], layout: Layout) -> bool:
    return layout.keeps_window(envelope.window_size or 0, envelope.layer_group_id or 0)


def _drained(rank: int, envelopes: Sequence[_Envelope[_Told | None]], layout: Layout) -> Generator[None, None, Drained]:
    """Put the events of one rank together."""
    ids = [envelope.event_id for envelope in envelopes]
    # Numbers that go back are no sequence at all, which counts as one lost.
    missing = sum(max(after - before - 1, int(after < before)) for before, after in pairwise(ids))
    events: list[KvEvent] = []
    skipped = 0
    for number, envelope in enumerate(envelopes, start=1):
        if number % _AT_A_TIME == 0:
            yield
        if envelope.data is None or not _is_kept(envelope, layout):
            skipped += 1
            continue
        found, left_out = _events(envelope.data, layout)
        events += found
        skipped += left_out
    return Drained(EventBatch(0.0, rank, tuple(events), skipped), ids[0], ids[-1], missing)


def _events(told: _Told, layout: Layout) -> tuple[Sequence[KvEvent], int]:
    """Events of one envelope, and how many blocks were left out."""
    match told:
        case _Stored():
            return _stored(told, layout)
        case _Removed():
            return ([Removed(block_ids(told.block_hashes))], 0) if told.block_hashes else ([], 1)
        case _Updated():
            # A change of priority alone says nothing of what is cached.
            moved = [Moved(block_id(told.block_hash), _tier(told.cache_level.new_value))] if told.cache_level else []
            return moved, 0
    return [Cleared()], 0


def _stored(told: _Stored, layout: Layout) -> tuple[Sequence[Stored], int]:
    """One event for each run of blocks of one tier and adapter, and how many blocks were left out."""
    parent = None if told.parent_hash is None else block_id(told.parent_hash) or None
    events: list[Stored] = []
    skipped = 0
    for (size, tier, adapter), run in groupby(told.blocks, lambda block: _shape(block, told.lora_name)):
        blocks = list(run)
        ids = block_ids([block.block_hash for block in blocks])
        if 0 < size <= _MOST_BLOCK_TOKENS and layout.is_full(size):
            tokens = tuple(token.token_id if type(token.token_id) is int else 0 for b in blocks for token in b.tokens)
            events.append(Stored(ids, parent, tokens, size, tier, adapter, _extras(blocks, parent is None)))
        else:
            skipped += len(blocks)
        parent = ids[-1]
    return events, skipped


def _shape(block: _Block, lora_name: str | None) -> tuple[int, Tier, str]:
    """What the blocks of one event have in common."""
    adapter = lora_name or ("" if block.lora_id is None else f"lora:{block.lora_id}")
    return len(block.tokens), _tier(block.cache_level), adapter


def _tier(level: int) -> Tier:
    """Cache level 0 is the GPU, 1 host memory, those beyond are further away."""
    return Tier(min(level, Tier.DISK))


def _extras(blocks: Sequence[_Block], begins: bool) -> tuple[bytes, ...]:
    """What beside tokens entered each block, without empty ones at the end."""
    extras = [_extra(block, begins and not number) for number, block in enumerate(blocks)]
    while extras and not extras[-1]:
        extras.pop()
    return tuple(extras)


def _extra(block: _Block, is_first: bool) -> bytes:
    """Images, then what stands in the place of token ids, then the salt, which only a prompt's first block counts."""
    added = _images(block.mm_keys)
    strange = [(place, token.token_id) for place, token in enumerate(block.tokens) if type(token.token_id) is str]
    marked = [(place, token.token_extra_id) for place, token in enumerate(block.tokens) if token.token_extra_id]
    if strange or marked:
        added += opaque(msgspec.json.encode([strange, marked]))
    return added + named(block.cache_salt) if block.cache_salt and is_first else added


def _images(told: msgspec.Raw) -> bytes:
    """Images in the form of other engines; keys that are of another form, or very many, stand for themselves."""
    written = bytes(told)
    if written in {b"", b"null", b"[]"}:
        return b""
    if len(written) > _LONGEST_KEYS:
        return opaque(written)
    try:
        keys = _MM_KEYS.decode(written)
    except _UNREADABLE:
        return opaque(written)
    return b"".join([named(key.hash) for key in keys])

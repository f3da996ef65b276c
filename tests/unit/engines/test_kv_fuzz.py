"""Whatever bytes an engine sends, its KV events are values that can be indexed, or an engine error."""

import contextlib
import json
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.engines import kv_decode, kv_trtllm
from extproc.engines.kv_values import EventBatch, Moved, Removed, Stored
from extproc.errors import EngineError
from extproc.state import exact_blocks

_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(),
    st.text(max_size=6),
    st.binary(max_size=12),
)
_ANY = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6) | st.integers(0, 9), inner, max_size=3)
    ),
)
_HASH = st.one_of(st.integers(-(1 << 63), (1 << 64) - 1), st.binary(min_size=1, max_size=32), _ANY)
_KEY = st.one_of(_ANY, st.tuples(st.text(max_size=4), st.integers(-9, 9)), st.just(["mm", "img", 3]))


@st.composite
def _stored(draw: st.DrawFn) -> dict[str, Any]:
    """BlockStored, mostly sound, with some fields replaced by anything and some left out."""
    count, size = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    event: dict[str, Any] = {
        "block_hashes": draw(st.lists(_HASH, min_size=count, max_size=count)),
        "parent_block_hash": draw(st.none() | _HASH),
        "token_ids": draw(st.lists(st.integers(0, (1 << 32) - 1), min_size=count * size, max_size=count * size)),
        "block_size": size,
        "lora_id": draw(st.none() | st.integers(0, 9)),
        "medium": draw(st.sampled_from([None, "GPU", "cpu", "DISK", "TAPE"])),
        "lora_name": draw(st.sampled_from([None, "lb", {"cache_salt": "s"}])),
        "extra_keys": draw(
            st.none() | st.lists(st.none() | st.lists(_KEY, max_size=3), min_size=count, max_size=count)
        ),
        "group_idx": draw(st.none() | st.integers(0, 2)),
        "kv_cache_spec_kind": draw(st.sampled_from([None, "full_attention", "mamba"])),
    }
    for name in draw(st.lists(st.sampled_from(sorted(event)), max_size=1)):
        event[name] = draw(_ANY)
    return event


def _either_form(event: dict[str, Any], kind: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([{"type": kind, **event}, [kind, *event.values()]])


_EVENTS = st.one_of(
    _stored().flatmap(lambda event: _either_form(event, "BlockStored")),
    st.lists(_HASH, max_size=3).flatmap(
        lambda ids: _either_form({"block_hashes": ids, "medium": "GPU"}, "BlockRemoved")
    ),
    st.just({"type": "AllBlocksCleared"}),
    st.just(["AllBlocksCleared"]),
    _ANY,
)
_BATCHES = st.tuples(st.floats() | _ANY, st.lists(_EVENTS, max_size=4), st.none() | st.integers(-1, 5000))

_GOOD_STORED = ["BlockStored", [1, 2], 3, [4, 5, 6, 7], 2, None, "GPU", "lb", [["lb", "s"], None], 0]
_GOOD_BATCH = msgspec.msgpack.encode([1.0, [_GOOD_STORED, ["BlockRemoved", [1], "GPU"]], 0])
_GOOD_BLOCK = {"block_hash": 1, "tokens": [{"token_id": 4, "token_extra_id": 0}], "cache_level": 0, "cache_salt": "s"}
_GOOD_DATA: list[dict[str, Any]] = [
    {"type": "stored", "parent_hash": 3, "blocks": [_GOOD_BLOCK]},
    {"type": "updated", "block_hash": 1, "cache_level": {"new_value": 1}},
    {"type": "removed", "block_hashes": [1, "ab"]},
]
_GOOD_ANSWER = json.dumps(
    [{"event_id": n, "data": data, "window_size": 64} for n, data in enumerate(_GOOD_DATA)]
).encode()


@st.composite
def _damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """A good payload with a few places overwritten, cut out or filled in."""
    payload = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(payload)))
        payload[start : start + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    return bytes(payload)


def _batches(payload: bytes) -> Iterable[EventBatch]:
    """Batches of a payload read as either kind; no other error than an engine's comes out."""
    with contextlib.suppress(EngineError):
        yield kv_decode.decode(payload)
    with contextlib.suppress(EngineError):
        for drained in kv_trtllm.decode(payload):
            yield drained.batch


def _check(batch: EventBatch) -> None:
    """What an index does with the events raises nothing and gives one hash for each block."""
    assert 0 <= batch.rank < 4096
    assert 0.0 <= batch.at < 1e10
    assert batch.skipped >= 0
    for event in batch.events:
        match event:
            case Stored():
                ids = (*event.hashes, event.parent or 0)
                assert len(event.extras) <= len(event.hashes)
                chained = exact_blocks.chain(
                    event.tokens, event.block_tokens, exact_blocks.root(event.adapter), event.extras
                )
                assert len(chained) == len(event.hashes) > 0
            case Removed():
                ids = event.hashes
            case Moved():
                ids = (event.hash,)
            case _:
                ids = ()
        assert all(0 <= one < 1 << 64 for one in ids)


@given(payload=st.one_of(st.binary(max_size=64), _damaged(_GOOD_BATCH), _damaged(_GOOD_ANSWER)))
def test_any_bytes_are_events_or_an_engine_error(payload: bytes) -> None:
    """Bytes from nothing and damaged payloads."""
    for batch in _batches(payload):
        _check(batch)


@given(batch=st.one_of(_BATCHES, _ANY))
def test_any_structure_is_events_or_an_engine_error(batch: Any) -> None:
    """Well-formed msgpack whose values may be anything, near to what engines send and far from it."""
    for read in _batches(msgspec.msgpack.encode(batch)):
        _check(read)


@given(payload=st.one_of(_damaged(_GOOD_BATCH), st.one_of(_BATCHES, _ANY).map(msgspec.msgpack.encode)))
def test_a_payload_that_is_read_in_steps_is_read_the_same(payload: bytes) -> None:
    """Long ones are: the same events, or an engine error for the same payloads."""
    whole, parted = _or_none(lambda: kv_decode.decode(payload)), _or_none(lambda: _in_steps(payload))
    assert repr(parted) == repr(whole)  # a time may be no number, which equals nothing


def _or_none(read: Callable[[], EventBatch]) -> EventBatch | None:
    try:
        return read()
    except EngineError:
        return None


def _in_steps(payload: bytes) -> EventBatch:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kv_decode, "AT_ONCE_BYTES", -1)
        steps = kv_decode.decoding(payload)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                batch: EventBatch = end.value
                return batch


@given(answer=_ANY)
def test_any_json_is_events_or_an_engine_error(answer: Any) -> None:
    """Well-formed JSON, as the data of an envelope and as the whole answer."""
    for whole in (
        answer,
        [{"event_id": 1, "data": answer}],
        [{"event_id": 1, "data": {"type": "stored", "blocks": [answer]}}],
    ):
        for read in _batches(msgspec.json.encode(whole)):
            _check(read)


@pytest.mark.parametrize("good", [_GOOD_BATCH, _GOOD_ANSWER])
def test_the_undamaged_payloads_have_events(good: bytes) -> None:
    """The fuzzing above begins from payloads that are read."""
    assert [len(batch.events) for batch in _batches(good)] in ([2], [3])

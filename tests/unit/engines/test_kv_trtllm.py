"""TensorRT-LLM's drained events of every version give the values that other engines' events give."""

import json
from typing import Any

import pytest

from extproc.block_extras import named
from extproc.engines.kv_extras import opaque
from extproc.engines.kv_layout import Layout
from extproc.engines.kv_trtllm import MAX_ANSWER_BYTES, Drained, decode
from extproc.engines.kv_values import Cleared, EventBatch, Moved, Removed, Stored, Tier
from extproc.errors import EngineError


def _tokens(*ids: Any) -> list[dict[str, Any]]:
    return [{"type": "unique_token", "token_id": one, "token_extra_id": 0} for one in ids]


def _block(block_hash: Any, *ids: Any, level: int = 0, **more: Any) -> dict[str, Any]:
    told = {"type": "stored_block", "block_hash": block_hash, "tokens": _tokens(*ids), "cache_level": level}
    return {**told, "priority": 35, **more}


def _stored(parent: Any, *blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks), **more}


def _answer(*data: dict[str, Any], first: int = 0, **more: Any) -> bytes:
    envelopes = [{"event_id": first + n, "data": one, "window_size": 64, **more} for n, one in enumerate(data)]
    return json.dumps(envelopes).encode()


def _diff(new: int, old: int) -> dict[str, Any]:
    return {"type": "event_diff", "new_value": new, "old_value": old}


def _events(answer: bytes, layout: Layout | None = None) -> EventBatch:
    (drained,) = decode(answer, layout)
    return drained.batch


def test_every_type_of_event_is_read() -> None:
    """The first life of a cache: created, filled, moved to host memory, removed."""
    answer = _answer(
        {"type": "created", "num_blocks_per_cache_level": [1000, 0]},
        _stored(None, _block(456, 1, 2), _block((1 << 64) - 1, 3, 4)),
        _stored((1 << 64) - 1, _block(458, 5, 6)),
        {"type": "updated", "block_hash": 458, "cache_level": _diff(1, 0), "priority": None},
        {"type": "updated", "block_hash": 458, "cache_level": None, "priority": _diff(50, 35)},
        {"type": "removed", "block_hashes": [456, 458]},
        first=3,
    )
    events = (
        Cleared(),
        Stored((456, (1 << 64) - 1), None, (1, 2, 3, 4), 2),
        Stored((458,), (1 << 64) - 1, (5, 6), 2),
        Moved(458, Tier.CPU),
        Removed((456, 458)),
    )
    assert decode(answer) == (Drained(EventBatch(0.0, 0, events), first=3, last=8),)


def test_hexadecimal_hashes_of_the_second_algorithm_are_read() -> None:
    """`v2_sha256` names blocks by whole digests; the same digest is the same id wherever it stands."""
    one, two = "ab" * 24 + "00" * 6 + "0102", "cd" * 32
    batch = _events(
        _answer(
            _stored(None, _block(one, 1, 2)),
            _stored(one, _block(two, 3, 4)),
            {"type": "updated", "block_hash": one, "cache_level": _diff(2, 0)},
            {"type": "removed", "block_hashes": [two]},
            hash_algo="v2_sha256",
            layer_group_id=0,
        )
    )
    second = int("cd" * 8, 16)
    assert batch.events == (
        Stored((258,), None, (1, 2), 2),
        Stored((second,), 258, (3, 4), 2),
        Moved(258, Tier.DISK),
        Removed((second,)),
    )


def test_a_partial_last_block_is_left_out() -> None:
    """Blocks with fewer tokens than others end a prompt; the layout knows them in later answers too."""
    layout = Layout()
    batch = _events(_answer(_stored(None, _block(1, 1, 2), _block(2, 3))), layout)
    assert batch == EventBatch(0.0, 0, (Stored((1,), None, (1, 2), 2),), skipped=1)
    assert _events(_answer(_stored(1, _block(3, 9)), _stored(1, _block(4))), layout) == EventBatch(
        0.0, 0, (), skipped=2
    )


def test_blocks_of_one_event_on_several_levels_are_a_chain_of_events() -> None:
    """Level 0 is the GPU, 1 host memory, more are further; the parents go on."""
    batch = _events(
        _answer(_stored(9, _block(1, 1), _block(2, 2, level=1), _block(3, 3, level=2), _block(4, 4, level=3)))
    )
    assert batch.events == (
        Stored((1,), 9, (1,), 1, Tier.GPU),
        Stored((2,), 1, (2,), 1, Tier.CPU),
        Stored((3, 4), 2, (3, 4), 1, Tier.DISK),
    )


@pytest.mark.parametrize("parent", [None, 0, "00" * 32])
def test_a_prompt_begins_without_a_parent(parent: Any) -> None:
    """The hash before the first block is 0 in either algorithm's arithmetic, and is no block."""
    (event,) = _events(_answer(_stored(parent, _block(1, 1)))).events
    assert isinstance(event, Stored)
    assert event.parent is None


def _windows(*windows: tuple[int, int | None]) -> bytes:
    """An answer in which each (window, layer group) stores a block of its own and removes it."""
    envelopes: list[dict[str, Any]] = []
    for number, (window, group) in enumerate(windows):
        for data in (_stored(None, _block(number + 1, 1)), {"type": "removed", "block_hashes": [number + 1]}):
            envelopes.append({"event_id": len(envelopes), "data": data, "window_size": window, "layer_group_id": group})
    return json.dumps(envelopes).encode()


@pytest.mark.parametrize(
    ("windows", "kept"),
    [([(64, None), (4096, None)], 2), ([(4096, 1), (4096, 0)], 2), ([(4096, 0), (64, 1)], 1), ([(64, 0)], 1)],
)
def test_only_the_largest_window_counts(windows: list[tuple[int, int | None]], kept: int) -> None:
    """Layers with a smaller window tell of blocks too; of equal windows the first group counts."""
    skipped = 2 * len(windows) - 2
    expected = EventBatch(0.0, 0, (Stored((kept,), None, (1,), 1), Removed((kept,))), skipped)
    assert _events(_windows(*windows)) == expected


def test_the_largest_window_is_remembered() -> None:
    """An answer with events of a smaller window alone has nothing that counts."""
    layout = Layout()
    decode(_windows((64, None), (4096, None)), layout)
    assert _events(_windows((64, None)), layout) == EventBatch(0.0, 0, (), skipped=2)


def test_ranks_are_told_apart() -> None:
    """Under attention data parallelism each rank numbers its own events."""
    envelopes = [
        {"event_id": event, "data": {"type": "removed", "block_hashes": [event]}, "attention_dp_rank": rank}
        for rank, event in ((1, 4), (0, 7), (1, 5))
    ]
    first, second = decode(json.dumps(envelopes).encode())
    assert first == Drained(EventBatch(0.0, 0, (Removed((7,)),)), 7, 7)
    assert second == Drained(EventBatch(0.0, 1, (Removed((4,)), Removed((5,)))), 4, 5)


@pytest.mark.parametrize(
    ("ids", "missing"), [([5], 0), ([5, 6, 7], 0), ([5, 7], 1), ([5, 9, 12], 5), ([5, 4], 1), ([5, 5], 0)]
)
def test_missing_numbers_are_counted(ids: list[int], missing: int) -> None:
    """A full buffer loses events; only the gap in their numbers says so."""
    envelopes = [{"event_id": one, "data": {"type": "a new type"}, "window_size": 64} for one in ids]
    (drained,) = decode(json.dumps(envelopes).encode())
    assert (drained.first, drained.last, drained.missing) == (ids[0], ids[-1], missing)
    assert drained.batch == EventBatch(0.0, 0, (), skipped=len(ids))


def test_images_and_salts_enter_blocks() -> None:
    """Images by hash in any block; the salt, which each block may repeat, in the first alone."""
    key = {"type": "mm_key", "hash": "ab" * 32, "start_offset": 4}
    strange = {"type": "another key"}
    batch = _events(
        _answer(
            _stored(
                None,
                _block(1, 1, cache_salt="tenant-a", mm_keys=[key]),
                _block(2, 2, cache_salt="tenant-a", mm_keys=[strange]),
                _block(3, 3, cache_salt="tenant-a", mm_keys=[{"type": "mm_key", "hash": "u"}]),
                _block(4, 4, mm_keys=[key] * 1000),
                _block(5, 5, cache_salt=None, mm_keys=[]),
            ),
            _stored(5, _block(6, 6, cache_salt="tenant-a")),
        )
    )
    first, second = batch.events
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    many = opaque(json.dumps([key] * 1000).encode())
    assert first.extras == (
        named("ab" * 32) + named("tenant-a"),
        opaque(b'[{"type": "another key"}]'),
        named("u"),
        many,
    )
    assert second.extras == ()


def test_what_is_no_plain_token_makes_a_block_different() -> None:
    """Parts of images in the place of tokens, and extra ids beside them, are kept apart from plain text."""
    marked = _block(2, 0)
    marked["tokens"][0]["token_extra_id"] = 7
    batches = [_events(_answer(_stored(None, block))) for block in (_block(1, 0), _block(3, "ab" * 32), marked)]
    extras = [event.extras for batch in batches for event in batch.events if isinstance(event, Stored)]
    assert extras[0] == ()
    assert len(set(extras)) == 3


@pytest.mark.parametrize(
    ("of_event", "of_block", "adapter"),
    [({}, {}, ""), ({"lora_name": "lb"}, {"lora_id": 3}, "lb"), ({}, {"lora_id": 3}, "lora:3")],
)
def test_an_adapter_is_taken_if_the_engine_should_tell_it(
    of_event: dict[str, Any], of_block: dict[str, Any], adapter: str
) -> None:
    """No version that was read tells it; the name goes before the number."""
    (event,) = _events(_answer(_stored(None, _block(1, 1, **of_block), **of_event))).events
    assert isinstance(event, Stored)
    assert event.adapter == adapter


def test_unknown_types_do_not_hide_the_others() -> None:
    """A newer engine's events are counted; unknown fields are passed over."""
    answer = _answer(
        {"type": "touched"}, _stored(None, _block(1, 1, new=[1]), new={}), {"type": "removed", "block_hashes": []}
    )
    assert _events(answer) == EventBatch(0.0, 0, (Stored((1,), None, (1,), 1),), skipped=2)


@pytest.mark.parametrize("answer", [b"[]", b"null", b" [ ] "])
def test_an_idle_engine_has_no_events(answer: bytes) -> None:
    """Nothing happened since the last call."""
    assert decode(answer) == ()


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (b"", "cannot be read"),
        (b"{}", "cannot be read"),
        (b"[{}]", "cannot be read"),
        (b"[null]", "cannot be read"),
        (b'[{"event_id":-1,"data":{"type":"created"}}]', "cannot be read"),
        (b'[{"event_id":1,"data":{"type":"created"},"attention_dp_rank":4096}]', "cannot be read"),
        (b'[{"event_id":1,"data":[]}]', "does not say its type"),
        (_answer({"type": "removed"}), "type removed cannot be read"),
        (_answer(_stored(None, _block(1, -1))), "type stored cannot be read"),
        (_answer(_stored(None, _block(1, 1 << 32))), "type stored cannot be read"),
        (_answer(_stored(None, _block(1, 1, level=-1))), "type stored cannot be read"),
        (_answer(_stored(None, _block("no hash", 1))), "block hash that is no 64-bit integer"),
        (_answer({"type": "removed", "block_hashes": [1 << 64]}), "block hash that is no 64-bit integer"),
        (b"[" * 100_000, "cannot be read"),
        (b" " * (MAX_ANSWER_BYTES + 1), "longer than"),
    ],
)
def test_a_malformed_answer_is_refused_by_name(answer: bytes, fault: str) -> None:
    """Every way an answer can be wrong is an engine error that says what was wrong."""
    with pytest.raises(EngineError, match=fault):
        decode(answer)

"""Of a hybrid model's groups of layers one counts, and blocks that fit no chain are left out."""

from typing import Any

import msgspec
import pytest

from extproc.engines.kv_decode import decode
from extproc.engines.kv_layout import Layout
from extproc.engines.kv_values import EventBatch, Removed, Stored, Tier


def _batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.0, events, 0])


def _as_map(**changes: Any) -> dict[str, Any]:
    """A BlockStored of one block of four tokens on the GPU."""
    told = {"type": "BlockStored", "block_hashes": [11], "parent_block_hash": None, "token_ids": [1, 2, 3, 4]}
    return {**told, "block_size": 4, "medium": "GPU", "group_idx": 0, **changes}


def _hybrid(kinds: tuple[str | None, ...]) -> bytes:
    """A batch that tells of one block for each group, then removes it from each."""
    stored = [_as_map(block_hashes=[n], group_idx=n, kv_cache_spec_kind=kind) for n, kind in enumerate(kinds)]
    taken = [{"type": "BlockRemoved", "block_hashes": [n], "medium": "GPU", "group_idx": n} for n in range(len(kinds))]
    return _batch(*stored, *taken)


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [
        (("sliding_window", "full_attention", "full_attention"), 1),
        (("mamba", "mla_attention"), 1),
        (("mamba", None), 1),
        ((None, "full_attention"), 1),
        ((None, None), 0),
        (("sliding_window", "mamba"), 0),
    ],
)
def test_of_a_hybrid_models_groups_one_counts(kinds: tuple[str | None, ...], kept: int) -> None:
    """Full attention before groups of untold kind before all others; the first among equals."""
    tokens = (1, 2, 3, 4)
    assert decode(_hybrid(kinds)) == EventBatch(
        1.0, 0, (Stored((kept,), None, tokens, 4), Removed((kept,), Tier.GPU)), skipped=2 * len(kinds) - 2
    )


def test_a_removal_is_told_apart_by_what_earlier_batches_told_of_groups() -> None:
    """BlockRemoved does not tell the kind of its group; the layout remembers it."""
    layout = Layout()
    decode(_hybrid(("sliding_window", "full_attention")), layout)
    of_window = {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU", "group_idx": 0}
    of_full = {"type": "BlockRemoved", "block_hashes": [6], "medium": "GPU", "group_idx": 1}
    assert decode(_batch(of_window, of_full), layout) == EventBatch(1.0, 0, (Removed((6,), Tier.GPU),), skipped=1)


def test_another_group_that_counts_brings_its_own_block_size() -> None:
    """Groups may have blocks of different sizes; those of the group that counted before say nothing."""
    layout = Layout()
    decode(_batch(_as_map(token_ids=list(range(8)), block_size=8, kv_cache_spec_kind="mamba")), layout)
    batch = decode(_batch(_as_map(group_idx=1, kv_cache_spec_kind="full_attention")), layout)
    assert batch == EventBatch(1.0, 0, (Stored((11,), None, (1, 2, 3, 4), 4),))


def test_a_block_smaller_than_others_is_no_part_of_a_chain() -> None:
    """Partial blocks of a prompt's end are left out, in the batch that first tells of full ones and in later ones."""
    layout = Layout()
    partial = _as_map(block_hashes=[12], parent_block_hash=11, token_ids=[5, 6], block_size=2)
    assert decode(_batch(partial, _as_map()), layout).skipped == 1
    assert decode(_batch(partial), layout) == EventBatch(1.0, 0, (), skipped=1)


def test_larger_chunks_of_another_tier_do_not_set_the_block_size() -> None:
    """A cache in host memory may work in larger blocks; the GPU's blocks stay the full ones."""
    layout = Layout()
    chunk = _as_map(block_hashes=[12], token_ids=list(range(8)), block_size=8, medium="CPU")
    batch = decode(_batch(_as_map(), chunk, _as_map(medium="CPU")), layout)
    assert [event.tier for event in batch.events if isinstance(event, Stored)] == [Tier.GPU, Tier.CPU]
    assert (batch.skipped, layout.block_tokens) == (1, 4)

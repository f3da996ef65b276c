"""Snapshots as bytes: nothing is lost, and damage never becomes knowledge."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import StoreError
from extproc.state import snapshots
from extproc.state.image import ProfileImage
from extproc.state.learnt import EndpointLearnt, PoolLearnt
from extproc.state.rate import LearntRate
from extproc.state.snapshots import PART_BYTES, EndpointSnapshot

_amount = st.floats(0.0, 1e9)
_block = st.integers(0, 2**64 - 1)
_rate = st.builds(
    LearntRate,
    _amount,
    _amount,
    _amount,
    st.integers(0, 2**40),
    st.booleans(),
    st.lists(st.tuples(_amount, _amount, _amount), max_size=5),
)
_learnt = st.builds(
    EndpointLearnt,
    endpoint=st.text(max_size=20),
    started_at=_amount,
    kv_tokens=st.integers(0, 2**40),
    block_tokens=st.integers(0, 1024),
    share=st.floats(0.0, 1.0),
    reports=st.booleans(),
    uncached=st.floats(-1.0, 1e6),
    rate=_rate,
    marks=st.lists(st.tuples(_amount, st.integers(0, 2**40)), max_size=8),
    turns=st.lists(st.tuples(st.binary(max_size=16), _amount, _amount), max_size=5),
)


@st.composite
def _images(draw: st.DrawFn) -> ProfileImage:
    counts = draw(st.lists(st.integers(1, 20), max_size=20))
    gaps = draw(st.lists(st.integers(1, 2**33), min_size=len(counts), max_size=len(counts)))
    stamps = np.cumsum(np.array(gaps, np.uint64), dtype=np.uint64)
    blocks = draw(st.lists(_block, min_size=sum(counts), max_size=sum(counts), unique=True))
    heads = draw(st.lists(_block, max_size=5))
    clock = int(stamps[-1]) // 64 + 1 if counts else 3
    return ProfileImage(
        np.array(blocks, np.uint64), stamps, np.array(counts, np.uint32), np.array(heads, np.uint64), clock
    )


_shots = st.builds(EndpointSnapshot, _learnt, _images(), st.just(64))
_single = st.floats(0.0, 1e6, width=32)
_pools = st.builds(
    PoolLearnt,
    tokens=st.tuples(_amount, _amount),
    reuse=st.floats(0.0, 1.0),
    output=st.tuples(_amount, st.integers(0, 2**31)),
    ratios=st.dictionaries(_block, _single, max_size=20),
    outputs=st.dictionaries(_block, st.tuples(_single, st.integers(0, 2**31)), max_size=20),
    numbers=st.dictionaries(st.text(max_size=16), st.integers(0, 2**60), max_size=5),
)


@given(_shots)
def test_an_endpoint_comes_back_as_it_was(shot: EndpointSnapshot) -> None:
    """Profile in its order of use, and everything that is learnt beside it."""
    found = snapshots.read(snapshots.of_endpoint(shot))
    assert isinstance(found, EndpointSnapshot)
    assert found.learnt == shot.learnt
    for name in ("blocks", "stamps", "counts", "heads"):
        assert getattr(found.image, name).tolist() == getattr(shot.image, name).tolist()
    assert (found.image.clock, found.pieces) == (shot.image.clock, shot.pieces)


@given(_pools)
def test_a_pool_comes_back_as_it_was(pool: PoolLearnt) -> None:
    """Lengths by block, in the order of their use, and the pool's own."""
    found = snapshots.read(snapshots.of_pool(pool))
    assert found == pool
    assert isinstance(found, PoolLearnt)
    assert list(found.ratios) == list(pool.ratios)


def test_parts_are_such_as_a_store_takes() -> None:
    """A profile of 100,000 blocks comes in parts of 64 KiB at most, and back."""
    blocks = np.arange(1, 100_001, dtype=np.uint64)
    image = ProfileImage(blocks, np.array([5], np.uint64), np.array([100_000], np.uint32), blocks[:1], 1)
    learnt = EndpointLearnt("a", 0.0, 0, 16, 1.0, False, -1.0, LearntRate(1.0, 0.0, 0.0, 0, False, []), [], [])
    parts = snapshots.of_endpoint(EndpointSnapshot(learnt, image, 64))
    assert max(map(len, parts)) <= PART_BYTES
    assert len(parts) == 1 + -(-sum(map(len, parts[1:])) // PART_BYTES)
    found = snapshots.read(parts)
    assert isinstance(found, EndpointSnapshot)
    assert found.image.blocks.tolist() == blocks.tolist()


@given(_shots | _pools, st.data())
def test_damage_is_told(shot: EndpointSnapshot | PoolLearnt, data: st.DataObject) -> None:
    """A byte that changed in the content, a part that is missing or another's: the store's error and no other."""
    parts = list(snapshots.of_pool(shot) if isinstance(shot, PoolLearnt) else snapshots.of_endpoint(shot))
    at = data.draw(st.integers(0, len(parts[1]) - 1))
    changed = bytearray(parts[1])
    changed[at] ^= data.draw(st.integers(1, 255))
    for damaged in ([parts[0], bytes(changed)], parts[:1], parts[1:], [], [*parts, b"more"]):
        with pytest.raises(StoreError):
            snapshots.read(damaged)


@given(st.lists(st.binary(max_size=64), max_size=3))
def test_foreign_bytes_are_refused(parts: Sequence[bytes]) -> None:
    """Anything that is no snapshot raises the store's error and no other."""
    with pytest.raises(StoreError):
        snapshots.read(parts)


@pytest.mark.parametrize("sizes", [[2**64, -(2**64), 0], [-4, 8, 0], [1, 1, 1], [2**63, 2**63, 0]])
def test_sizes_that_cannot_be_are_told(sizes: list[int]) -> None:
    """Lengths below zero, beyond any machine's numbers, or of more or less than there is."""
    with pytest.raises(ValueError, match="impossible sizes"):
        snapshots._cut(b"1234", sizes)


@given(_shots, st.data())
def test_a_damaged_cover_raises_nothing_else(shot: EndpointSnapshot, data: st.DataObject) -> None:
    """Sizes and kinds that cannot be are told as damage; nothing is believed that the content does not bear out."""
    cover, *rest = snapshots.of_endpoint(shot)
    changed = bytearray(cover)
    changed[data.draw(st.integers(0, len(cover) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = snapshots.read([bytes(changed), *rest])
    except StoreError:
        return
    assert isinstance(found, EndpointSnapshot)
    assert found.image.blocks.tolist() == shot.image.blocks.tolist()


def test_a_snapshot_of_another_version_is_refused() -> None:
    """Versions are not guessed at: the error says both numbers."""
    cover = msgspec.msgpack.encode([snapshots.VERSION + 1, "something", "new"])
    with pytest.raises(StoreError, match=f"version {snapshots.VERSION + 1}.*version {snapshots.VERSION}"):
        snapshots.read([cover, b"x"])

"""Chained block hashes: what they depend on, and what they do not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.blocks import chain

SEGMENTS = st.lists(st.binary(max_size=40), max_size=8)
BLOCK = st.integers(1, 17)


@given(SEGMENTS, st.binary(max_size=8), BLOCK)
def test_only_full_blocks_have_a_hash(segments: list[bytes], salt: bytes, block: int) -> None:
    """There are total // block_bytes hashes, each an unsigned 64-bit integer."""
    hashes = chain(segments, salt, block)
    assert len(hashes) == sum(map(len, segments)) // block
    assert all(0 <= value < 2**64 for value in hashes)


@given(SEGMENTS, BLOCK, st.data())
def test_where_segments_end_does_not_matter(segments: list[bytes], block: int, data: st.DataObject) -> None:
    """The chain is one of the concatenated bytes, however they are cut."""
    whole = b"".join(segments)
    cut = data.draw(st.integers(0, len(whole)))
    assert chain(segments, b"", block) == chain([whole], b"", block) == chain([whole[:cut], whole[cut:]], b"", block)


@given(st.binary(max_size=200), st.binary(max_size=200), st.binary(max_size=200), BLOCK)
def test_chains_agree_exactly_as_far_as_the_bytes_do(shared: bytes, one: bytes, other: bytes, block: int) -> None:
    """Block i of two chains is equal when, and only when, all bytes up to its end are."""
    first, second = shared + one, shared + other
    chains = zip(chain([first], b"", block), chain([second], b"", block), strict=False)
    for index, (mine, theirs) in enumerate(chains):
        end = (index + 1) * block
        assert (mine == theirs) == (first[:end] == second[:end])


@given(st.binary(min_size=16, max_size=64), st.binary(max_size=64), st.binary(max_size=64))
def test_another_salt_changes_every_block(prompt: bytes, salt: bytes, other: bytes) -> None:
    """Prompts under two salts share no block."""
    shared = set(chain([prompt], salt, 8)) & set(chain([prompt], other, 8))
    assert (not shared) or salt == other


def test_equal_blocks_at_two_places_have_two_hashes() -> None:
    """A hash stands for a whole prefix, so repeated text does not repeat its hash."""
    assert len(set(chain([b"abcdefgh" * 50], b"", 8))) == 50


def test_the_hash_is_the_same_on_every_replica() -> None:
    """Replicas exchange these values, so they may change only on purpose."""
    assert chain([b"a" * 8, b"b" * 8], b"salt", 8) == [7267292287688181647, 961722509912093000]


@pytest.mark.parametrize("size", [0, -1])
def test_a_block_needs_a_size(size: int) -> None:
    """A block size below 1 is refused by name."""
    with pytest.raises(ValueError, match="block_bytes"):
        chain([b"abc"], b"", size)

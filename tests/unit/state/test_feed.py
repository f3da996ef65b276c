"""Deltas on the wire: nothing is lost, other versions are refused, sizes are bounds."""

import random
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import StoreError
from extproc.state import feed
from extproc.state.feed import Answered, Delta, Dropped, Held, Kept, Measured, Sized, Turned

# As long as they get in use: an IPv6 address with its port, a replica's id with a counter.
_name = st.text("0123456789abcdef:.-[]", max_size=36)
_number = st.just(-1.0) | st.floats(0.0, 1e15)
_start = st.floats(0.0, 4e9)
_hashes = st.lists(st.integers(0, 2**64 - 1), max_size=20).map(feed.pack)
_digest = st.binary(max_size=16)
_deltas: st.SearchStrategy[Delta] = st.one_of(
    st.builds(Held, _name, _hashes, st.text("0123456789abcdef-", max_size=24), _start, st.integers(0, 2**64 - 1)),
    st.builds(Dropped, _name, _hashes),
    st.builds(Answered, _name, _name, *[_number] * 7, _digest),
    st.builds(Measured, _hashes, _number, _number),
    st.builds(Sized, _name, st.floats(0.0, 1.0), st.integers(-1, 2**40), _start),
    st.builds(Turned, _digest, _name, _number, _number, _start),
    st.lists(st.binary(min_size=16, max_size=16), max_size=20).map(lambda names: Kept(b"".join(names))),
)


@given(st.lists(_deltas, max_size=20), st.integers(0, 2**40))
def test_a_batch_comes_back_as_it_was(deltas: list[Delta], number: int) -> None:
    """Every delta with every field survives the feed."""
    assert feed.decode(feed.encode("r1", deltas, number)) == feed.Batch(feed.VERSION, "r1", number, deltas)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 5)), max_size=20))
def test_shared_beginnings_come_back(prompts: list[tuple[int, int, int]]) -> None:
    """Prompts that begin alike, repeat one another or end early are told apart, whatever order they come in."""
    deltas: list[Delta] = [
        Held("a", feed.pack([*range(1000 * family, 1000 * family + depth), *range(own)]))
        for family, depth, own in prompts
    ]
    assert feed.decode(feed.encode("r1", deltas)).deltas == deltas


def test_a_shared_beginning_is_told_once() -> None:
    """Twenty prompts with 200 blocks in common and 10 of their own take little more than 400 blocks."""
    rng = random.Random(1)
    common = [rng.getrandbits(64) for _ in range(200)]
    deltas = [Held("a", feed.pack([*common, *(rng.getrandbits(64) for _ in range(10))])) for _ in range(20)]
    assert len(feed.encode("r1", deltas)) < 8 * 450


def test_names_and_numbers_are_compressed() -> None:
    """What is alike from decision to decision takes less than half of its bytes."""
    deltas = [
        Answered(f"0123456789abcdef-{at:x}", "10.0.0.1:8000", 5000.0, 0.25, 8e3, 2e3, 0.0, 64.0) for at in range(50)
    ]
    assert len(feed.encode("r1", deltas)) < 0.5 * len(msgspec.msgpack.encode(deltas))


@given(_deltas)
def test_a_delta_fits_into_what_is_counted_for_it(delta: Delta) -> None:
    """Entries and queues are bounded by these sizes: a delta takes at most 1.5 times what is counted."""
    empty = len(feed.encode("r1", []))
    assert len(feed.encode("r1", [delta])) - empty <= 1.5 * feed.size(delta)


def test_nothing_unpacks_to_more_than_is_allowed() -> None:
    """Neither what says so nor what does not: memory is not taken before it is known to be enough."""
    most = feed.MOST_BYTES
    assert feed.unzipped(zlib.compress(bytes(most)), most) == bytes(most)
    for says in (most, most + 1):
        with pytest.raises(ValueError, match="size"):
            feed.unzipped(zlib.compress(bytes(most + 1)), says)


@pytest.mark.parametrize("version", [0, 1, feed.VERSION + 1])
def test_a_batch_of_another_version_is_refused(version: int) -> None:
    """The versions before and after are not guessed at: the error says both numbers."""
    other: Any = [version, "r9", []]
    with pytest.raises(StoreError, match=f"version {version}.*version {feed.VERSION}"):
        feed.decode(msgspec.msgpack.encode(other))


@given(st.sampled_from([b"", b"\x93", b"\x96\x03\xa2r1\x01\x00"]), st.binary(max_size=64))
def test_foreign_bytes_are_refused(beginning: bytes, data: bytes) -> None:
    """Anything that is no batch raises the store's error and no other."""
    with pytest.raises(StoreError):
        feed.decode(beginning + data)


@given(st.lists(_deltas, min_size=1, max_size=5), st.data())
def test_a_changed_byte_raises_nothing_else(deltas: list[Delta], data: st.DataObject) -> None:
    """Damage on the way is told as the store's error, or gives deltas that can be."""
    payload = bytearray(feed.encode("r1", deltas, 7))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        batch = feed.decode(bytes(payload))
    except StoreError:
        return
    assert all(map(feed.is_sound, batch.deltas))


@given(st.lists(st.integers(0, 2**64 - 1), max_size=50))
def test_packed_blocks_come_back(blocks: list[int]) -> None:
    """Hashes survive the feed, whatever their value."""
    assert list(feed.unpack(feed.pack(blocks))) == blocks


@given(st.binary(max_size=64))
def test_foreign_bytes_never_break_unpacking(data: bytes) -> None:
    """Any bytes give as many whole hashes as they hold."""
    assert len(feed.unpack(data)) == len(data) // 8

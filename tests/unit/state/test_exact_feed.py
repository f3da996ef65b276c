"""Exact profiles as they travel: deltas through the feed, images through snapshots."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import StoreError
from extproc.state import feed, snapshots
from extproc.state.exact_image import ExactImage, ExactRank
from extproc.state.feed import Cached, DamagedError, Delta, Evicted, Exact, Held, in_pieces, pack, unpack
from extproc.state.image import ProfileImage
from extproc.state.learnt import EndpointLearnt
from extproc.state.rate import LearntRate
from extproc.state.snapshots import EndpointSnapshot

_blocks = st.lists(st.integers(0, 2**64 - 1), max_size=30).map(pack)
_start = st.floats(0.0, 9e9)
_rank = st.integers(0, 4095)
_name = st.text(max_size=20)
_deltas = st.lists(
    st.builds(Exact, _name, _rank, st.integers(0, 1 << 20), _start)
    | st.builds(Cached, _name, _rank, st.integers(0, 2), _blocks, _start)
    | st.builds(Evicted, _name, _rank, st.integers(-1, 2), _blocks, _start)
    | st.builds(Held, _name, _blocks, _name, _start, st.integers(0, 2**64 - 1), _blocks, st.integers(0, 2**32 - 1)),
    max_size=8,
)


@given(_deltas)
def test_deltas_come_back_as_they_were(deltas: list[Delta]) -> None:
    """All of them in one batch, in order, each with its blocks."""
    assert feed.decode(feed.encode("k-kv", deltas, 3)).deltas == deltas


def test_beginnings_that_pending_prompts_share_travel_once() -> None:
    """Hashes do not compress: what a burst of like prompts lacks is told as what the first lacks, and the rest."""
    shared = list(range(2**60, 2**60 + 1000))
    one = Held("a", b"", "c1", 0.0, 0, pack([*shared, 1]), 5)
    two = Held("a", b"", "c2", 0.0, 0, pack([*shared, 2]), 5)
    assert len(feed.encode("k", [one, two])) < len(feed.encode("k", [one])) + 200
    assert feed.size(one) > feed.size(Held("a", b"", "c1")) + 8000


@pytest.mark.parametrize(
    "delta",
    [
        Exact("a", -1, 16),
        Exact("a", 4096, 16),
        Exact("a", 0, -1),
        Exact("a", 0, 2**21),
        Exact("a", 0, 16, 1e11),
        Cached("a", 0, 3, b""),
        Cached("a", 0, -1, b""),
        Cached("a", -1, 0, b""),
        Evicted("a", 0, -2, b""),
        Evicted("a", 5000, 0, b""),
        Held("a", b"", "c", 0.0, 0, b"", -1),
        Held("a", b"", "c", 0.0, 0, b"", 2**32),
    ],
)
def test_what_cannot_be_is_refused(delta: Delta) -> None:
    """Damage must not change what a worker believes."""
    with pytest.raises(DamagedError, match="says what cannot be"):
        feed.decode(feed.encode("k", [delta]))


@given(st.integers(0, 2000), st.sampled_from(["cached", "evicted"]))
def test_pieces_come_to_the_same(count: int, kind: str) -> None:
    """The same blocks in the same order, 512 at most each, for one endpoint, rank and tier."""
    blocks = pack(range(count))
    delta = Cached("a", 1, 2, blocks, 5.0) if kind == "cached" else Evicted("a", 1, -1, blocks, 5.0)
    pieces = list(in_pieces(delta))
    assert b"".join(each.blocks for each in pieces if isinstance(each, Cached | Evicted)) == blocks
    assert all(len(each.blocks) <= 512 * 8 for each in pieces if isinstance(each, Cached | Evicted))
    assert {msgspec.structs.replace(each, blocks=b"") for each in pieces} == {
        msgspec.structs.replace(delta, blocks=b"")
    }


def test_other_deltas_are_one_piece() -> None:
    """Of a prompt that will be held nothing can be left for later."""
    for delta in (Held("a", pack(range(5000))), Exact("a", 0, 16)):
        assert list(in_pieces(delta)) == [delta]


@st.composite
def _exact(draw: st.DrawFn) -> ExactImage:
    ranks = []
    for rank in draw(st.lists(_rank, min_size=1, max_size=3, unique=True)):
        counts = draw(st.lists(st.integers(0, 5), min_size=7, max_size=7))
        total = sum(counts)
        blocks = draw(st.lists(st.integers(0, 2**64 - 1), min_size=total, max_size=total))
        ranks.append(ExactRank(rank, draw(st.integers(1, 1 << 20)), counts, np.array(blocks, np.uint64)))
    return ExactImage(draw(_name), draw(st.integers(0, 2**60)), ranks)


def snapshot_of(exact: ExactImage | None) -> EndpointSnapshot:
    """A snapshot of an endpoint with this exact profile."""
    none = np.empty(0, np.uint64)
    learnt = EndpointLearnt("a", 5.0, 0, 16, 1.0, False, -1.0, LearntRate(1.0, 0.0, 0.0, 0, False, []), [], [])
    return EndpointSnapshot(learnt, ProfileImage(none, none, np.empty(0, np.uint32), none, 1), 64, exact)


def plain(image: ExactImage | None) -> Any:
    """An image as values that can be compared."""
    return image and (
        image.owner,
        image.number,
        [(each.rank, each.block_tokens, each.counts, each.blocks.tolist()) for each in image.ranks],
    )


@given(st.none() | _exact())
def test_snapshots_carry_exact_profiles(image: ExactImage | None) -> None:
    """Owner, number, ranks and blocks by tier; and that there is none."""
    found = snapshots.read(snapshots.of_endpoint(snapshot_of(image)))
    assert isinstance(found, EndpointSnapshot)
    assert plain(found.exact) == plain(image)


def _rank_of(counts: Sequence[int], blocks: int, rank: int = 0, block_tokens: int = 16) -> ExactRank:
    return ExactRank(rank, block_tokens, list(counts), np.arange(blocks, dtype=np.uint64))


@pytest.mark.parametrize(
    "image",
    [
        ExactImage("k", 1, []),
        ExactImage("k", -1, [_rank_of([1, 0, 0, 0, 0, 0, 0], 1)]),
        ExactImage("k", 1, [_rank_of([1, 0, 0, 0, 0, 0], 1)]),
        ExactImage("k", 1, [_rank_of([2, 0, 0, 0, 0, 0, -1], 1)]),
        ExactImage("k", 1, [_rank_of([2, 0, 0, 0, 0, 0, 0], 1)]),
        ExactImage("k", 1, [_rank_of([1, 0, 0, 0, 0, 0, 0], 1, rank=4096)]),
        ExactImage("k", 1, [_rank_of([1, 0, 0, 0, 0, 0, 0], 1, block_tokens=0)]),
        ExactImage("k", 1, [_rank_of([1, 0, 0, 0, 0, 0, 0], 1), _rank_of([0] * 7, 0)]),
    ],
)
def test_images_that_cannot_be_are_damage(image: ExactImage) -> None:
    """No rank or one twice, counts that are not those of the blocks, sizes that no engine has."""
    with pytest.raises(StoreError):
        snapshots.read(snapshots.of_endpoint(snapshot_of(image)))


def test_a_profile_of_no_possible_size_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint's snapshot goes without it: who joins uses the estimated profile until the next one begins."""
    monkeypatch.setattr(snapshots, "_MOST_EXACT", 3)
    for blocks in (3, 4):
        image = ExactImage("k", 1, [_rank_of([blocks, 0, 0, 0, 0, 0, 0], blocks)])
        found = snapshots.read(snapshots.of_endpoint(snapshot_of(image)))
        assert isinstance(found, EndpointSnapshot)
        assert (found.exact is None) == (blocks == 4)


def test_words_are_little_endian() -> None:
    """Blocks of deltas are packed low byte first, whatever the machine."""
    assert pack([1, 2**63]) == b"\x01" + bytes(14) + b"\x80"
    assert list(unpack(pack([1, 2**63]))) == [1, 2**63]

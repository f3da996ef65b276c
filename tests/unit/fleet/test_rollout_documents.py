"""Documents of rollouts: whatever stands in the store is read, or refused as one kind of error."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import StoreError
from extproc.fleet.rollout_documents import Remembered, newer, read
from extproc.fleet.rollouts import JUDGEMENTS, statuses
from extproc.rollout.state import GROUP, encode
from extproc.state.document_store import Document, Documents
from tests.unit.fleet.parts import SkewedClock
from tests.unit.fleet.rollout_parts import Shelf, started

GOOD = msgspec.json.decode(encode(started(1000.0)))
FIELDS = st.sampled_from(sorted(GOOD))
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.binary(max_size=200))
def test_bytes_are_no_rollout(payload: bytes) -> None:
    """One error of the tree for all of them."""
    with pytest.raises(StoreError):
        read("m", 1, payload)


@given(st.dictionaries(FIELDS, VALUES, max_size=3), st.sets(FIELDS, max_size=1))
def test_a_rollout_with_other_values_is_sound_or_refused(changes: dict[str, Any], without: set[str]) -> None:
    """What is accepted gives no version more than there is, at a step that exists."""
    document = {name: value for name, value in {**GOOD, **changes}.items() if name not in without}
    with contextlib.suppress(StoreError):
        rollout = read("m", 1, msgspec.json.encode(document)).rollout
        assert rollout.model == "m"
        assert all(0.0 <= share <= 1.0 for share in (rollout.share, *rollout.earlier, *rollout.plan.steps))
        assert 0 <= rollout.step < len(rollout.plan.steps)
        assert rollout.epoch


@given(st.integers(0, len(encode(started(1000.0)))))
def test_a_torn_rollout_is_refused(length: int) -> None:
    """Of a whole one, some bytes are there."""
    whole = encode(started(1000.0))
    if length < len(whole):
        with pytest.raises(StoreError):
            read("m", 1, whole[:length])


DEEP = b'{"x":' + b"[" * 30_000 + b"]" * 30_000 + b"}"
"""More levels than can be read, in 64 KB."""


async def test_what_is_too_deep_is_refused() -> None:
    """It ends neither a worker nor a keeper."""
    with pytest.raises(StoreError):
        read("m", 1, DEEP)
    shelf = Shelf(SkewedClock())
    await shelf.put_part(GROUP, JUDGEMENTS, "m", DEEP, 60_000)
    assert await statuses(shelf) == {}


def test_of_one_rollout_the_greater_revision_is_newer() -> None:
    """And of one revision the store's, so that all come to the same."""
    first, second = read("m", 1, encode(started(1000.0))), read("m", 2, encode(started(1000.0)))
    assert newer(second, first)
    assert newer(first, first)
    assert not newer(first, second)


def test_another_rollout_is_newer_that_began_later() -> None:
    """After a flush the revisions begin anew."""
    old, new = read("m", 7, encode(started(1000.0, "r1"))), read("m", 1, encode(started(2000.0, "r2")))
    assert newer(new, old)
    assert not newer(read("m", 1, encode(started(500.0, "r0"))), old)


def test_what_is_remembered_is_told_once() -> None:
    """Only what changed, and never what is gone."""
    remembered, document = Remembered(), Document(1, encode(started(1000.0)))
    assert remembered.take(Documents(0.0, {"m": document})) == ["m"]
    assert remembered.take(Documents(0.0, {"m": document})) == []
    assert remembered.take(Documents(0.0, {})) == []
    assert set(remembered.rollouts()) == {"m"}

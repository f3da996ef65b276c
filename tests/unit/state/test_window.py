"""How much of a feed is kept, and how far it has moved on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.state.window import Window


def filled(*sizes: int, entries: int = 100, most_bytes: int = 1000) -> Window:
    """A window that saw entries of these sizes, with ids 1, 2, 3, ..."""
    window = Window(entries, most_bytes)
    for at, size in enumerate(sizes, 1):
        window.saw((at, 0), size)
    return window


def test_small_entries_are_kept_by_their_number() -> None:
    """As long as they fill no more bytes than they may."""
    assert filled(*[1] * 500).entries == 100


@given(st.lists(st.integers(1, 400), max_size=200))
def test_large_entries_are_kept_by_their_bytes(sizes: list[int]) -> None:
    """The newest of them, as many as fit, and one at least."""
    window = filled(*sizes)
    kept = sizes[-window.entries :]
    assert len(kept) == 0 or sum(kept) <= 1000 or len(kept) == 1
    assert window.entries <= 100


@pytest.mark.parametrize(("size", "after", "moved"), [(100, 0, 2.0), (100, 10, 1.0), (100, 20, 0.0), (1, 0, 0.2)])
def test_the_feed_moves_on_by_bytes_or_by_entries(size: int, after: int, moved: float) -> None:
    """In windows, whichever fills first: 20 entries of a tenth of the bytes are two of them, 20 small ones a fifth."""
    assert filled(*[size] * 20).since((after, 0)) == pytest.approx(moved, abs=0.02)


def test_how_far_it_moved_is_known_for_what_is_kept() -> None:
    """Marks are bounded in number: since what was trimmed long ago it has moved on by a whole window at least."""
    window = filled(*[10] * 10_000)
    assert window.since((9_990, 0)) == pytest.approx(0.1, abs=0.02)
    assert window.since((9_900, 0)) == pytest.approx(1.0, abs=0.02)
    assert window.since((1, 0)) >= 1.0
    assert len(window._marks) < 200


def test_a_feed_that_started_over_is_empty() -> None:
    """What was seen of the one before counts neither among what is kept nor for the entries that may be."""
    window = filled(*[400] * 10)
    assert window.entries == 2
    window.started_over()
    assert window.entries == 100
    window.saw((1, 0), 100)
    assert window.since((1, 0)) == pytest.approx(0.0)

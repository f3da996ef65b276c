"""Counts by last use: which entries are the oldest, and how many are newer."""

from hypothesis import given
from hypothesis import strategies as st

from extproc.state.uses import Uses


def _exact(steps: list[tuple[int, int]]) -> tuple[Uses, list[int]]:
    """Counts with stamps 1, 2, 3... of which some entries are used again at the next; beside the plain counts."""
    uses = Uses(floor=1)
    plain = [0]
    for stamp, (entries, again) in enumerate(steps, 1):
        uses.count(stamp, entries)
        plain.append(entries)
        moved = min(again, plain[stamp - 1])
        if moved:
            uses.discount(stamp - 1, moved)
            plain[stamp - 1] -= moved
    return uses, plain


STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=400)


@given(STEPS, st.integers(0, 420))
def test_newer_counts_what_was_used_since(steps: list[tuple[int, int]], stamp: int) -> None:
    """Entries with a stamp or a higher one are counted exactly, however many rows were merged before."""
    uses, plain = _exact(steps)
    assert uses.held == sum(plain)
    assert uses.newer(stamp) == sum(plain[stamp:])


@given(STEPS, st.integers(0, 420))
def test_dropping_evicts_what_is_older_and_nothing_else(steps: list[tuple[int, int]], stamp: int) -> None:
    """After a drop the floor parts the evicted from the held, and counting goes on with stamps that follow."""
    uses, plain = _exact(steps)
    assert uses.drop(stamp) == sum(plain[:stamp])
    assert uses.held == sum(plain[stamp:])
    assert all(at < uses.floor for at, entries in enumerate(plain[:stamp]) if entries)
    assert all(at >= uses.floor for at, entries in enumerate(plain) if entries and at >= stamp)
    assert uses.floor <= len(plain)
    uses.count(len(plain), 3)
    assert uses.newer(len(plain)) == 3


@given(STEPS, st.integers(0, 100))
def test_shrinking_evicts_the_oldest_and_no_row_too_many(steps: list[tuple[int, int]], most: int) -> None:
    """At most so many are left, they are the newest, and the last row evicted was needed."""
    uses, plain = _exact(steps)
    before = uses.held
    assert uses.shrink(most) == before - uses.held
    assert uses.held <= max(most, 0)
    assert uses.held == sum(plain[uses.floor :])
    if before > most:
        assert uses.held + plain[uses.floor - 1] > most


def test_shrinking_reaches_as_far_as_it_must() -> None:
    """Of 5,000 entries with stamps of their own the newest ten stay when ten may."""
    uses = Uses(floor=1)
    for stamp in range(1, 5001):
        uses.count(stamp, 1)
    assert uses.shrink(10) == 4990
    assert uses.newer(4991) == uses.held == 10


def test_rows_stay_few_and_their_error_small() -> None:
    """For 100,000 entries with stamps of their own 65,536 rows are enough to be right to 3 in 16,384."""
    uses = Uses(floor=1)
    for stamp in range(1, 100_001):
        uses.count(stamp, 1)
    assert uses.nbytes <= 12 * 65_536
    for stamp in range(1, 100_002, 997):
        assert 0 <= uses.newer(stamp) - (100_001 - stamp) <= 3 * 100_000 / 16_384
    assert 0 <= 49_999 - uses.drop(50_000) <= 3 * 100_000 / 16_384
    assert uses.held == uses.newer(0)


def test_a_hot_prompt_leaves_no_rows_behind() -> None:
    """The rows follow the entries, not the number of uses."""
    uses = Uses(floor=1)
    uses.count(1, 500)
    for stamp in range(2, 10_000):
        uses.count(stamp, 500)
        uses.discount(stamp - 1, 500)
    assert uses.held == 500
    assert uses.nbytes <= 12 * 64

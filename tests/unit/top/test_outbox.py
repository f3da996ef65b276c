"""What waits to be told: in numbered entries that readers can tell apart."""

import math

from extproc.outbox import Outbox
from extproc.state import feed
from extproc.state.feed import Held, Measured


def numbers(outbox: Outbox) -> list[int]:
    """Take everything out; returns the numbers of the entries."""
    found: list[int] = []
    while entry := outbox.entry():
        found.append(feed.decode(entry).number)
        outbox.sent()
    return found


def test_entries_are_numbered() -> None:
    """From 1 on, without a hole: a reader that finds one has missed something."""
    outbox = Outbox("r1")
    for _ in range(3):
        outbox.put(Held("a", bytes(40_000)))
    assert numbers(outbox) == [1, 2, 3]
    outbox.put(Held("a", b""))
    assert numbers(outbox) == [4]
    assert outbox.number == 4


def test_an_entry_stays_the_same_until_it_was_sent() -> None:
    """An append that was taken although no answer came is tried again: readers must see that it is the same."""
    outbox = Outbox("r1")
    outbox.put(Held("a", bytes(8)))
    entry = outbox.entry()
    outbox.put(Held("b", bytes(8)))
    assert outbox.entry() == entry
    outbox.sent()
    assert [delta.endpoint for delta in feed.decode(outbox.entry()).deltas if isinstance(delta, Held)] == ["b"]


def test_what_is_given_up_leaves_a_hole() -> None:
    """Readers must learn that something was lost: a number is left out."""
    outbox = Outbox("r1")
    outbox.put(Held("a", bytes(8)))
    assert numbers(outbox) == [1]
    assert all(outbox.put(Held("a", b"")) for _ in range(10_000))
    assert not outbox.put(Held("a", b""))
    found = numbers(outbox)
    assert found[0] == 3
    assert found == list(range(3, 3 + len(found)))


def test_what_others_would_refuse_is_not_told() -> None:
    """One delta that cannot be would cost its whole entry."""
    outbox = Outbox("r1")
    assert not outbox.put(Measured(b"", math.nan))
    assert outbox.put(Held("a", b""))
    assert [len(feed.decode(outbox.entry()).deltas)] == [1]


def test_an_empty_outbox_has_no_entry() -> None:
    """Nothing to tell is nothing to send, and takes no number."""
    outbox = Outbox("r1")
    assert (outbox.entry(), outbox.number) == (b"", 0)
    outbox.sent()
    assert outbox.number == 0

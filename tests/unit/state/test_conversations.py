"""Which conversations run in a pool: those used here, those all were told of, and what who joins takes over."""

import math

import pytest

from extproc.state import snapshots
from extproc.state.conversations import Conversations
from extproc.state.feed import DamagedError, Kept
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.learnt import PoolLearnt


def name(number: int) -> bytes:
    """A digest."""
    return number.to_bytes(16, "big")


def test_a_conversation_was_there_last_when_it_was_used_or_told() -> None:
    """Whichever was later; one that is not known was never there."""
    known = Conversations()
    known.used(name(1), 5.0)
    known.told(name(1) + name(2), 3.0)
    assert [known.last(name(number)) for number in (1, 2, 3)] == [5.0, 3.0, -math.inf]
    assert [known.told_at(name(number)) for number in (1, 2, 3)] == [3.0, 3.0, -math.inf]
    assert len(known) == 2
    known.forget()
    assert (len(known), known.last(name(1))) == (0, -math.inf)


def test_own_conversations_come_newest_first_back_to_a_time() -> None:
    """Those that were only told are not among them; one used again is as new as its last turn."""
    known = Conversations()
    for number, now in ((1, 1.0), (2, 2.0), (3, 3.0), (1, 4.0)):
        known.used(name(number), now)
    known.told(name(9), 5.0)
    assert known.own(2.5) == [name(1), name(3)]


def test_what_was_unused_for_longest_goes_first() -> None:
    """Memory has a bound, for own and for told ones."""
    known = Conversations(limit=2)
    for number in (1, 2, 1, 3):
        known.used(name(number), 1.0)
        known.told(name(10 + number), 1.0)
    assert [known.last(name(number)) > 0.0 for number in (1, 2, 3)] == [True, False, True]
    assert [known.last(name(10 + number)) > 0.0 for number in (1, 2, 3)] == [True, False, True]


def test_who_joins_knows_what_all_were_told() -> None:
    """As long ago as it was; what it was told later itself stays. Own ones are nobody else's business."""
    first, second = Conversations(), Conversations()
    first.told(name(1) + name(2), 10.0)
    first.used(name(3), 10.0)
    told = snapshots.read(snapshots.of_pool(PoolLearnt((1.0, 1.0), 1.0, (1.0, 1), {}, {}, kept=first.learnt(16.0))))
    assert isinstance(told, PoolLearnt)
    second.told(name(2), 99.0)
    second.resume(told.kept, 100.0)
    assert [second.last(name(number)) for number in (1, 2, 3)] == [94.0, 99.0, -math.inf]


@pytest.mark.parametrize("kept", [(b"short", 1.0), (bytes(16), -1.0), (bytes(16), math.nan), (bytes(16), math.inf)])
def test_a_snapshot_that_says_what_cannot_be_is_refused(kept: tuple[bytes, float]) -> None:
    """Digests have 16 bytes; ages are numbers of seconds."""
    parts = snapshots.of_pool(PoolLearnt((1.0, 1.0), 1.0, (1.0, 1), {}, {}, kept=[kept]))
    with pytest.raises(DamagedError):
        snapshots.read(parts)


def test_a_pool_takes_in_what_others_tell_at_their_time() -> None:
    """By the clock of this worker; what it tells itself it has noted already."""
    known = PoolKnowledge(Priors())
    known.apply(Kept(name(1) + name(2)), 7.0, origin="other")
    known.apply(Kept(name(3)))
    assert [known.conversations.last(name(number)) for number in (1, 2, 3)] == [7.0, 7.0, -math.inf]

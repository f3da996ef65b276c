"""What a worker takes from a feed: each entry once, in its own time, and nothing that cannot be."""

import math
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from extproc.follower import Counts, Follower, as_id
from extproc.state import feed
from extproc.state.feed import Answered, Delta, Held, Kept, Measured, Sized, Turned
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.values import FeedEntry
from extproc.state.window import Window


class Reader:
    """A follower of a feed that the test writes, entry by entry."""

    def __init__(self) -> None:
        self.known = PoolKnowledge(Priors())
        self.counts = Counts()
        self.told: list[Delta] = []
        self.follower = Follower(self.known, "me", Window(100, 10**6), self.counts, self.told.append)
        self._ms = 1_000_000

    def take(self, payload: bytes, ms: int = 0, now: float = 0.0) -> None:
        """The next entry, a millisecond after the last or at `ms`."""
        self._ms = ms or self._ms + 1
        deque(self.follower.take(FeedEntry(f"{self._ms}-0", payload), now), 0)

    def told_by(self, origin: str, number: int, *deltas: Delta) -> None:
        """The next entry is this batch."""
        self.take(feed.encode(origin, deltas, number))


def held(*blocks: int, endpoint: str = "a", **more: Any) -> Held:
    """An endpoint holds these."""
    return Held(endpoint, feed.pack(blocks), **more)


def answered(tokens: float = 100.0) -> Answered:
    """An answer of 400 bytes and so many tokens."""
    return Answered("c", "a", -1, -1, 400.0, tokens)


def test_an_entry_that_came_twice_counts_once() -> None:
    """A sender whose append was taken although no answer came sends it again, under the same number."""
    reader = Reader()
    for _ in range(2):
        reader.told_by("you", 1, answered(50.0))
    once = reader.known.bytes_per_token
    reader.told_by("you", 1, answered(50.0))
    assert reader.known.bytes_per_token == once
    reader.told_by("you", 2, answered(50.0))
    assert reader.known.bytes_per_token > once
    assert reader.counts.gaps == 0


def test_a_missing_number_is_a_gap() -> None:
    """Trimmed before it was read, or lost in a failover: what came after is taken, and the gap is known."""
    reader = Reader()
    reader.told_by("you", 1, held(1))
    reader.told_by("they", 7, held(2))
    reader.told_by("you", 2, held(3))
    assert (reader.follower.missed, reader.counts.gaps) == (None, 0)
    reader.told_by("you", 4, held(4))
    assert reader.follower.missed == reader.follower.cursor
    assert reader.counts.gaps == 1
    assert reader.known.held("a") == 4


def test_its_own_entries_change_nothing() -> None:
    """It knew what it told when it told it; numbers of its own that are missing are no gap."""
    reader = Reader()
    reader.told_by("me", 1, held(1))
    reader.told_by("me", 5, held(2))
    assert (reader.known.held("a"), reader.counts.gaps) == (0, 0)


def test_a_feed_that_started_over_is_followed_from_its_beginning() -> None:
    """Older ids than before: numbers go on, what comes is taken, and it is counted."""
    reader = Reader()
    reader.told_by("you", 1, held(1))
    reader.take(feed.encode("you", [held(2)], 2), ms=500)
    reader.take(feed.encode("you", [held(3)], 3), ms=501)
    assert (reader.known.held("a"), reader.follower.after) == (3, "501-0")
    assert (reader.counts.started_over, reader.counts.gaps) == (1, 0)
    assert reader.follower.window.since((500, 0)) < 0.02


def test_who_joins_notices_what_is_not_there_any_more() -> None:
    """A snapshot tells the last number of each replica: the next entry that is still there has a later one than next.

    What is read again up to that entry has earlier numbers, and is neither a gap nor seen before.
    """
    reader = Reader()
    reader.follower.heard((1_000_002, 0), {"you": 7, "they": 3})
    reader.told_by("you", 6, held(1))
    reader.told_by("you", 7, held(2))
    reader.told_by("they", 4, held(3))
    assert (reader.known.held("a"), reader.counts.gaps) == (3, 0)
    reader.told_by("you", 9, held(4))
    assert reader.counts.gaps == 1


class TestReadingAgain:
    """After snapshots were taken over, the feed is read again from the oldest of them."""

    def test_what_a_snapshot_includes_is_passed_over(self) -> None:
        """Each endpoint's deltas count from where its snapshot ends; those of others from where it had read to."""
        reader = Reader()
        for number in (1, 2, 3):
            reader.told_by("you", number, held(number), held(number, endpoint="b"), answered())
        before = reader.known.bytes_per_token
        reader.known.caches.index.forget("a")
        reader.follower.resume({"a": (1_000_002, 0)}, (1_000_002, 0), 0)
        reader.take(feed.encode("you", [held(3), held(9, endpoint="b")], 3), ms=1_000_003)
        assert (reader.known.held("a"), reader.known.held("b")) == (1, 3)
        reader.told_by("you", 4, held(4), held(4, endpoint="b"))
        assert (reader.known.held("a"), reader.known.held("b")) == (2, 4)
        assert reader.known.bytes_per_token == before
        assert reader.counts.gaps == 0

    def test_snapshots_may_be_ahead_of_the_reader(self) -> None:
        """Their writer had read further: what they include is passed over when this worker gets there."""
        reader = Reader()
        reader.told_by("you", 1, held(1))
        reader.follower.resume({"a": (1_000_003, 0)}, (1_000_003, 0), 0)
        for number in (2, 3, 4):
            reader.told_by("you", number, held(number), held(number, endpoint="b"))
        assert (reader.known.held("a"), reader.known.held("b")) == (2, 3)

    def test_what_it_told_itself_comes_back(self) -> None:
        """A snapshot that replaces a profile lacks what this worker told since: it takes that from the feed."""
        reader = Reader()
        reader.told_by("you", 1, held(1))
        reader.known.apply(held(2))
        reader.known.caches.index.forget("a")
        reader.follower.resume({"a": (1_000_001, 0)}, (1_000_001, 0), 1)
        reader.told_by("me", 1, held(2), held(3, endpoint="b"))
        reader.told_by("me", 2, held(4))
        assert (reader.known.held("a"), reader.known.held("b")) == (1, 0)


class TestTime:
    """What was decided before a worker joined was not decided when it read that."""

    def test_uses_count_when_they_were(self) -> None:
        """The gap between two uses is the one between their entries, however fast they are read."""
        reader = Reader()
        reader.follower.joined((1_000_000, 0), 500.0)
        for ms in (960_000, 980_000):
            reader.take(feed.encode("you", [held(1, shared_block=7)]), ms, now=500.0)
        assert reader.known.heat.gap_s(7, 500.0) == pytest.approx(20.0)
        reader.take(feed.encode("you", [held(1, shared_block=7)]), 1_000_500, now=500.5)
        assert reader.known.heat.gap_s(7, 500.5) < 20.0

    def test_replicas_see_each_others_uses(self) -> None:
        """Two workers that serve a beginning in turns know how often it is used as one that serves all would."""
        reader, alone = Reader(), Reader()
        for second in range(20):
            alone.known.heat.used(7, float(second))
            if second % 2:
                reader.known.heat.used(7, float(second))
            else:
                reader.take(feed.encode("you", [held(1, shared_block=7)]), now=float(second))
        assert reader.known.heat.gap_s(7, 25.0) == alone.known.heat.gap_s(7, 25.0)

    def test_prefills_of_long_ago_are_over(self) -> None:
        """Only those of the last minute may be under way; who joins has no answer to wait for of the others."""
        reader = Reader()
        reader.follower.joined((1_000_000, 0), 500.0)
        reader.take(feed.encode("you", [held(1, charge_id="old")]), 900_000, now=500.0)
        reader.take(feed.encode("you", [held(2, charge_id="fresh")]), 999_000, now=500.0)
        facts, index = reader.known.caches.of("a"), reader.known.caches.index
        stamps = [index.stamps("a", [block])[0] for block in (1, 2)]
        assert [facts.prefills.over(stamp, index.clock("a")) for stamp in stamps] == [True, False]


def raw(version: int, deltas: Any, size: int = 0, blocks: bytes = b"") -> bytes:
    """An entry by hand."""
    return msgspec.msgpack.encode([version, "you", 1, size, deltas, blocks])


def place(like: int, shared: int, own: int) -> bytes:
    """Where blocks are."""
    return b"".join(each.to_bytes(4, "little") for each in (like, shared, own))


def packed(*deltas: Delta) -> bytes:
    """Deltas with places instead of blocks."""
    return msgspec.msgpack.encode(list(deltas))


BOMB = zlib.compress(bytes(100 * 1024 * 1024))
DAMAGE: dict[str, bytes] = {
    "nothing": b"",
    "noise": b"nonsense",
    "another shape": msgspec.msgpack.encode([feed.VERSION, "you", "one"]),
    "start in the far future": feed.encode("you", [held(1, started_at=1e300)]),
    "start that is no number": feed.encode("you", [held(1, started_at=math.nan)]),
    "start before time": feed.encode("you", [held(1, started_at=-5.0)]),
    "share above all": feed.encode("you", [Sized("a", 2.0, 0)]),
    "share that is no number": feed.encode("you", [Sized("a", math.nan, 0)]),
    "fewer than no blocks left": feed.encode("you", [Sized("a", 0.5, -7)]),
    "endless prompt": feed.encode("you", [answered(math.inf)]),
    "negative prompt": feed.encode("you", [answered(-400.0)]),
    "tokens that are no number": feed.encode("you", [Turned(b"t", "a", math.nan, 1.0)]),
    "ratio that is no number": feed.encode("you", [Measured(feed.pack([1]), math.nan)]),
    "half a conversation": feed.encode("you", [Kept(bytes(24))]),
    "more conversations than one delta has": feed.encode("you", [Kept(bytes(16 * (feed.MOST_KEPT + 1)))]),
    "endless name": feed.encode("you", [held(1, endpoint="a" * 1000)]),
    "negative number": feed.encode("you", [held(1)], -1),
    "bomb": raw(feed.VERSION, BOMB, 8 * 1024 * 1024),
    "bomb of a size that is refused": raw(feed.VERSION, BOMB, 100 * 1024 * 1024),
    "size that is less": raw(feed.VERSION, zlib.compress(packed()), 9),
    "no compression": raw(feed.VERSION, b"plain", 5),
    "blocks outside": raw(feed.VERSION, packed(Held("a", place(0, 0, 2))), 0, bytes(8)),
    "blocks of nobody": raw(feed.VERSION, packed(Held("a", place(3, 1, 0))), 0, bytes(8)),
    "blocks without a place": raw(feed.VERSION, packed(Held("a", b"xyz")), 0, bytes(8)),
    "blocks that multiply": raw(
        feed.VERSION,
        packed(Held("a", place(0, 0, 65_536)), *[Held("a", place(0, 65_536, 0))] * 1000),
        0,
        bytes(8 * 65_536),
    ),
}


@pytest.mark.parametrize("payload", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_changes_nothing_and_is_counted(payload: bytes) -> None:
    """Whatever cannot be read, or cannot be: nothing of it is believed, and the next entry is taken."""
    reader = Reader()
    reader.told_by("you", 1, held(1, 2), Turned(b"t", "a", 100.0, 10.0))
    before = state(reader.known)
    reader.take(payload)
    assert state(reader.known) == before
    assert (reader.counts.damaged, reader.counts.other_version) == (1, 0)
    reader.told_by("you", 2, held(3, endpoint="b"))
    assert reader.known.held("b") == 1


def state(known: PoolKnowledge) -> Sequence[object]:
    """What a damaged delta could have changed."""
    facts = known.caches.of("a")
    return [
        known.held("a"),
        known.capacity("a"),
        known.bytes_per_token,
        known.bytes_per_token_of([1]),
        known.expected_output([1], None),
        known.continued(b"t"),
        facts.started_at,
        sorted(known.caches.endpoints),
    ]


def test_other_versions_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A rolling upgrade: the older workers' entries are skipped and counted, and one line says so."""
    reader = Reader()
    for _ in range(5):
        reader.take(msgspec.msgpack.encode([2, "you", [["held", "a", b"12345678", "", 0.0]]]))
    assert (reader.counts.other_version, reader.counts.damaged, reader.known.held("a")) == (5, 0, 0)
    assert len([record for record in caplog.records if "another version" in record.message]) == 1


def test_ids_come_back() -> None:
    """The place to read on from is the store's own id."""
    reader = Reader()
    reader.take(feed.encode("you", []), ms=17)
    assert reader.follower.after == as_id((17, 0)) == "17-0"

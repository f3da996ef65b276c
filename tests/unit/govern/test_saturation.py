"""When endpoints are saturated: by their pages, by the ledger, and never by what is not known."""

import math

from extproc.govern.saturation import UNKNOWN, Batches, Member, Room, Thresholds, full_by_page, room

LIMITS = Thresholds(waiting=4, kv_usage=0.95, backlog_ms=1000.0)


def batches(**seen: tuple[int, int]) -> Batches:
    """Pages read at time 0: running and waiting by endpoint."""
    made = Batches()
    for name, (running, waiting) in seen.items():
        made.saw(name, running, waiting, 0.0, full=waiting > 0)
    return made


def room_of(known: Batches, *members: Member) -> Room:
    """Room of these endpoints."""
    return room(members, known.of(each.id for each in members), LIMITS)


def test_an_engine_without_a_queue_is_not_saturated_whatever_it_runs() -> None:
    """How many it can run at once is not known before some wait."""
    found = room_of(batches(a=(500, 0)), Member("a", 500, 0.0, 1000.0))
    assert found.open
    assert found.sequences == math.inf
    assert not found.near


def test_a_batch_and_what_may_wait_is_what_an_endpoint_may_have() -> None:
    """Ten run and some wait: with four allowed to wait it may have 14, by the ledger, which is newer than the page."""
    known = batches(a=(10, 6))
    assert room_of(known, Member("a", 13, 0.0, 1000.0, waiting=6)).sequences == 1
    full = room_of(known, Member("a", 14, 0.0, 1000.0, waiting=6))
    assert not full.open
    assert (full.saturated, full.waiting, full.limit) == (1, 4.0, 14.0)


def test_only_a_pool_without_any_room_is_saturated() -> None:
    """One endpoint that overflows takes nothing from the room of another (D12)."""
    known = batches(a=(10, 50), b=(10, 1))
    found = room_of(known, Member("a", 60, 0.0, 1000.0), Member("b", 12, 0.0, 1000.0))
    assert found.open
    assert (found.sequences, found.saturated) == (2, 1)


def test_a_full_cache_leaves_one_to_wait() -> None:
    """Above the threshold of KV usage, and with a queue, more requests would only be preempted."""
    known = batches(a=(10, 1))
    assert room_of(known, Member("a", 11, 0.0, 1000.0, waiting=1, kv_usage=0.96)).sequences == 0
    assert room_of(known, Member("a", 11, 0.0, 1000.0, waiting=1, kv_usage=0.94)).sequences == 3
    assert room_of(known, Member("a", 10, 0.0, 1000.0, waiting=0, kv_usage=0.99)).sequences == 4


def test_a_backlog_beyond_its_bound_saturates() -> None:
    """A second of prefill at 1,000 tokens a second; the room is what is left of it."""
    assert room_of(Batches(), Member("a", 1, 400.0, 1000.0)).tokens == 600.0
    assert not room_of(Batches(), Member("a", 1, 1000.0, 1000.0)).open


def test_old_pages_saturate_nothing() -> None:
    """Pages that are not read any more: the last batch counts for half a minute, by the ledger; then nothing (B5)."""
    known = batches(a=(10, 3))
    known.keep({"a"}, 29.0)
    assert room_of(known, Member("a", 14, 0.0, 1000.0)).saturated == 1
    known.keep({"a"}, 31.0)
    assert room_of(known, Member("a", 500, 0.0, 1000.0)).open


def test_nothing_is_known_when_nobody_is_heard() -> None:
    """All silent: nobody is turned away. One silent among others: it is no room for anybody."""
    silent = Member("a", 5, 0.0, 1000.0, silent=True)
    assert room_of(batches(a=(5, 5)), silent) == UNKNOWN
    assert not room_of(batches(a=(5, 5), b=(5, 5)), silent, Member("b", 9, 0.0, 1000.0)).open


def test_a_new_endpoint_is_taken_for_what_the_others_are() -> None:
    """It showed no queue yet: all that waits would rush to it."""
    found = room_of(batches(a=(10, 4), b=(20, 4)), *(Member(name, 0, 0.0, 1000.0) for name in "abc"))
    assert found.limit == 14 + 24 + 19


def test_a_batch_grows_with_what_runs() -> None:
    """An engine that runs more than its batch was thought to be gets a quarter more at each look, until some wait."""
    known = batches(a=(8, 5))
    known.saw("a", 12, 0, 0.25, full=0 > 0)
    assert known.of("a")["a"] == 15.0
    known.saw("a", 15, 0, 0.5, full=0 > 0)
    assert known.of("a")["a"] == 15.0
    known.saw("a", 19, 0, 0.75, full=0 > 0)
    assert known.of("a")["a"] == 23.75


def test_a_batch_that_shrinks_is_believed_for_some_seconds() -> None:
    """Answers that end together leave a hole for a moment; a batch that stays smaller is taken over."""
    known = batches(a=(20, 5))
    known.saw("a", 10, 5, 0.25, full=5 > 0)
    assert 19.0 < known.of("a")["a"] < 20.0
    for at in range(1, 200):
        known.saw("a", 10, 5, 0.25 + at * 0.25, full=5 > 0)
    assert known.of("a")["a"] < 10.1


def test_one_that_waits_behind_a_long_prompt_shows_no_batch() -> None:
    """Three run and one waits: the engine may run hundreds. Once its batch is known, one that waits is enough."""
    known = Batches()
    known.saw("a", 3, 1, 0.0, full=False)
    assert known.of("a")["a"] == math.inf
    known.saw("a", 30, 4, 0.0, full=True)
    known.saw("a", 31, 1, 25.0, full=False)
    known.keep({"a"}, 50.0)
    assert known.of("a")["a"] == 31.0


def test_pages_tell_who_is_saturated() -> None:
    """So many wait; or the cache is full and any waits."""
    assert full_by_page(4, 0.0, LIMITS)
    assert full_by_page(1, 0.95, LIMITS)
    assert not full_by_page(3, 0.94, LIMITS)
    assert not full_by_page(0, 1.0, LIMITS)


def test_gone_endpoints_are_forgotten() -> None:
    """The next one with this name starts anew."""
    known = batches(a=(10, 5))
    known.keep(set(), 1.0)
    assert known.of("a")["a"] == math.inf

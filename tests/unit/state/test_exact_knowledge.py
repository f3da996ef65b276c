"""Exact profiles beside estimated ones, in what a worker knows of a pool."""

import pytest

from extproc.state.exact_blocks import TokenPrompt, chain_of
from extproc.state.feed import Answered, Cached, Delta, Exact, Held, pack
from extproc.state.knowledge import PoolKnowledge, Priors

BLOCKS = chain_of(TokenPrompt(range(1, 101)), 10)
CHAINS = {10: BLOCKS}


def knowledge(*deltas: Delta) -> PoolKnowledge:
    """An endpoint `a`, started at 5, that told of the first six blocks of the prompt; then these deltas."""
    known = PoolKnowledge(Priors())
    told = (Exact("a", 0, 10, 5.0), Cached("a", 0, 0, pack(BLOCKS[:6]), 5.0), *deltas)
    for delta in told:
        known.apply(delta, 0.0, origin="k")
    return known


def depth(known: PoolKnowledge, endpoint: str = "a") -> int | None:
    """Leading blocks; None when the exact profile says nothing."""
    match = known.caches.exact.matches(CHAINS, 101, (1.0, 1.0)).get(endpoint)
    return match.blocks if match else None


def test_a_restarted_engine_holds_nothing() -> None:
    """By its keeper's word, or by what is told of its next life; what is told late of the last one changes nothing."""
    known = knowledge()
    assert depth(known) == 6
    known.engine_seen("a", 1000, 5.0)
    assert depth(known) == 6
    known.engine_seen("a", 1000, 9.0)
    assert depth(known) == 0
    late = knowledge(Cached("a", 0, 0, pack(BLOCKS[:2]), 9.0))
    assert depth(late) == 2
    late.apply(Cached("a", 0, 0, pack(BLOCKS), 5.0), origin="k")
    late.apply(Exact("a", 0, 0, 5.0), origin="k")
    assert depth(late) == 2


def test_an_engine_that_sleeps_or_caches_nothing_is_empty() -> None:
    """Sleep empties the cache; what it tells after that counts."""
    known = knowledge()
    known.engine_seen("a", 1000, 5.0, caching=False)
    assert depth(known) == 0
    known.engine_seen("a", 1000, 5.0)
    known.apply(Cached("a", 0, 0, pack(BLOCKS[:3]), 5.0), origin="k")
    assert depth(known) == 3


def test_who_cannot_be_reached_for_a_minute_has_no_exact_profile() -> None:
    """Its events did not come either; it says nothing until it begins anew."""
    known = knowledge()
    for now in (0.0, 59.0):
        known.age(now, unreachable=["a"])
        assert depth(known) == 6
    known.age(60.0, unreachable=["a"])
    known.apply(Cached("a", 0, 0, pack(BLOCKS), 5.0), origin="k")
    assert depth(known) is None
    known.apply(Exact("a", 0, 10, 5.0), origin="k")
    assert depth(known) == 0


def test_who_left_the_pool_is_forgotten() -> None:
    """And is nobody when it comes back."""
    known = knowledge(Exact("b", 0, 10))
    known.retain(["b"])
    assert (depth(known), depth(known, "b")) == (None, 0)
    known.apply(Cached("a", 0, 0, pack(BLOCKS), 5.0), origin="k")
    assert depth(known) is None


def test_time_and_lack_of_use_forget_nothing_that_the_engine_has() -> None:
    """The estimated profile forgets what nothing used for an hour; the engine itself tells what it evicts."""
    known = knowledge()
    for now in range(0, 10_000, 400):
        known.age(float(now))
    assert depth(known) == 6


def test_reports_correct_the_estimated_profile_only() -> None:
    """An engine that reports far less than was expected, again and again, takes nothing out of its exact profile."""
    known = knowledge(Cached("a", 0, 0, pack(BLOCKS), 5.0))
    blocks = list(range(1, 40))
    known.decided("first", "a", blocks)
    known.apply(Answered("first", "a", -1, -1, 64.0 * 40, 640.0, 0.0, 600.0))
    for number in range(3):
        filler = list(range(1000 * number + 1000, 1000 * number + 1900))
        known.decided(f"f{number}", "a", filler)
        known.apply(Answered(f"f{number}", "a", -1, -1, 256.0 * 900, 57_600.0))
        known.decided(f"c{number}", "a", blocks, matched_tokens=39 * 64.0)
        known.apply(Answered(f"c{number}", "a", -1, -1, 256.0 * 40, 2560.0, 0.0, 16.0))
    assert known.caches.of("a").share.share < 1.0
    assert depth(known) == 10


def test_a_decision_is_told_with_the_blocks_that_are_missing() -> None:
    """Others count them as this worker does, unless the prefill was over long ago."""
    here, there, late = knowledge(), knowledge(), knowledge()
    deltas = here.sent(here.decided("c", "a", [1, 2, 3]), CHAINS)
    assert deltas == [Held("a", pack([1, 2, 3]), "c", 5.0, 0, pack(BLOCKS[6:]), 6)]
    there.apply(deltas[0], 0.0)
    late.apply(deltas[0], 0.0, old=True)
    assert [depth(each) for each in (here, there, late)] == [10, 10, 6]
    for known in (here, there):
        known.age(100.0)
        known.apply(Answered("c", "a", -1, -1, 1000.0, 101.0))
        known.age(109.9)
        assert depth(known) == 10
        known.age(110.0)
        assert depth(known) == 6


@pytest.mark.parametrize("endpoint", ["", "b"])
def test_a_request_that_ended_elsewhere_is_not_pending(endpoint: str) -> None:
    """Whoever tells it, all workers forget that the pick would have it."""
    known = knowledge()
    known.sent(known.decided("c", "a", [1, 2, 3]), CHAINS)
    known.apply(Answered("c", endpoint, -1, -1, -1, -1))
    assert depth(known) == 6


def test_decisions_for_an_earlier_life_are_not_pending() -> None:
    """What was sent to an engine that restarted since is lost."""
    known = knowledge()
    known.engine_seen("a", 1000, 9.0)
    known.apply(Held("a", pack([1]), "c", 5.0, 0, pack(BLOCKS), 0), 0.0)
    assert depth(known) == 0

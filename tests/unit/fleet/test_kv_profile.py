"""When workers are told a precise profile, when they go back to the estimated one, and whose life it is of."""

from collections.abc import Sequence

import pytest

from extproc.config import ProfileMode
from extproc.engines.kv_values import EventBatch, KvEvent, Removed, Stored, Tier
from extproc.fleet.kv_profile import Counts, Engine, Profile
from extproc.state.deltas import Delta, Exact

AT = "10.0.0.1:8000"
PRECISE = Engine("precise", started_at=100.0, block_tokens=1, rank_blocks=3)
AUTO = Engine("auto", started_at=100.0, block_tokens=1, rank_blocks=3)


def prompt(number: int) -> Stored:
    """A prompt of one token."""
    return Stored((number,), None, (number,), 1)


class Kept:
    """A profile that is kept."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.profile = Profile(AT, 0, self.counts, now=0.0)

    def take(self, *events: KvEvent, at: float = 200.0) -> None:
        """Take in one batch."""
        for _ in self.profile.apply(EventBatch(at, 0, events), wall=201.0):
            pass

    def settle(self, engine: Engine, now: float = 0.0, *, in_step: bool = True) -> bool:
        """See `Profile.settle`."""
        return self.profile.settle(engine, now, in_step=in_step)

    def told(self) -> Sequence[Delta]:
        """What is told now."""
        return self.profile.telling.take(1000)

    def exacts(self) -> list[int]:
        """Profiles that begin and end now."""
        return [each.block_tokens for each in self.told() if isinstance(each, Exact)]


@pytest.mark.parametrize("engine", [PRECISE, AUTO])
def test_a_stream_known_from_its_start_is_told_when_it_is_in_step(engine: Engine) -> None:
    """Also when nothing is cached yet: that is exact too."""
    kept = Kept()
    kept.profile.begin(engine, from_start=True)
    assert kept.settle(engine, in_step=False)
    assert kept.told() == []
    assert kept.settle(engine)
    assert kept.exacts() == [1]
    kept.take(prompt(1))
    assert kept.settle(engine)
    assert len(kept.told()) == 1


@pytest.mark.parametrize(("mode", "expected"), [("precise", [1]), ("auto", [0])])
def test_one_joined_late_is_told_in_precise_pools_alone(mode: ProfileMode, expected: list[int]) -> None:
    """In auto ones the estimated profile counts until it is complete, in place of what another keeper may have told."""
    engine = Engine(mode, 100.0, 1, 3)
    kept = Kept()
    kept.profile.begin(engine, from_start=False)
    kept.take(prompt(1), prompt(2))
    kept.settle(engine)
    assert kept.exacts() == expected
    assert kept.profile.is_partial
    kept.settle(engine)
    assert kept.exacts() == []
    kept.take(prompt(3))
    kept.settle(engine)
    assert kept.exacts() == ([] if mode == "precise" else [1])
    assert not kept.profile.is_partial or mode == "precise"


def test_what_another_keeper_told_ends_after_a_while() -> None:
    """It goes stale while this one is not in step."""
    kept = Kept()
    kept.settle(PRECISE, 2.9, in_step=False)
    assert kept.exacts() == []
    kept.settle(PRECISE, 3.0, in_step=False)
    assert kept.exacts() == [0]
    kept.settle(PRECISE, 9.0, in_step=False)
    assert kept.exacts() == []


def test_a_profile_without_a_known_size_of_blocks_is_not_told() -> None:
    """Neither metrics nor events told it yet."""
    engine = Engine("precise", 100.0)
    kept = Kept()
    kept.profile.begin(engine, from_start=True)
    kept.settle(engine)
    assert kept.exacts() == []
    kept.take(prompt(1))
    kept.settle(engine)
    assert kept.exacts() == [1]


def test_a_forgotten_profile_ends_and_begins_again() -> None:
    """Workers go back to the estimated one at once."""
    kept = Kept()
    kept.profile.begin(PRECISE, from_start=True)
    kept.settle(PRECISE)
    kept.told()
    kept.profile.forget(PRECISE)
    assert kept.settle(PRECISE)
    assert kept.exacts() == [0]
    kept.profile.begin(PRECISE, from_start=False)
    kept.settle(PRECISE)
    assert kept.exacts() == [1]


def test_a_batch_that_cannot_be_read_pauses_the_profile() -> None:
    """It may have had removals: all is forgotten, and nothing is told for a while, however many of them come."""
    kept = Kept()
    kept.profile.begin(PRECISE, from_start=True)
    kept.settle(PRECISE)
    kept.take(prompt(1))
    kept.told()
    kept.profile.lose(PRECISE, 5.0)
    kept.settle(PRECISE, 5.0)
    assert kept.exacts() == [0]
    kept.take(prompt(2))
    kept.settle(PRECISE, 14.0)
    assert kept.exacts() == []
    kept.settle(PRECISE, 15.0)
    assert kept.exacts() == [1]
    assert kept.profile.chain.count == 1
    assert kept.counts.unreadable == 1


def test_a_profile_whose_stream_stays_out_of_step_is_put_aside() -> None:
    """What is missing may be removals: workers go back to the estimated one, and it is told whole when all is known."""
    kept = Kept()
    kept.profile.begin(PRECISE, from_start=True)
    kept.settle(PRECISE, 1.0)
    kept.take(prompt(1))
    kept.told()
    for now in (2.0, 6.0):
        kept.settle(PRECISE, now, in_step=False)
    assert kept.exacts() == []
    kept.settle(PRECISE, 6.5, in_step=False)
    assert kept.exacts() == [0]
    assert kept.counts.apart == 1
    kept.settle(PRECISE, 60.0, in_step=False)
    assert kept.exacts() == []
    kept.settle(PRECISE, 61.0)
    told = kept.told()
    assert [each.block_tokens for each in told if isinstance(each, Exact)] == [1]
    assert len(told) == 2
    kept.settle(PRECISE, 62.0, in_step=False)
    assert kept.exacts() == []


def test_a_keeper_that_stood_still_does_not_put_its_profiles_aside() -> None:
    """Time that passed without a look is no time out of step."""
    kept = Kept()
    kept.profile.begin(PRECISE, from_start=True)
    kept.settle(PRECISE, 1.0)
    kept.told()
    kept.settle(PRECISE, 100.0)
    kept.settle(PRECISE, 100.1, in_step=False)
    assert kept.exacts() == []


def test_a_new_start_asks_for_the_events_again() -> None:
    """What was told is of the life before."""
    kept = Kept()
    kept.profile.begin(PRECISE, from_start=True)
    kept.take(prompt(1))
    assert kept.settle(PRECISE)
    assert not kept.settle(Engine("precise", 300.0, 1, 3))


def test_events_of_the_new_life_stay_when_its_start_becomes_known() -> None:
    """They came before the scrape that saw the new start: the profile is told anew as that life's."""
    kept = Kept()
    kept.profile.begin(PRECISE, from_start=True)
    kept.take(prompt(1), at=304.0)
    kept.settle(PRECISE)
    kept.told()
    later = Engine("precise", 305.0, 1, 3)
    assert kept.settle(later)
    first, *rest = kept.told()
    assert first == Exact(AT, 0, 1, 305.0)
    assert len(rest) == 1


def test_events_are_counted_by_their_kind_and_dated() -> None:
    """The lag is from the engine's clock to ours; a batch without a time has none."""
    kept = Kept()
    kept.profile.begin(PRECISE, from_start=True)
    kept.take(prompt(1), prompt(2), at=199.5)
    assert kept.counts.stored == 2
    assert kept.profile.lag_s == 1.5
    kept.take(prompt(3), at=0.0)
    assert kept.profile.lag_s == 0.0


def test_an_engine_that_does_not_tell_removals_is_not_believed() -> None:
    """It tells of many times what its cache can hold, so most of that is gone; what it tells later is tried again."""
    kept = Kept()
    kept.profile.begin(PRECISE, from_start=True)
    kept.take(*(prompt(number) for number in range(24)))
    assert kept.settle(PRECISE)
    assert kept.exacts() == [1]
    kept.take(prompt(24))
    assert kept.settle(PRECISE)
    assert kept.exacts() == [0]
    assert (kept.counts.overfull, kept.profile.chain.count) == (1, 0)
    kept.take(prompt(25))
    assert kept.settle(PRECISE, 599.0)
    assert kept.exacts() == []
    assert kept.settle(PRECISE, 601.0)
    assert kept.exacts() == [1]


def test_events_that_change_nothing_let_others_have_their_turn() -> None:
    """A batch may have very many of them, and each is looked up."""
    kept = Kept()
    kept.profile.begin(PRECISE, from_start=True)
    unknown = tuple(Removed((number,)) for number in range(100))
    assert sum(1 for _ in kept.profile.apply(EventBatch(200.0, 0, unknown), wall=201.0)) >= 100


def test_copies_that_cannot_be_are_not_counted_any_more() -> None:
    """The engine tells of reused blocks too: the profile begins anew, and the first removal counts from then on."""
    engine = Engine("precise", 100.0, 1, rank_blocks=3, copies=True)
    kept = Kept()
    kept.profile.begin(engine, from_start=True)
    kept.take(prompt(1), prompt(1), prompt(1))
    assert kept.settle(engine)
    kept.told()
    kept.take(prompt(1))
    assert kept.settle(engine)
    assert kept.exacts() == [1]
    assert kept.profile.chain.count == 0
    kept.take(prompt(1), prompt(1), Removed((1,), Tier.GPU))
    assert kept.profile.chain.count == 0

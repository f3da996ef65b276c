"""What waits for the shared store: bounded, and each thing in its latest state."""

import pytest

from extproc.state.unsent import LONG_AGO, LatePin, Unsent
from tests.unit.state.unsteady import end


def pin(endpoint: str, before: str = "") -> LatePin:
    """A pin with an hour to live."""
    return LatePin(endpoint, 3600.0, 100, before)


@pytest.mark.parametrize(
    ("shared", "wins"), [("", True), ("before", True), ("mine", True), ("of another replica", False)]
)
def test_a_late_pin_yields_to_what_this_worker_had_not_seen_alone(shared: str, wins: bool) -> None:
    """Nothing, what was there before, or the same: nobody else has decided since."""
    assert pin("mine", "before").wins_over(shared) is wins


def test_a_session_pinned_again_and_again_remembers_where_it_was_first() -> None:
    """What the shared store still has is what it had before the first of these pins."""
    unsent = Unsent(4)
    unsent.pin("s", pin("a", "shared"))
    unsent.pin("s", pin("b", "a"))
    assert (unsent.pins["s"].endpoint, unsent.pins["s"].before) == ("b", "shared")


def test_a_session_pinned_while_it_is_merged_goes_on_from_there() -> None:
    """The newer pin waits, and what it replaces is what the shared store has got meanwhile."""
    unsent = Unsent(4)
    unsent.pin("s", first := pin("a", "shared"))
    unsent.pin("s", pin("b", "a"))
    unsent.merged("s", first, "a")
    assert (unsent.pins["s"].endpoint, unsent.pins["s"].before) == ("b", "a")
    unsent.merged("s", unsent.pins["s"], "b")
    assert not unsent


def test_the_pins_used_last_are_kept() -> None:
    """One that is renewed is as new as a new one."""
    unsent = Unsent(3)
    dropped = sum(unsent.pin(key, pin("a")) for key in ("s0", "s1", "s2", "s0", "s3"))
    assert (list(unsent.pins), dropped) == (["s2", "s0", "s3"], 1)


def test_a_charge_in_doubt_is_not_taken_for_local_because_it_is_decided_again() -> None:
    """The shared store may have it by the first call: its end must be told."""
    unsent = Unsent(4)
    unsent.doubt("c", 5.0)
    unsent.alone("c", 6.0)
    assert not unsent.is_local_only("c")
    assert unsent.telling("c") == 5.0
    assert unsent.ended("c") is False


def test_a_local_charge_is_shared_from_the_moment_it_is_told() -> None:
    """Told, and not yet answered, its end is told as well; before that, nobody need hear of it."""
    unsent = Unsent(4)
    unsent.alone("told", 5.0)
    unsent.alone("never", 5.0)
    unsent.telling("told")
    assert (unsent.ended("told"), unsent.ended("never")) == (False, True)
    assert unsent.telling("unknown") == LONG_AGO
    assert not unsent


def test_doubts_of_charges_that_have_gone_are_forgotten() -> None:
    """What is not open any more is told to nobody."""
    unsent = Unsent(4)
    unsent.doubt_all(["a", "b"])
    unsent.keep_doubts({"a"})
    assert (unsent.is_unsure("a"), unsent.is_unsure("b")) == (True, False)


def test_too_many_ends_become_one_end_of_all() -> None:
    """The replica's charges are to be given up at once, until it gives them up itself."""
    unsent = Unsent(2)
    assert [unsent.end(end(charge)) for charge in ("a", "b", "c", "d")] == [0, 0, 3, 0]
    assert (unsent.wiped, list(unsent.settles)) == ({"r"}, ["d"])
    unsent.forget("r")
    assert not unsent


def test_a_pin_that_was_lost_is_written_only_where_there_is_none() -> None:
    """It says nothing new: any pin that the shared store has may be newer, and live longer."""
    lost = LatePin("mine", 3600.0, 100, None)
    assert [lost.wins_over(shared) for shared in ("", "mine", "other")] == [True, False, False]
    unsent = Unsent(4)
    unsent.pin("s", lost)
    unsent.pin("s", pin("b", "mine"))
    assert unsent.pins["s"].before == "mine"

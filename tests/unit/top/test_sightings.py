"""What a worker makes of published states over time: when they changed, by its own clock, and what nobody charged."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.sightings import Sightings
from extproc.state.endpoint import EndpointState, encode
from extproc.state.values import Load

STATE = EndpointState(destination="10.0.0.1:80", scraped_at=1000.0)


def look(sightings: Sightings, now: float, charged: int, **changes: object) -> None:
    """One look at endpoint `a` in a state of its own."""
    state = msgspec.structs.replace(STATE, **changes)
    loads = {"a": Load(running=charged)} if charged else {}
    sightings.saw({"a": encode(state)}, {"a": state}, loads, now)


def foreign(looks: Sequence[tuple[int, int]]) -> list[int]:
    """Foreign sequences after each look at (in the engine, charged), every state being a new one."""
    sightings, found = Sightings(), []
    for at, (running, charged) in enumerate(looks):
        look(sightings, float(at), charged, running=running, scraped_at=float(at))
        found.append(sightings.all["a"].foreign)
    return found


@pytest.mark.parametrize("jump", [0.0, 3600.0, -3600.0])
def test_a_state_is_as_old_as_its_last_change_here(jump: float) -> None:
    """What the keeper's clock says of when it read the engine is no matter, however wrong it is or jumps."""
    sightings = Sightings()
    for now, scraped_at in ((5.0, 1000.0), (6.0, 1000.0 + jump + 1.0), (7.0, 1000.0 + jump + 1.0)):
        look(sightings, now, 0, scraped_at=scraped_at)
    assert sightings.all["a"].since == 6.0


def test_endpoints_that_a_look_does_not_show_stay_until_they_leave() -> None:
    """A state that could not be read this time is what it was; one of an endpoint that left is forgotten."""
    sightings = Sightings()
    look(sightings, 5.0, 0)
    sightings.saw({}, {}, {}, 6.0)
    assert sightings.all["a"].since == 5.0
    sightings.keep({"b": "10.0.0.2:80"})
    assert sightings.all == {}


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        # Fifty of somebody else's: two readings in a row prove them.
        ([(0, 0), (50, 0), (50, 0), (52, 2), (0, 0)], [0, 0, 50, 50, 0]),
        # A burst of ours that the engine still shows when the ledger has them no more.
        ([(0, 0), (0, 20), (20, 20), (20, 0), (0, 0)], [0, 0, 0, 0, 0]),
        # The same, published late: the engine was read a look earlier.
        ([(0, 20), (0, 20), (20, 0), (20, 0), (20, 0)], [0, 0, 0, 0, 0]),
        # One reading alone proves nothing.
        ([(0, 0), (30, 0), (0, 0), (30, 0)], [0, 0, 0, 0]),
        # The engine has fewer than were charged: some are on their way.
        ([(0, 30), (10, 30), (20, 30)], [0, 0, 0]),
    ],
)
def test_what_no_charge_accounts_for_is_foreign(looks: Sequence[tuple[int, int]], expected: Sequence[int]) -> None:
    """Only what exceeds the most that the ledger had around each of two readings."""
    assert foreign(looks) == expected


def test_a_reading_is_held_against_all_that_was_charged_since_the_one_before() -> None:
    """Looks between two readings count, however many they were."""
    sightings = Sightings()
    look(sightings, 0.0, 0)
    for now, charged in ((1.0, 0), (2.0, 9), (3.0, 0), (4.0, 0), (5.0, 0)):
        look(sightings, now, charged)
    for now in (6.0, 7.0):
        look(sightings, now, 0, running=9, scraped_at=now)
    assert sightings.all["a"].foreign == 0
    look(sightings, 8.0, 0, running=9, scraped_at=8.0)
    assert sightings.all["a"].foreign == 9


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), min_size=1, max_size=30))
def test_an_engine_that_has_no_more_than_was_charged_has_nothing_foreign(looks: list[tuple[int, int]]) -> None:
    """Whatever the ledger does meanwhile."""
    assert set(foreign([(min(pair), max(pair)) for pair in looks])) == {0}


def test_failed_scrapes_are_seen_and_prove_nothing() -> None:
    """Somebody tries to read the engine; the numbers are those of before, whatever was charged and ended since."""
    sightings = Sightings()
    for now in (0.0, 1.0):
        look(sightings, now, 9, running=9, scraped_at=now)
    for failures in range(1, 6):
        look(sightings, 1.0 + failures, 0, running=9, scraped_at=1.0, unread=failures)
    assert (sightings.all["a"].foreign, sightings.all["a"].since) == (0, 6.0)
    for now in (7.0, 8.0, 9.0):
        look(sightings, now, 0, running=9, scraped_at=now)
    assert sightings.all["a"].foreign == 9

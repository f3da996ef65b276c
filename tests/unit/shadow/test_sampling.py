"""Which requests a shadow gets: the share that was asked for, and only while there is room to spare."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.shadow.sampling import LATE_S, State, Use, drawn, held_back, share_of

CALM = State(under_way=0, late_s=0.0, primary=Use(), shadow=Use(), serves=True)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
def test_the_share_is_kept(share: float) -> None:
    """Of 20,000 ids, the share is drawn within four standard deviations."""
    count = 20_000
    found = sum(drawn("m", f"request-{number}", share) for number in range(count))
    assert abs(found - share * count) < 4 * math.sqrt(share * (1 - share) * count)


@given(st.text(min_size=1), st.text(min_size=1, max_size=40), st.floats(0, 1), st.floats(0, 1))
def test_a_greater_share_draws_all_that_a_smaller_one_does(model: str, id_: str, one: float, other: float) -> None:
    """All workers draw alike, and a share that is raised only adds requests."""
    small, great = sorted((one, other))
    assert drawn(model, id_, small) == drawn(model, id_, small)
    assert not drawn(model, id_, small) or drawn(model, id_, great)


def test_the_ends_of_the_scale() -> None:
    """Nothing is drawn of a share of 0 or without an id, everything of 1; two models draw apart."""
    ids = [f"{number}" for number in range(1000)]
    assert not any(drawn("m", each, 0.0) for each in ids)
    assert all(drawn("m", each, 1.0) for each in ids)
    assert not drawn("m", "", 1.0)
    assert {each for each in ids if drawn("a", each, 0.3)} != {each for each in ids if drawn("b", each, 0.3)}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"under_way": 3}, None),
        ({"under_way": 4}, "over_cap"),
        ({"late_s": LATE_S}, None),
        ({"late_s": LATE_S * 1.01}, "late"),
        ({"primary": Use(queued=1)}, "queued"),
        ({"shadow": Use(queued=1)}, "queued"),
        ({"primary": Use(share=0.69)}, None),
        ({"primary": Use(share=0.7)}, "primary_busy"),
        ({"shadow": Use(share=0.7)}, "shadow_busy"),
        ({"serves": False}, "no_endpoint"),
        ({"serves": False, "shadow": Use(share=1.0)}, "no_endpoint"),
    ],
)
def test_a_shadow_is_the_first_to_go(change: dict[str, object], why: str | None) -> None:
    """Each sign of load alone is enough; four may be under way, and 70 % of the room in use."""
    assert held_back(msgspec.structs.replace(CALM, **change), 4, 0.7) == why


@pytest.mark.parametrize(
    ("limit", "free", "pages", "share"),
    [
        (math.inf, math.inf, [], 0.0),
        (100.0, 25.0, [], 0.75),
        (100.0, -20.0, [], 1.0),
        (math.inf, math.inf, [(0.2, 0), (0.4, 0)], 0.3),
        (math.inf, math.inf, [(0.2, 3), (0.4, 0)], 0.7),
        (100.0, 90.0, [(0.5, 0)], 0.5),
        (0.0, 0.0, [(0.5, 0)], 0.5),
    ],
)
def test_the_use_of_a_pool(limit: float, free: float, pages: list[tuple[float, int]], share: float) -> None:
    """The ledger's share or the pages', whichever is greater; an engine where requests wait is full."""
    assert share_of(limit, free, pages) == pytest.approx(share)

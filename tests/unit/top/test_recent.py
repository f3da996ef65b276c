"""The memory of recent decisions: who is found, who is forgotten, and how much it holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.choose.fleet import Endpoint, Pool
from extproc.choose.policies import Ask
from extproc.config import Config
from extproc.recent import Recent, Remembered
from extproc.request.model import RouteKind
from extproc.state.values import Reservation
from tests.unit.top.parts import config

POOL = Pool("main", "predicted_ttft", (Endpoint("a", "10.0.0.1:80", 1000.0),))


def settings(limit: int) -> Config:
    """A configuration that remembers so many."""
    return config(telemetry={"recent_decisions": limit})


def made(charge: str, request: str = "", using: Config | None = None, pool: Pool = POOL) -> Remembered:
    """A decision."""
    return Remembered(
        at=1.0,
        charge_id=charge,
        request_id=request,
        kind=RouteKind.CHAT,
        flaw="",
        session=False,
        ask=Ask(10.0),
        pool=pool,
        subset=None,
        config=using or config(),
        reservation=Reservation("a"),
    )


@given(requests=st.lists(st.integers(0, 5), max_size=40), limit=st.integers(0, 8))
def test_the_newest_are_found_by_both_ids(requests: list[int], limit: int) -> None:
    """Exactly the last `limit` are known by charge; a request id leads to its newest decision, if that is known."""
    recent, using = Recent(), settings(limit)
    for charge, request in enumerate(requests):
        recent.remember(made(f"c{charge}", f"r{request}", using))
    kept = range(max(0, len(requests) - limit), len(requests))
    assert len(recent) == len(kept)
    for charge in range(len(requests)):
        found = recent.find(f"c{charge}")
        assert (found is not None) == (charge in kept)
    for request in range(6):
        newest = next((charge for charge in reversed(kept) if requests[charge] == request), None)
        found = recent.find(f"r{request}")
        assert (found.charge_id if found else None) == (None if newest is None else f"c{newest}")


def test_a_smaller_limit_takes_effect_with_the_next_decision() -> None:
    """The limit is that of the configuration in use."""
    recent = Recent()
    for number in range(10):
        recent.remember(made(f"c{number}", using=settings(100)))
    recent.remember(made("last", using=settings(3)))
    assert [recent.find(name) is not None for name in ("c7", "c8", "c9", "last")] == [False, True, True, True]


def test_decisions_without_request_id_are_known_by_their_charge_alone() -> None:
    """An empty id is nobody's, nor is one too long to be an id."""
    recent = Recent()
    recent.remember(made("c0"))
    recent.remember(made("c1", "x" * 129))
    assert recent.find("") is recent.find("x" * 129) is None
    assert recent.find("c1") is not None


@pytest.mark.parametrize("shared", [True, False])
def test_snapshots_are_bounded_too(shared: bool) -> None:
    """Decisions on one snapshot cost it once; those on snapshots of their own drive the oldest out early."""
    recent, using = Recent(most_endpoints=100), settings(1000)
    members = tuple(Endpoint(str(number), "", 1.0) for number in range(10))
    one = Pool("main", "predicted_ttft", members)
    for number in range(50):
        recent.remember(
            made(f"c{number}", using=using, pool=one if shared else Pool("main", "predicted_ttft", members))
        )
    assert len(recent) == (50 if shared else 10)
    assert recent.find("c49") is not None

"""Who may be picked after a relay has lost engines."""

import pytest

from extproc.avoiding import hinted
from extproc.choose.fleet import Endpoint, Pool
from extproc.envoy.contract import Call

POOL = Pool(
    "p", "predicted_ttft", tuple(Endpoint(id=f"e{n}", destination=f"10.0.0.{n}:80", rate=1.0) for n in (1, 2, 3))
)


def call(avoid: str = "", subset: tuple[str, ...] | None = None) -> Call:
    """A request."""
    headers = {"x-warmpath-avoid": avoid} if avoid else {}
    return Call("POST", "/v1/completions", headers, subset=subset)


@pytest.mark.parametrize(
    ("avoid", "subset", "left"),
    [
        ("", None, None),
        ("", ("10.0.0.1:80",), {"10.0.0.1:80"}),
        ("10.0.0.1:80", None, {"10.0.0.2:80", "10.0.0.3:80"}),
        ("10.0.0.1:80,10.0.0.3:80", None, {"10.0.0.2:80"}),
        ("10.0.0.1:80", ("10.0.0.1:80", "10.0.0.2:80"), {"10.0.0.2:80"}),
        ("10.9.9.9:80", None, {"10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"}),
    ],
)
def test_lost_endpoints_are_left_out(avoid: str, subset: tuple[str, ...] | None, left: set[str] | None) -> None:
    """Of all members, or of those that the gateway hinted at."""
    assert hinted(call(avoid, subset), POOL) == left


@pytest.mark.parametrize("subset", [None, ("10.0.0.1:80",)])
def test_when_all_are_lost_any_may_be_picked(subset: tuple[str, ...] | None) -> None:
    """One of them may be back: a request that nobody takes helps no one."""
    lost = ",".join(each.destination for each in POOL.endpoints)
    assert hinted(call(lost, subset), POOL) == (None if subset is None else set(subset))

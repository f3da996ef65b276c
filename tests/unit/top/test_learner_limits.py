"""What a time limit that ended a request says of its endpoint."""

import pytest

from extproc.clock import ManualClock
from extproc.envoy.contract import Served
from extproc.gossip import Gossip
from extproc.learner import Learner
from extproc.state.memory import MemoryStore
from tests.unit.top.test_judging import RULES, Replica

METADATA: dict[str, str | float] = {"endpoint": "a", "streamed": 1.0, "kind": "chat"}


@pytest.mark.parametrize(
    ("stage", "state"),
    [("first_token", "open"), ("stall", "open"), ("headers", "closed"), ("request", "closed"), ("", "closed")],
)
async def test_standing_still_is_a_strike(stage: str, state: str) -> None:
    """No first token, or a stall, counts against whoever has the request; an answer that is long does not.

    Tries without headers are told by Envoy's own log of them, which is not asked here.
    """
    clock = ManualClock()
    one = Replica(MemoryStore(clock), clock)
    around = one.around
    learner = Learner(around, Gossip(around.store, around.knowledge, "r", 1000), one.metrics, one.judging)
    for number in range(RULES.strikes):
        charge, metadata = f"r-{number}", METADATA
        learner.observe(
            Served(charge_id=charge, pool="main", destination="a:1", status=200, stage=stage, metadata=metadata)
        )
        await one.judging.idle()
    assert one.endpoint().breaker == state

"""What a time limit that ended a request says of its endpoint."""

import msgspec
import pytest

from extproc.clock import ManualClock
from extproc.envoy.contract import Served
from extproc.gossip import Gossip
from extproc.learner import Learner
from extproc.state.memory import MemoryStore
from tests.unit.top.test_judging import RULES, Replica

METADATA: dict[str, str | float] = {"endpoint": "a", "streamed": 1.0, "kind": "chat"}


@pytest.mark.parametrize(
    ("stage", "sent_bytes", "state"),
    [
        ("first_token", 0, "open"),
        ("stall", 20_000, "open"),
        ("stall", 70_000, "closed"),
        ("headers", 0, "closed"),
        ("request", 0, "closed"),
        ("", 0, "closed"),
    ],
)
async def test_standing_still_is_a_strike(stage: str, sent_bytes: int, state: str) -> None:
    """No first token, or a stall, counts against whoever has the request; an answer that is long does not.

    Nor does a stall behind more than Envoy holds for a client (64 KiB): clients that do not read would open breakers.
    Tries without headers are told by Envoy's own log of them, which is not asked here.
    """
    clock = ManualClock()
    one = Replica(MemoryStore(clock), clock)
    around = one.around
    learner = Learner(around, Gossip(around.store, around.knowledge, "r", 1000), one.metrics, one.judging)
    for number in range(RULES.strikes):
        served = Served(charge_id=f"r-{number}", pool="main", destination="a:1", status=200, stage=stage)
        learner.observe(msgspec.structs.replace(served, response_bytes=sent_bytes, metadata=METADATA))
        await one.judging.idle()
    assert one.endpoint().breaker == state

"""Decisions get their limits: Envoy's as headers, the watched ones as metadata."""

import pytest

from extproc.config import Timeouts
from extproc.config_limits import TimeoutRule
from extproc.envoy.contract import Call, Decision
from extproc.limiting import Limiting, with_limits
from tests.unit.envoy.gateway import Ledger

TOLD: dict[str, str | float] = {"kind": "chat", "streamed": 1.0, "uncached_tokens": 4000.0}
STREAM = Decision("main", ("10.0.0.1:80",), "r-1", TOLD, model="m")
WHOLE = Decision("main", ("10.0.0.1:80",), "r-2", {**TOLD, "streamed": 0.0}, model="m")
PER_TRY, ALL_TRIES = "x-envoy-upstream-rq-per-try-timeout-ms", "x-envoy-upstream-rq-timeout-ms"


def test_limits_of_a_stream() -> None:
    """Silence before the headers is Envoy's; what shows in the body is watched, with time for uncached tokens."""
    timeouts = Timeouts(headers_s=1.5, first_token_s=5.0, first_token_ms_per_token=0.5, stall_s=3.0)
    limited = with_limits(STREAM, timeouts)
    assert limited.headers == {PER_TRY: "1500"}
    assert limited.metadata == {**TOLD, "model": "m", "first_token_s": 7.0, "stall_s": 3.0}
    assert (limited.limited, limited.total_s) == (True, 900.0)


def test_a_whole_answer_is_not_watched() -> None:
    """Only its whole time is limited."""
    limited = with_limits(WHOLE, Timeouts(headers_s=1.5, first_token_s=5.0, stall_s=3.0))
    assert (limited.headers, limited.limited, limited.total_s) == ({}, False, 900.0)
    assert limited.metadata == {**WHOLE.metadata, "model": "m"}


@pytest.mark.parametrize(("request_s", "told"), [(60.0, "60000"), (0.0, "0"), (0.0001, "1")])
def test_the_whole_time_is_told_where_a_rule_changes_it(request_s: float, told: str) -> None:
    """0 is no limit, and a limit never becomes none by rounding."""
    limited = with_limits(WHOLE, Timeouts(rules=[TimeoutRule(model="m", request_s=request_s)]))
    assert limited.headers == {ALL_TRIES: told}
    assert limited.total_s == request_s


def test_a_request_without_a_model_has_no_label() -> None:
    """What the client did not name is not made up."""
    limited = with_limits(Decision("main", metadata=TOLD), Timeouts(stall_s=3.0))
    assert "model" not in limited.metadata
    assert not limited.limited, "nobody could name it"


async def test_the_rest_is_the_other_deciders() -> None:
    """Decisions come from it, and go back to it."""
    ledger = Ledger(STREAM)
    limiting = Limiting(ledger, Timeouts(stall_s=3.0))
    decision = await limiting.decide(Call("POST", "/v1/chat/completions", {}))
    assert decision.metadata["stall_s"] == 3.0
    await limiting.served(decision, "10.0.0.1:80")
    assert ledger.told == [(decision, "10.0.0.1:80")]
    ledger.open[:] = [decision]
    await limiting.settle(decision, "10.0.0.1:80")
    assert ledger.settled == [(decision, "10.0.0.1:80")]

"""What a decision expected against what came of it, from the decision to the metrics page."""

import pytest

from extproc.choose.fleet import Endpoint
from extproc.envoy.contract import Served
from extproc.gossip import Gossip
from extproc.learner import Learner, expected
from extproc.telemetry.metrics import Metrics
from tests.unit.top.parts import surroundings

A, B = Endpoint("a", "10.0.0.1:80", 8000.0), Endpoint("b", "10.0.0.2:80", 8000.0)
METADATA: dict[str, str | float] = {
    "endpoint": "a",
    "prompt_bytes": 4000.0,
    "prompt_tokens": 1000.0,
    "uncached_tokens": 600.0,
    "predicted_ttft_ms": 250.0,
    "streamed": 1.0,
}


def served(metadata: dict[str, str | float] = METADATA, **changes: object) -> Served:
    """A request that `a` answered at the first try, changed in some fields."""
    fields: dict[str, object] = {
        "charge_id": "c1",
        "pool": "main",
        "destination": A.destination,
        "status": 200,
        "ttft_s": 0.5,
        "prompt_tokens": 1000,
        "cached_tokens": 320,
        "metadata": metadata,
    }
    return Served(**(fields | changes))  # type: ignore[arg-type]


def page(*finished: Served) -> str:
    """The metrics page after these requests."""
    around, metrics = surroundings(A, B), Metrics()
    learner = Learner(around, Gossip(around.store, around.knowledge, "r1", 1000), metrics)
    for each in finished:
        learner.observe(each)
    return metrics.page().decode()


def test_expectations_are_held_against_what_came() -> None:
    """400 cached tokens expected and 320 found of 1,000 is an error of 0.08; twice the expected time a ratio of 2."""
    shown = page(served())
    assert 'warmpath_cached_tokens_error_share_sum{pool="main"} 0.08' in shown
    assert 'warmpath_ttft_ratio_sum{pool="main"} 2.0' in shown


def test_the_time_of_an_answer_that_was_not_streamed_is_no_first_token() -> None:
    """Its first byte comes after the whole generation; its cached tokens count all the same."""
    shown = page(served(METADATA | {"streamed": 0.0}))
    assert 'warmpath_cached_tokens_error_share_count{pool="main"} 1.0' in shown
    assert "warmpath_ttft_ratio_count" not in shown


@pytest.mark.parametrize(
    "other",
    [
        served(destination=B.destination),
        served(attempts=2),
        served(status=500),
        served(METADATA | {"prompt_bytes": -1.0}),
        served(METADATA | {"prompt_bytes": 0.0}),
        served({"endpoint": "a", "streamed": 1.0}),
    ],
    ids=["another endpoint", "a later try", "an error", "unread", "no prompt", "no expectation"],
)
def test_what_was_expected_of_others_is_held_against_nobody(other: Served) -> None:
    """Only the pick's own first try, of a prompt that was read, can prove an expectation right or wrong."""
    shown = page(other)
    assert "warmpath_cached_tokens_error_share_count" not in shown
    assert "warmpath_ttft_ratio_count" not in shown


def test_expectations_of_the_decision_are_read_from_its_metadata() -> None:
    """Milliseconds to the first token, and cached tokens: the prompt less what is uncached of it."""
    assert expected(served(), "a") == (250.0, 400.0)
    assert expected(served(), "b") == (-1.0, -1.0)

"""What `warmpath check` warns of: allowed, and hardly meant."""

import pytest

from extproc import advice
from extproc.config_file import loads

BASE = 'models: {m: {pool: p}}\npools: {p: {endpoints: ["10.0.0.1:8000"], prefill_tokens_per_s: 1000}}\n'


def warnings(text: str) -> list[str]:
    """Warnings of a configuration with these sections."""
    return advice.warnings(loads(BASE + text))


def test_the_defaults_are_meant() -> None:
    """Whoever changes nothing is not warned."""
    assert warnings("") == []


def test_a_whole_request_needs_time_for_its_answer() -> None:
    """The first token by its limit, or else by the prefill speed, and then 4,096 tokens at 20 ms: 81.92 s."""
    [told] = warnings("timeouts: {request_s: 90}")
    assert told.startswith("models.m: request_s is 90")
    assert "8.2 s (pools.p.prefill_tokens_per_s)" in told
    assert "4096 tokens 82 s (20 ms a token, assumed)" in told
    assert warnings("timeouts: {request_s: 90.2}") == []
    [told] = warnings("timeouts: {request_s: 90.2, first_token_s: 1, first_token_ms_per_token: 1}")
    assert "9.2 s (timeouts.first_token_s)" in told
    assert warnings("timeouts: {request_s: 0}") == []


def test_a_rule_is_judged_by_the_model_that_it_limits() -> None:
    """The place is the model's, as a client sees it."""
    [told] = warnings("timeouts: {rules: [{model: m, request_s: 30}]}")
    assert told.startswith("models.m: request_s is 30")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("timeouts: {stall_s: 1.9}", "timeouts.stall_s: 1.9 s"),
        ("timeouts: {rules: [{model: m, stall_s: 0.5}]}", "timeouts.rules[0].stall_s: 0.5 s"),
        ("timeouts: {first_token_s: 300}", "timeouts.first_token_s: 300 is not below stream_idle_s"),
        ("timeouts: {rules: [{stall_s: 400}]}", "timeouts.stall_s: 400 is not below stream_idle_s"),
        ("timeouts: {headers_s: 400}", "timeouts.headers_s: 3 tries of 400 s"),
        ("timeouts: {headers_s: 5}\nretries: {max: 0}", "timeouts.headers_s: retries.max is 0"),
        ("timeouts: {headers_s: 5, first_token_s: 5}", "timeouts.headers_s: 5 is not below first_token_s"),
    ],
)
def test_each_oddity_is_told_with_its_place(text: str, place: str) -> None:
    """One warning, that begins with where to look."""
    [told] = warnings(text)
    assert told.startswith(place)


@pytest.mark.parametrize(
    "text", ["timeouts: {stall_s: 2}", "timeouts: {first_token_s: 299, headers_s: 10}", "timeouts: {stream_idle_s: 0}"]
)
def test_what_makes_sense_is_not_warned_of(text: str) -> None:
    """At the very limit, and where the other limit is off."""
    assert warnings(text) == []

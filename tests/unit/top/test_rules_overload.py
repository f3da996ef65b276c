"""What holds for each pool when it is saturated, and which fallbacks a configuration may have."""

import msgspec
import pytest

from extproc.config import Config, Timeouts
from extproc.rules_overload import fallbacks_lead_on, rules_in, waits_fit


def config(overload: str, **pools: str) -> Config:
    """Models and pools `a`, `b` and `c`; settings as JSON."""
    models = ",".join(f'"{name}": {{"pool": "{name}"}}' for name in "abc")
    own = ",".join(f'"{name}": {{"endpoints": ["x:1"], "overload": {pools.get(name, "{}")}}}' for name in "abc")
    text = f'{{"models": {{{models}}}, "pools": {{{own}}}, "overload": {overload}}}'
    return msgspec.json.decode(text, type=Config)


def test_a_pool_has_its_own_rules_and_the_sections_for_the_rest() -> None:
    """Key by key; `queue` and `saturation` each as a whole."""
    made = config(
        '{"action": "queue", "queue": {"max_wait_s": 7, "max_requests": 3}}',
        a='{"action": "reject"}',
        b='{"queue": {"max_wait_s": 9}}',
    )
    a, b, c = (rules_in(made, name) for name in "abc")
    assert (a.action, a.queue.max_wait_s) == ("reject", 7)
    assert (b.action, b.queue.max_wait_s, b.queue.max_requests) == ("queue", 9, 1000)
    assert (c.action, c.queue.max_requests) == ("queue", 3)


def test_the_pool_that_others_fall_back_to_takes_all() -> None:
    """Unless it says otherwise itself."""
    section = '{"action": "fallback", "fallback": "c"}'
    assert [rules_in(config(section), name).action for name in "abc"] == ["fallback", "fallback", "pass"]
    assert rules_in(config(section, c='{"action": "reject"}'), "c").action == "reject"
    assert not list(fallbacks_lead_on(config(section)))


@pytest.mark.parametrize(
    ("section", "pools", "path", "words"),
    [
        ('{"action": "fallback"}', {}, "$.overload.fallback", "is missing"),
        ('{"action": "fallback", "fallback": "z"}', {}, "$.overload.fallback", "no model `z`"),
        ('{"fallback": "z"}', {}, "$.overload.fallback", "no model `z`"),
        ("{}", {"a": '{"action": "fallback"}'}, "$.pools.a.overload.fallback", "is missing"),
        ("{}", {"a": '{"action": "fallback", "fallback": "a"}'}, "$.pools.a.overload.fallback", "come back"),
        (
            '{"action": "fallback", "fallback": "b"}',
            {"b": '{"action": "fallback", "fallback": "c"}', "c": '{"action": "fallback", "fallback": "a"}'},
            "$.overload.fallback",
            "pool `a` would come back",
        ),
    ],
)
def test_fallbacks_that_lead_nowhere_are_refused(section: str, pools: dict[str, str], path: str, words: str) -> None:
    """Nobody to answer, or a circle."""
    mistake = next(iter(fallbacks_lead_on(config(section, **pools))))
    assert mistake.path == path
    assert words in mistake.text


def test_fallbacks_may_be_chained() -> None:
    """From one model to the next smaller one."""
    chain = {"a": '{"action": "fallback", "fallback": "b"}', "b": '{"action": "fallback", "fallback": "c"}'}
    assert not list(fallbacks_lead_on(config("{}", **chain)))


def test_nobody_waits_longer_than_a_request_may_take() -> None:
    """Envoy would end it while it waits; only where requests wait at all, and where there is a limit."""

    def mistakes(overload: str, request_s: float) -> list[str]:
        made = msgspec.structs.replace(config(overload), timeouts=Timeouts(request_s=request_s))
        return [mistake.path for mistake in waits_fit(made)]

    waiting = '{"action": "queue", "queue": {"max_wait_s": 60}}'
    assert mistakes(waiting, 60)[0] == "$.overload.queue.max_wait_s"
    assert not mistakes(waiting, 61)
    assert not mistakes(waiting, 0)
    assert not mistakes('{"action": "reject", "queue": {"max_wait_s": 60}}', 60)

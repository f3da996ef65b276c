"""Arithmetic of limits: what may be taken, what comes back, when, and how it is told."""

import math
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config_quotas import RateLimit
from extproc.govern import quota_text, quotas
from extproc.govern.quota_rules import Rules, limits_of
from extproc.govern.quotas import Bucket, Draw, Taken

MINUTE = Draw("s", "b", "tokens", "minute", 600.0, 10.0, 100.0)
MONTH = Draw("s", "c", "tokens", "month", 600.0, 0.0, 100.0)
moments = st.integers(0, 4_000_000_000)


def at(year: int, month: int, day: int, second: int = 0) -> float:
    """Seconds since the epoch."""
    return datetime(year, month, day, tzinfo=UTC).timestamp() + second


@given(moment=moments)
def test_windows_follow_each_other_without_a_gap(moment: int) -> None:
    """Every moment lies in one day and one month, and the end of a window is the start of the next."""
    for per in ("day", "month"):
        start, end = quotas.window_start(per, moment), quotas.window_end(per, moment)
        assert start <= moment < end
        assert quotas.window_start(per, end) == end
        assert quotas.window_start(per, end - 1) == start


@pytest.mark.parametrize(
    ("moment", "end"),
    [
        (at(2028, 2, 29), at(2028, 3, 1)),
        (at(2026, 12, 31, 86_399), at(2027, 1, 1)),
        (at(2100, 2, 28), at(2100, 3, 1)),
    ],
)
def test_months_end_as_in_the_calendar(moment: float, end: float) -> None:
    """Leap days, the turn of the year, and a century that is no leap year."""
    assert quotas.window_end("month", moment) == end


def test_a_draw_waits_for_what_is_over_its_limit() -> None:
    """By the minute as long as the excess drains; by the month until its end; a larger one than all for ever."""
    now = at(2026, 5, 31)
    assert quotas.wait_s(MINUTE, 500.0, now) == 0.0
    assert quotas.wait_s(MINUTE, 550.0, now) == 5.0
    assert quotas.wait_s(MONTH, 550.0, now) == 86_400.0
    assert math.isinf(quotas.wait_s(msgspec.structs.replace(MINUTE, amount=601.0), 0.0, now))


def test_a_bucket_knows_when_it_was_empty() -> None:
    """That moment tells what was taken before and has come back; a clock set back lets nothing drain."""
    assert quotas.standing(None, MINUTE, 50.0) == Bucket(0.0, 50.0, 50.0)
    assert quotas.standing(Bucket(100.0, 50.0, 40.0), MINUTE, 55.0) == Bucket(50.0, 55.0, 40.0)
    assert quotas.standing(Bucket(100.0, 50.0, 40.0), MINUTE, 60.0) == Bucket(0.0, 60.0, 60.0)
    assert quotas.standing(Bucket(100.0, 50.0, 40.0), MINUTE, 30.0) == Bucket(100.0, 30.0, 40.0)


def test_a_share_lets_one_request_pass() -> None:
    """A limit smaller than the number of processes is not one of none for each."""
    requests = msgspec.structs.replace(MINUTE, unit="requests", most=4.0, amount=1.0)
    assert quotas.alone(requests, 0.5).most == 2.0
    assert quotas.alone(requests, 0.1).most == 1.0
    assert quotas.alone(MINUTE, 0.1).most == 60.0
    assert quotas.alone(MINUTE, 0.1).rate == 1.0


def test_of_each_kind_of_rule_the_most_exact_one_applies() -> None:
    """A name before `*`, a tenant's before a model's; rules for all together apply beside those for each."""
    rules = [
        RateLimit(tenant=tenant, model=model, requests_per_day=1)
        for tenant in (None, "*", "acme")
        for model in (None, "*", "big")
    ]
    found = Rules(rules)
    told = [(each.rule.tenant, each.rule.model) for each in found.of("acme", "big")]
    assert told == [(None, None), (None, "big"), ("acme", None), ("acme", "big")]
    told = [(each.rule.tenant, each.rule.model) for each in found.of("other", "big")]
    assert told == [(None, None), (None, "big"), ("*", None), ("*", "big")]
    assert [(each.tenant, each.model) for each in found.of("other", "small")][2:] == [
        ("other", None),
        ("other", "small"),
    ]
    assert [each.rule.tenant for each in found.of("acme", None)] == [None, "acme"]
    without = Rules([each for each in rules if (each.tenant, each.model) != ("acme", "big")])
    assert [(each.rule.tenant, each.rule.model) for each in without.of("acme", "big")][3] == ("acme", "*")


def test_a_rule_sets_the_limits_that_it_names() -> None:
    """What may be used at once is the minute's rate for `burst_s`."""
    rule = RateLimit(requests_per_minute=120, burst_s=10, tokens_per_month=5)
    assert [(each.name, each.most, each.rate) for each in limits_of(rule)] == [
        ("requests_per_minute", 20.0, 2.0),
        ("tokens_per_month", 5.0, 0.0),
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"), (0.0201, "21ms"), (0.9999, "1s"), (1.0, "1s"), (1.2, "2s"), (60.0, "1m0s"), (360.0, "6m0s"),
        (3600.0, "1h0m0s"), (93_784.0, "26h3m4s"), (math.inf, "9600h0m0s"),
    ],
)  # fmt: skip
def test_times_are_told_as_openai_does(seconds: float, text: str) -> None:
    """`1s` and `6m0s` are OpenAI's own examples."""
    assert quota_text.duration(seconds) == text


def test_headers_tell_the_limit_that_is_nearest_to_its_end() -> None:
    """Of requests and of tokens each; what is owed shows as nothing left."""
    draws = [
        MINUTE,
        msgspec.structs.replace(MONTH, most=1000.0),
        msgspec.structs.replace(MINUTE, unit="requests", most=5),
    ]
    told = quota_text.headers(draws, Taken(True, 0.0, [100.5, 900.0, 7.0]))
    assert told["ratelimit_limit_tokens"] == "1000"
    assert told["ratelimit_remaining_tokens"] == "100"
    assert told["ratelimit_reset_tokens"] == "744h0m0s"
    assert (told["ratelimit_limit_requests"], told["ratelimit_remaining_requests"]) == ("5", "0")
    assert set(told) == set(quota_text.HEADER_KEYS)


amounts = st.floats(0.5, 1e12)
draws = st.builds(
    Draw,
    shard=st.just("quota/a"),
    bucket=st.text("0123456789abcdef", min_size=1),
    unit=st.sampled_from(("requests", "tokens")),
    per=st.just("minute"),
    most=st.just(0.0),
    rate=amounts,
    amount=amounts,
)


@given(draws=st.lists(draws), at=st.floats(0, 1e11), local=st.booleans())
def test_what_was_taken_comes_back_as_it_was_carried(draws: list[Draw], at: float, local: bool) -> None:
    """To the last bit: a bucket compares the moment with its own."""
    back = quota_text.read_carried(quota_text.carried(draws, Taken(True, at, [0.0] * len(draws), local)))
    assert (back.at, back.local, list(back.draws)) == (at, local, draws)


@given(text=st.one_of(st.text(), st.from_regex(r"\A[0-9.]+ [01] [a-z|0-9.]+\Z")))
def test_what_cannot_be_read_is_told(text: str) -> None:
    """A text of anybody else is refused with ValueError, and nothing else happens."""
    try:
        read = quota_text.read_carried(text)
    except ValueError:
        return
    assert all(math.isfinite(each.amount) and each.bucket for each in read.draws)

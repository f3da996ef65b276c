"""Limits of use and idempotency keys over two replicas: exact at once, by real usage, told, and without Redis."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.acceptance.governance.tenants import Tenants, tenants
from tests.acceptance.journal import Journal
from tests.acceptance.local import Answer
from tests.waiting import until, until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT = 10
ALONE = 20
BUDGET = 5000
DAILY = 500
NAMES = ("one", "two", "budget", "little", "daily", "alone", "free")
RULES = [
    # A minute gives one back: none while a test lasts.
    {"tenant": "*", "requests_per_minute": 1, "burst_s": 60 * LIMIT},
    {"tenant": "alone", "requests_per_minute": 1, "burst_s": 60 * ALONE},
    {"tenant": "budget", "tokens_per_month": BUDGET},
    {"tenant": "little", "tokens_per_day": 20},
    {"tenant": "daily", "tokens_per_day": DAILY},
    {"tenant": "free", "requests_per_minute": 1_000_000},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shop(journal: Journal, folder: Path) -> AsyncIterator[Tenants]:
    """The site."""
    async with tenants(journal, folder, NAMES, {"rate_limits": {"rules": RULES}}) as running:
        yield running


def refused(answers: list[Answer]) -> list[Answer]:
    """Those that a limit refused; all others were served."""
    assert {each.status for each in answers} <= {200, 429}, {each.headers.get("x-warmpath-reason") for each in answers}
    return [each for each in answers if each.status == 429]


async def test_exactly_the_limit_passes_for_each_tenant_over_all_replicas(shop: Tenants) -> None:
    """Two tenants ask three times their limit at once: each gets its limit, and a refusal says what to do."""
    both = await asyncio.gather(shop.at_once("one", 3 * LIMIT), shop.at_once("two", 3 * LIMIT))
    for answers in both:
        assert len(refused(answers)) == 2 * LIMIT
        for each in refused(answers):
            assert each.headers["x-warmpath-reason"] == "rate_limited"
            assert (each.json["error"]["type"], each.json["error"]["code"]) == (
                "rate_limit_error",
                "rate_limit_exceeded",
            )
            assert 1 <= int(each.headers["retry-after"]) <= 60
            assert each.headers["x-ratelimit-limit-requests"] == str(LIMIT)
            assert each.headers["x-ratelimit-remaining-requests"] == "0"
            assert re.fullmatch(r"9m[0-9]{1,2}s|10m0s", each.headers["x-ratelimit-reset-requests"])
            assert "x-ratelimit-limit-tokens" not in each.headers
        told = {each.headers["x-ratelimit-remaining-requests"] for each in answers if each.status == 200}
        assert told == {str(left) for left in range(LIMIT)}
    for replica in shop.here.replicas:
        assert await replica.metric("warmpath_quota_refused_total", limit="requests_per_minute", tenant="*") > 0


async def test_a_budget_is_charged_with_what_engines_report(shop: Tenants) -> None:
    """Estimates are taken before, real usage stays: what the store has is the sum of what answers said."""
    before = shop.levels()
    answers = [await shop.ask("budget", max_tokens=each) for each in (1, 30, 7)]
    real = sum(each.json["usage"]["total_tokens"] for each in answers)
    assert all(each.headers["x-ratelimit-limit-tokens"] == str(BUDGET) for each in answers)
    assert all("x-ratelimit-limit-requests" not in each.headers for each in answers)
    assert all(re.fullmatch(r"\d+h\d{1,2}m\d{1,2}s", each.headers["x-ratelimit-reset-tokens"]) for each in answers)
    await until(lambda: real in shop.levels())
    assert real not in before


async def test_streams_without_usage_are_charged_by_what_was_sent(shop: Tenants) -> None:
    """A client that does not ask for usage pays all the same: the access log tells."""
    reported = (await shop.ask("budget", max_tokens=30)).json["usage"]["total_tokens"]
    before = max(shop.levels())
    answer = await shop.ask("budget", max_tokens=30, stream=True)
    assert answer.status == 200
    await until(lambda: before < max(shop.levels()) <= before + 2 * reported)


async def test_a_days_budget_is_used_up_and_then_refuses_until_midnight(shop: Tenants) -> None:
    """One after the other until it is spent, by what engines reported; the last one may need more than was left."""
    spent, answer = [0], await shop.ask("daily", max_tokens=30)
    while answer.status == 200:
        spent.append(answer.json["usage"]["total_tokens"])
        await until(lambda: sum(spent) in shop.levels())
        answer = await shop.ask("daily", max_tokens=30)
    assert DAILY - 2 * max(spent) <= sum(spent) < DAILY + max(spent)
    assert answer.headers["x-warmpath-reason"] == "rate_limited"
    assert 0 < int(answer.headers["retry-after"]) <= 86_400
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) == max(0, DAILY - sum(spent))


async def test_a_request_larger_than_a_limit_is_told_that_no_wait_helps(shop: Tenants) -> None:
    """It would be refused for ever: the answer says so, in words and to SDKs that would try again."""
    answer = await shop.ask("little")
    assert (answer.status, answer.headers["x-should-retry"]) == (429, "false")
    assert "retry-after" not in answer.headers
    assert "tokens_per_day allows 20" in answer.json["error"]["message"]


async def test_what_no_engine_served_is_given_back(shop: Tenants) -> None:
    """A request whose engine refuses it costs no tokens."""
    before = shop.levels()
    answer = await shop.ask("budget", max_tokens=-5)
    assert answer.status == 400
    await until(lambda: shop.levels() == pytest.approx(before, abs=5.0))


async def test_a_key_runs_once_at_a_time_over_all_replicas(shop: Tenants) -> None:
    """While the first streams, others with its key are answered 409 by either replica; another tenant's are not."""
    async with shop.streaming("free", "order-7"):
        again = await asyncio.gather(*(shop.ask("free", "order-7") for _ in range(8)))
        assert {each.status for each in again} == {409}
        assert {each.headers["x-warmpath-reason"] for each in again} == {"duplicate_request"}
        assert {each.headers["x-should-retry"] for each in again} == {"false"}
        assert (await shop.ask("free", "order-8")).status == 200
        assert (await shop.ask("budget", "order-7")).status == 200
    for replica in shop.here.replicas:
        assert await replica.metric("warmpath_idempotency_duplicates_total") > 0


async def test_a_client_that_leaves_frees_its_key(shop: Tenants) -> None:
    """The end of the request frees its key, however it came about."""
    async with shop.streaming("free", "order-9") as answer:
        assert (await shop.ask("free", "order-9")).status == 409
        answer.close()

        async def free() -> bool:
            return (await shop.ask("free", "order-9")).status == 200

        await until_async(free)


async def test_each_worker_allows_its_share_without_the_store(shop: Tenants) -> None:
    """With Redis frozen limits hold on: the two workers allow half each, and decide at once."""
    shop.here.store.freeze()
    try:
        answers = [answer for _ in range(5) for answer in await shop.at_once("alone", ALONE)]
        assert len(answers) - len(refused(answers)) == ALONE
        async with shop.streaming("free", "order-10"):
            # Only the worker that has the key knows it.
            statuses = {each.status for each in await asyncio.gather(*(shop.ask("free", "order-10") for _ in range(6)))}
        assert statuses <= {200, 409}
    finally:
        shop.here.store.thaw()
    for replica in shop.here.replicas:
        assert await replica.metric("warmpath_quota_local_total") > 0
    await shop.here.well()

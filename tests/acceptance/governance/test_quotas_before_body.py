"""Limits before a body is read: Envoy asks the workers' rate-limit service; and Envoy's own bucket before all else."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from envoy.service.ratelimit.v3 import rls_pb2 as pb

from extproc.envoy.rate_limit import SERVICE
from tests.acceptance.governance.tenants import Tenants, tenants
from tests.acceptance.journal import Journal
from tests.acceptance.local import ask
from tests.ports import free_port
from tests.unit.envoy.gateway import connected
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT = 6
RULES = [
    {"tenant": "*", "requests_per_minute": 1, "burst_s": 60 * LIMIT},
    {"tenant": "both", "model": "sim", "tokens_per_day": 100_000},
    {"tenant": "free", "requests_per_minute": 1_000_000},
    {"tenant": "poor", "requests_per_day": 50},
    {"tenant": "poor", "model": "sim", "tokens_per_day": 5},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shop(journal: Journal, folder: Path) -> AsyncIterator[Tenants]:
    """The site; its second Envoy passes on two requests a second."""
    sections = {"rate_limits": {"rules": RULES, "before_body": True}}
    listens = [f"gateway.{name}=127.0.0.1:{free_port()}" for name in ("listen", "admin")]
    envoys = ((), (*listens, "rate_limits.local_requests_per_s=2"))
    async with tenants(journal, folder, ("one", "both", "free", "foreign", "poor"), sections, envoys) as running:
        yield running


async def decisions(shop: Tenants) -> float:
    """Decisions and refusals of all workers so far."""
    return await shop.here.metric("warmpath_decisions_total") + await shop.here.metric("warmpath_refusals_total")


async def test_requests_are_counted_before_their_body_and_once(shop: Tenants) -> None:
    """Exactly the limit passes over both replicas; what is refused never reaches a decision, and answers look alike."""
    before = await decisions(shop)
    answers = await shop.at_once("one", 3 * LIMIT)
    refused = [each for each in answers if each.status == 429]
    assert (len(refused), {each.status for each in answers}) == (2 * LIMIT, {200, 429})
    for each in refused:
        assert each.headers["x-warmpath-reason"] == "rate_limited"
        assert each.headers["content-type"] == "application/json"
        assert each.json["error"]["type"] == "rate_limit_error"
        assert 1 <= int(each.headers["retry-after"]) <= 60
        assert "x-envoy-ratelimited" not in each.headers
    told = {each.headers["x-ratelimit-remaining-requests"] for each in answers if each.status == 200}
    assert told == {str(left) for left in range(LIMIT)}
    assert await decisions(shop) == before + LIMIT


async def test_tokens_are_still_taken_at_the_decision(shop: Tenants) -> None:
    """An answer tells both: requests by the service before the body, tokens by the decision."""
    answer = await shop.ask("both")
    assert answer.headers["x-ratelimit-remaining-requests"] == str(LIMIT - 1)
    assert 0 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 100_000
    real = answer.json["usage"]["total_tokens"]
    await until(lambda: real in shop.levels())


async def test_what_another_limit_refuses_later_takes_nothing_of_those_before_the_body(shop: Tenants) -> None:
    """The decision refuses for want of tokens, or knows no such model: the request that was taken comes back."""
    before = shop.levels()
    refused = [*await shop.at_once("poor", 4), await shop.ask("poor", model="none such")]
    assert [each.status for each in refused] == [429] * 4 + [404]
    assert {each.headers["x-ratelimit-remaining-requests"] for each in refused[:4]} <= {"49", "48", "47", "46"}

    def given_back() -> bool:
        return [each for each in shop.levels() if each > 0.0] == [each for each in before if each > 0.0]

    await until(given_back)


async def test_reading_takes_nothing(shop: Tenants) -> None:
    """Lists of models are free, whatever is left."""
    headers = {"authorization": "Bearer key-of-both"}
    for _ in range(2 * LIMIT):
        answer = await ask(shop.here.http, f"{shop.here.front.url}/v1/models", None, headers, "GET")
        assert answer.status == 200


async def test_each_envoy_has_a_bucket_of_its_own_before_all_else(shop: Tenants) -> None:
    """What is over it is answered by Envoy itself, in our form, before keys are looked at."""
    before = await decisions(shop)
    answers = await asyncio.gather(*(shop.ask("free", front=1) for _ in range(20)))
    refused = [each for each in answers if each.status == 429]
    assert len(refused) >= 10
    assert {each.headers["x-warmpath-reason"] for each in refused} == {"rate_limited"}
    assert {each.headers["retry-after"] for each in refused} == {"1"}
    assert {each.json["error"]["code"] for each in refused} == {"rate_limit_exceeded"}
    assert await decisions(shop) == before + 20 - len(refused)


async def test_other_gateways_may_ask_for_models_and_for_several_requests(shop: Tenants) -> None:
    """The service alone: a descriptor's `hits_addend` counts, 0 looks only, and all replicas share what is used."""
    codes = []
    for replica, hits in zip(shop.here.replicas * 3, (4, 0, 3, 2, 0, 1), strict=True):
        request = pb.RateLimitRequest(domain="theirs")
        descriptor = request.descriptors.add()
        for key, value in (("tenant", "foreign"), ("model", "sim"), ("path", "/v1/chat/completions")):
            descriptor.entries.add(key=key, value=value)
        descriptor.hits_addend.value = hits
        async with connected(replica.worker_addresses()[0]) as channel:
            call = channel.unary_unary(f"/{SERVICE}/ShouldRateLimit")
            answer = pb.RateLimitResponse.FromString(await call(request.SerializeToString()))
        assert [each.code for each in answer.statuses] == [answer.overall_code]
        headers = {each.key: each.value for each in answer.response_headers_to_add}
        codes.append((answer.overall_code, headers["x-ratelimit-remaining-requests"]))
    ok, over = pb.RateLimitResponse.OK, pb.RateLimitResponse.OVER_LIMIT
    assert codes == [(ok, "2"), (ok, "2"), (over, "2"), (ok, "0"), (ok, "0"), (over, "0")]

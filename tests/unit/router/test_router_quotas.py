"""Limits of use on the path of a decision: taken once, told, undone when it comes to nothing; keys freed at its end."""

import json

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from extproc.choose.fleet import Fleet, Pool
from extproc.config import Model, RateLimits
from extproc.config_quotas import RateLimit
from extproc.envoy.contract import Call
from extproc.envoy.rate_limit import Asked as Ahead
from extproc.errors import DuplicateRequestError, NoEndpointError, RateLimitedError
from extproc.quota_usage import CARRIED
from extproc.quotas import Quotas
from extproc.telemetry.families import Families
from extproc.telemetry.quota_metrics import QuotaMetrics
from tests.unit.router.parts import Bench

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "How are you?"}]}).encode()
PLAIN = Call("POST", "/v1/chat/completions", {}, BODY)
KEYED = Call("POST", "/v1/chat/completions", {"idempotency-key": "order 7"}, BODY)


@pytest.fixture
def bench() -> Bench:
    """A router whose tenants have three requests a day."""
    made = Bench()
    rules = [RateLimit(tenant="*", requests_per_day=3)]
    made.around.config = msgspec.structs.replace(made.around.config, rate_limits=RateLimits(rules=rules))
    made.around.meter = Quotas(made.around, QuotaMetrics(Families(CollectorRegistry())), made.clock)
    return made


async def test_a_decision_tells_what_is_left_and_what_it_took(bench: Bench) -> None:
    """The client by the metadata that becomes headers, any worker by what it takes to correct."""
    left = []
    for _ in range(3):
        metadata = (await bench.router.decide(PLAIN)).metadata
        left.append(metadata["ratelimit_remaining_requests"])
        assert CARRIED in metadata
    assert left == ["2", "1", "0"]
    with pytest.raises(RateLimitedError):
        await bench.router.decide(PLAIN)


async def test_a_decision_that_fails_takes_nothing_and_keeps_no_key(bench: Bench) -> None:
    """A pool without endpoints uses nothing up, however often it is asked."""
    fleet = bench.around.fleet
    bench.around.fleet = Fleet({"main": Pool("main", "predicted_ttft", ())}, {"m": "main"}, "main")
    for _ in range(4):
        with pytest.raises(NoEndpointError):
            await bench.router.decide(KEYED)
        assert isinstance(bench.around.meter, Quotas)
        await bench.around.meter.close()
    bench.around.fleet = fleet
    assert (await bench.router.decide(KEYED)).metadata["ratelimit_remaining_requests"] == "2"


async def test_a_key_is_free_once_its_decision_is_settled(bench: Bench) -> None:
    """The end of the stream settles it, whatever ended it."""
    decision = await bench.router.decide(KEYED)
    with pytest.raises(DuplicateRequestError):
        await bench.router.decide(KEYED)
    await bench.router.settle(decision)
    assert isinstance(bench.around.meter, Quotas)
    await bench.around.meter.close()
    assert (await bench.router.decide(KEYED)).metadata["ratelimit_remaining_requests"] == "1"


async def test_nobody_is_asked_where_there_is_nothing_to_take(bench: Bench) -> None:
    """Without rules and without a key a decision is as it was."""
    bench.around.config = msgspec.structs.replace(bench.around.config, rate_limits=RateLimits())
    assert CARRIED not in (await bench.router.decide(PLAIN)).metadata


async def test_a_models_limit_counts_all_its_names(bench: Bench) -> None:
    """An alias is no way around it, nor a budget of its own; also before bodies are read."""
    around = bench.around
    models = {"m": Model(pool="main", aliases=["gpt"])}
    rules = [RateLimit(model="*", requests_per_day=3)]
    around.config = msgspec.structs.replace(around.config, models=models, rate_limits=RateLimits(rules=rules))
    around.fleet = msgspec.structs.replace(around.fleet, aliases={"gpt": "m"})
    aliased = Call("POST", PLAIN.path, {}, BODY.replace(b'"m"', b'"gpt"'))
    left = [
        (await bench.router.decide(call)).metadata["ratelimit_remaining_requests"] for call in (PLAIN, aliased, PLAIN)
    ]
    assert left == ["2", "1", "0"]
    with pytest.raises(RateLimitedError):
        await bench.router.decide(aliased)
    assert isinstance(around.meter, Quotas)
    for name in ("m", "gpt"):
        with pytest.raises(RateLimitedError):
            await around.meter.ahead([Ahead("", name, 1.0)])

"""A worker's part in limits: estimates before, real usage after, nothing kept of what came to nothing, and keys."""

import asyncio
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from extproc.choose.fleet import Endpoint
from extproc.clock import ManualClock
from extproc.deciding import Asked
from extproc.envoy.contract import Call, Decision, Served
from extproc.envoy.rate_limit import Asked as Ahead
from extproc.errors import DuplicateRequestError, RateLimitedError
from extproc.govern.quotas import Take
from extproc.quota_limits import bounds_of
from extproc.quota_usage import CARRIED, Used, used
from extproc.quotas import Quotas
from extproc.request.model import Request, RouteKind
from extproc.surroundings import Held, Surroundings
from extproc.telemetry.families import Families
from extproc.telemetry.quota_metrics import QuotaMetrics
from tests.unit.top.parts import config, surroundings
from tests.waiting import until_async

CALL = Call("POST", "/v1/chat/completions", {})
KEYED = Call("POST", "/v1/chat/completions", {"idempotency-key": "order 7"})
RULE = {"tenant": "*", "requests_per_minute": 2, "tokens_per_day": 1000}


class Desk:
    """Quotas of one worker, with what they touch at hand."""

    def __init__(self, *rules: dict[str, Any], **limits: Any) -> None:
        settings = config(rate_limits={"rules": rules or [RULE], **limits}, gateway={"sidecar": {"workers": 1}})
        self.around: Surroundings = surroundings(Endpoint("a", "10.0.0.1:80", 8000.0), settings=settings)
        self.registry = CollectorRegistry()
        self.quotas = Quotas(self.around, QuotaMetrics(Families(self.registry)), ManualClock())

    async def begin(self, tenant: str = "acme", call: Call = CALL, **request: Any) -> Held:
        """A request of 400 bytes, 100 tokens at the prior of four bytes each, and 50 of output at most."""
        asked = Request(kind=RouteKind.CHAT, model="m", tenant=tenant, max_tokens=50)
        asked = msgspec.structs.replace(asked, **request)
        return await self.quotas.begin(call, Asked(asked, (), 400.0), self.around.fleet.pools["main"])

    async def level(self, limit: str, tenant: str = "acme") -> float:
        """What is in use of a limit."""
        bounds = bounds_of(self.around.config, self.quotas._rules, tenant, "m")
        draw = next(each.draw for each in bounds if each.limit == limit)
        return (await self.around.store.take(Take([draw]))).levels[0]

    def served(self, held: Held, **fields: Any) -> Served:
        """The answer's entry in the access log, with what the decision carries."""
        decision = self.quotas.marked(Decision("main", (), "r1-1", {"prompt_tokens": 100.0, "kind": "chat"}), held)
        whole: dict[str, Any] = {"status": 200, "destination": "10.0.0.1:80", "metadata": decision.metadata}
        return Served(**{"charge_id": "r1-1", "pool": "main", **whole, **fields})

    def shown(self, sample: str) -> bool:
        """Whether the metrics page has this line."""
        return sample in generate_latest(self.registry).decode().splitlines()


async def test_an_estimate_is_taken_and_real_usage_stays() -> None:
    """Prompt by its bytes and the output expected, at most max_tokens; then what the engine reported."""
    desk = Desk()
    held = await desk.begin()
    assert await desk.level("tokens_per_day") == 150.0
    desk.quotas.answered(desk.served(held, prompt_tokens=120, output_tokens=7), -1.0)
    await desk.quotas.close()
    assert (await desk.level("tokens_per_day"), await desk.level("requests_per_minute")) == (127.0, 1.0)
    assert desk.shown('warmpath_quota_corrected_tokens_total{way="less"} 23.0')
    assert desk.shown('warmpath_quota_taken_total{unit="tokens"} 150.0')


@pytest.mark.parametrize(
    ("entry", "counted", "expected"),
    [
        ({"status": 200, "prompt_tokens": 120, "output_tokens": 7}, -1.0, Used(True, 127.0)),
        ({"status": 200, "prompt_tokens": 120}, -1.0, Used(True, 120.0)),
        ({"status": 200}, 30.0, Used(True, 130.0)),
        ({"status": 200}, -1.0, Used(True, -1.0)),
        ({"status": 400}, -1.0, Used(True, 0.0)),
        ({"status": 429}, -1.0, Used(False, 0.0)),
        ({"status": 503}, -1.0, Used(False, 0.0)),
        ({"status": 0, "flags": ("UF",)}, -1.0, Used(False, 0.0)),
        ({"status": 0, "flags": ("DC",)}, -1.0, Used(True, 100.0)),
        ({"status": 0, "flags": ("DC",), "destination": ""}, -1.0, Used(True, 0.0)),
    ],
)
def test_what_a_request_used_is_told_by_its_end(entry: dict[str, Any], counted: float, expected: Used) -> None:
    """Served ones cost what they used; the engine's refusal of a prompt counts as a request, its failure as nothing."""
    whole = {"destination": "10.0.0.1:80", "metadata": {"prompt_tokens": 100.0}, **entry}
    assert used(Served(**whole), counted) == expected


async def test_a_failed_request_gives_all_back() -> None:
    """Whether the engine failed it or it never got so far."""
    desk = Desk()
    held = await desk.begin()
    desk.quotas.answered(desk.served(held, status=503), -1.0)
    await desk.quotas.close()
    await desk.quotas.undo(await desk.begin())
    assert (await desk.level("tokens_per_day"), await desk.level("requests_per_minute")) == (0.0, 0.0)
    assert desk.shown("warmpath_quota_given_back_total 2.0")


async def test_a_limit_refuses_with_what_clients_need() -> None:
    """The third of two: when to come again, by which limit, and nothing taken of the other one."""
    desk = Desk()
    for _ in range(2):
        await desk.begin()
    with pytest.raises(RateLimitedError) as caught:
        await desk.begin()
    assert caught.value.headers == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "700",
        "x-ratelimit-reset-tokens": "23h43m20s",
        "retry-after": "30",
    }
    assert "acme" not in str(caught.value)
    assert await desk.level("tokens_per_day") == 300.0
    assert await desk.level("requests_per_minute", "other") == 0.0
    assert desk.shown('warmpath_quota_refused_total{limit="requests_per_minute",model="",tenant="*"} 1.0')


async def test_a_request_larger_than_a_limit_is_refused_for_good() -> None:
    """No wait helps, so none is told, and SDKs are told not to try again."""
    desk = Desk({"tokens_per_day": 149})
    with pytest.raises(RateLimitedError) as caught:
        await desk.begin()
    assert caught.value.headers["x-should-retry"] == "false"
    assert "retry-after" not in caught.value.headers
    assert "needs about 150" in str(caught.value)


async def test_what_cannot_be_told_stays_taken_and_shows() -> None:
    """Without usage or with metadata of somebody else nothing is corrected."""
    desk = Desk()
    held = await desk.begin()
    desk.quotas.answered(desk.served(held), -1.0)
    desk.quotas.answered(Served(status=200, metadata={CARRIED: "1.0 0 x"}), -1.0)
    await desk.quotas.close()
    assert await desk.level("tokens_per_day") == 150.0
    assert desk.shown('warmpath_quota_unknown_total{reason="usage"} 1.0')
    assert desk.shown('warmpath_quota_unknown_total{reason="unreadable"} 1.0')


async def test_kinds_without_answers_take_no_output_and_reading_takes_nothing() -> None:
    """Embeddings cost their prompt; a request for a page that is no API counts as one; a GET is free."""
    desk = Desk({"tokens_per_day": 1000, "requests_per_day": 10})
    await desk.begin(kind=RouteKind.EMBEDDING)
    assert await desk.level("tokens_per_day") == 100.0
    await desk.begin(kind=RouteKind.OTHER)
    assert (await desk.level("tokens_per_day"), await desk.level("requests_per_day")) == (100.0, 2.0)
    assert not desk.quotas.concerns(Call("GET", "/v1/models", {}))


async def test_what_an_engine_generates_on_other_paths_counts() -> None:
    """A path that is no known API (`/invocations` of vLLM, one written with `%2F`) is no way around tokens."""
    desk = Desk({"tokens_per_day": 1000})
    held = await desk.begin(kind=RouteKind.OTHER)
    desk.quotas.answered(desk.served(held, prompt_tokens=400, output_tokens=700), -1.0)
    await desk.quotas.close()
    assert await desk.level("tokens_per_day") == 1100.0
    with pytest.raises(RateLimitedError) as refused:
        await desk.begin(kind=RouteKind.OTHER)
    assert "retry-after" in refused.value.headers


async def test_a_request_that_names_no_model_keeps_the_limits_of_the_one_that_serves_it() -> None:
    """Leaving the model out is no way around a limit."""
    desk = Desk({"model": "m", "requests_per_day": 1})
    await desk.begin(model="")
    with pytest.raises(RateLimitedError):
        await desk.begin()


async def test_before_a_body_only_limits_of_requests_of_all_models_are_taken_and_not_again() -> None:
    """What the service took, the decision leaves alone."""
    desk = Desk(RULE, {"model": "*", "requests_per_day": 5}, before_body=True)
    told = await desk.quotas.ahead([Ahead("acme", None, 1.0), Ahead("acme", None, 1.0)])
    headers = told.headers
    assert (headers["x-ratelimit-remaining-requests"], "x-ratelimit-remaining-tokens" in headers) == ("1", False)
    await desk.begin()
    assert await desk.level("requests_per_minute") == 1.0
    assert await desk.level("requests_per_day") == 1.0
    assert await desk.level("tokens_per_day") == 150.0


@pytest.mark.parametrize(
    ("entry", "left"),
    [
        ({"status": 429, "pool": ""}, 0.0),  # another limit refused it at its decision
        ({"status": 503, "pool": ""}, 0.0),
        ({"status": 404, "pool": ""}, 0.0),
        ({"status": 409, "pool": ""}, 0.0),
        ({"status": 503, "charge_id": "r1-1", "destination": "10.0.0.1:80"}, 0.0),
        ({"status": 429, "charge_id": "r1-1", "destination": "10.0.0.1:80"}, 0.0),
        ({"status": 400, "charge_id": "r1-1", "destination": "10.0.0.1:80"}, 1.0),
        ({"status": 200, "charge_id": "r1-1", "destination": "10.0.0.1:80"}, 1.0),
        ({"status": 200, "destination": "10.0.0.1:80"}, 1.0),
        ({"status": 0, "flags": ("DC",), "destination": "10.0.0.1:80"}, 1.0),
    ],
)
async def test_what_was_taken_before_a_body_is_given_back_as_by_the_decision(
    entry: dict[str, Any], left: float
) -> None:
    """By whatever worker hears of the end, also of a request that never was decided."""
    desk = Desk(RULE, {"requests_per_day": 5}, before_body=True)
    told = await desk.quotas.ahead([Ahead("acme", None, 1.0)])
    assert await desk.level("requests_per_minute") == 1.0
    desk.quotas.ended_ahead(Served(**{"metadata": told.metadata, **entry}))
    await desk.quotas.close()
    assert (await desk.level("requests_per_minute"), await desk.level("requests_per_day")) == (left, left)
    assert desk.shown(f"warmpath_quota_given_back_total {1.0 - left}")


async def test_what_only_looked_or_was_refused_before_a_body_gives_nothing_back() -> None:
    """Nothing was taken; and metadata that is not ours is passed over."""
    desk = Desk(RULE, before_body=True)
    assert (await desk.quotas.ahead([Ahead("acme", None, 0.0)])).metadata == {}
    for wrong in ({"quota_ahead": "x"}, {"quota_ahead": 7.0}, {}):
        desk.quotas.ended_ahead(Served(status=503, metadata=wrong))
    await desk.quotas.close()
    assert await desk.level("requests_per_minute") == 0.0
    assert desk.shown('warmpath_quota_unknown_total{reason="unreadable"} 1.0')


async def test_changed_rules_are_used_and_keep_what_was_used() -> None:
    """A lowered limit refuses at once; a rule that names the tenant goes on with its bucket."""
    desk = Desk({"tenant": "*", "requests_per_day": 5})
    for _ in range(3):
        await desk.begin()
    desk.around.config = config(rate_limits={"rules": [{"tenant": "acme", "requests_per_day": 3}]})
    with pytest.raises(RateLimitedError):
        await desk.begin()
    desk.around.config = config()
    assert not desk.quotas.concerns(CALL)


async def test_a_key_is_taken_until_its_request_ends() -> None:
    """A second request with it takes nothing and is refused; another tenant's has another key."""
    desk = Desk()
    held = await desk.begin(call=KEYED)
    with pytest.raises(DuplicateRequestError):
        await desk.begin(call=KEYED)
    assert await desk.level("requests_per_minute") == 1.0
    await desk.begin("other", call=KEYED)
    decision = desk.quotas.marked(Decision("main", (), "r1-9"), held)
    desk.quotas.settled(decision)
    await desk.quotas.close()
    await desk.begin(call=KEYED)
    assert desk.shown("warmpath_idempotency_duplicates_total 1.0")


async def test_a_refused_or_failed_request_frees_its_key() -> None:
    """Nobody would settle it."""
    desk = Desk({"requests_per_minute": 1})
    await desk.quotas.undo(await desk.begin(call=KEYED))
    await desk.quotas.close()
    await desk.begin()
    for _ in range(2):
        with pytest.raises(RateLimitedError):
            await desk.begin(call=KEYED)
        await desk.quotas.close()


async def test_keys_may_be_switched_off() -> None:
    """Then the header means nothing."""
    desk = Desk()
    desk.around.config = config(retries={"idempotency_s": 0})
    assert not desk.quotas.concerns(KEYED)


async def test_neither_keys_nor_tenants_are_in_what_is_stored() -> None:
    """Names in the store are keyed hashes: another secret has others, and none contains what it stands for."""
    desk = Desk()
    held = await desk.begin("acme", call=KEYED)
    assert held.claim is not None
    names = [held.claim.key, *(each.bucket for each in held.draws)]
    assert not any("acme" in name or "order" in name for name in names)
    desk.around.config = config(rate_limits={"rules": [RULE]}, routing={"session": {"secret": "s"}})
    other = await desk.begin("acme", call=KEYED)
    assert other.claim is not None
    assert not {other.claim.key, *(each.bucket for each in other.draws)} & set(names)


async def test_what_a_worker_allowed_alone_is_charged_whole_to_the_shared_store() -> None:
    """That one knows nothing of the estimate; a failed request leaves no trace there."""
    desk = Desk()
    held = await desk.begin()
    assert held.taken is not None
    alone = msgspec.structs.replace(held, taken=msgspec.structs.replace(held.taken, local=True))
    desk.quotas.answered(desk.served(alone, charge_id="r2-1", prompt_tokens=5, output_tokens=6), -1.0)
    await desk.quotas.close()
    assert await desk.level("tokens_per_day") == 150.0 + 11.0
    desk.quotas.answered(desk.served(alone, charge_id="r2-2", status=503), -1.0)
    await desk.quotas.close()
    assert (await desk.level("tokens_per_day"), await desk.level("requests_per_minute")) == (161.0, 2.0)


async def test_several_workers_correct_what_one_took() -> None:
    """The decision carries all that is needed; a second correction of the same is nobody's."""
    desk = Desk()
    held = await desk.begin()
    other = Quotas(desk.around, QuotaMetrics(Families(CollectorRegistry())), ManualClock())
    other.answered(desk.served(held, charge_id="r2-5", prompt_tokens=1, output_tokens=1), -1.0)

    async def corrected() -> bool:
        return await desk.level("tokens_per_day") == 2.0

    await until_async(corrected)
    await asyncio.gather(other.close(), desk.quotas.close())


async def test_ten_thousand_tenants_do_not_grow_the_metrics_page() -> None:
    """Case E11: who uses a limit is told by its rule alone; names come from outside."""
    desk = Desk({"tenant": "*", "requests_per_minute": 1})

    async def used_up(tenant: str) -> None:
        await desk.begin(tenant)
        with pytest.raises(RateLimitedError):
            await desk.begin(tenant)

    await used_up("the first one")
    lines = generate_latest(desk.registry).count(b"\n")
    for number in range(10_000):
        await used_up(f"tenant {number}")
    assert generate_latest(desk.registry).count(b"\n") == lines

"""Decisions that carry a body made for the engine that was picked."""

import json
from typing import Any

import msgspec
import pytest

from extproc.choose.fleet import Fleet, Pool
from extproc.config import Model, ModelAdapter, Routing
from extproc.config import Pool as PoolSettings
from extproc.envoy.contract import Call, Decision
from extproc.errors import NoEndpointError, UnfitRequestError
from tests.unit.router.parts import Bench, endpoints

POLICIES = ["predicted_ttft", "weighted", "least_tokens", "session_hash", "round_robin"]
COMPLETION = "/v1/completions"


def bench(model: Model, policy: str = "predicted_ttft", kinds: tuple[str, ...] = (), **of_pool: Any) -> Bench:
    """A bench whose model `m` and pool have these settings, and whose endpoints are of these kinds."""
    each = endpoints(len(kinds) or 3)
    members = tuple(
        msgspec.structs.replace(endpoint, kind=kind) for endpoint, kind in zip(each, kinds or ("",) * 3, strict=True)
    )
    made = Bench(*members, policy=policy)
    made.around.config = msgspec.structs.replace(
        made.around.config, models={"m": model}, pools={"main": PoolSettings(endpoints=["x:1"], **of_pool)}
    )
    return made


async def complete(bench: Bench, **fields: Any) -> Decision:
    """Decide on a completion."""
    body = json.dumps({"model": "m", "prompt": "hello", **fields}).encode()
    return await bench.router.decide(Call("POST", COMPLETION, {}, body))


@pytest.mark.parametrize("policy", POLICIES)
async def test_an_alias_is_rewritten_under_any_policy(policy: str) -> None:
    """Whether or not the policy reads prompts; and it is counted."""
    made = bench(Model(pool="main", served_as="org/base"), policy)
    decision = await made.chat("hello")
    assert json.loads(decision.body or b"") == {
        "model": "org/base",
        "messages": [{"role": "user", "content": "hello"}],
    }
    assert made.around.changes == {("main", "model"): 1}


async def test_a_body_that_needs_nothing_is_not_copied() -> None:
    """A pool of vLLM engines without aliases."""
    made = bench(Model(pool="main"), engine="vllm")
    assert (await made.chat("hello", priority=3, stream=True, cache_salt="t")).body is None
    assert not made.around.changes


async def test_a_stored_response_keeps_its_id_under_an_alias() -> None:
    """Both changes of a Responses body come together."""
    made = bench(Model(pool="main", served_as="org/base"))
    decision = await made.router.decide(Call("POST", "/v1/responses", {}, b'{"model":"m","input":"hello"}'))
    body = json.loads(decision.body or b"")
    assert body.pop("request_id").startswith("resp_")
    assert body == {"model": "org/base", "input": "hello"}


async def test_a_new_configuration_counts_at_once() -> None:
    """The next request has the new name."""
    made = bench(Model(pool="main", served_as="old"))
    await made.chat("hello")
    made.around.config = msgspec.structs.replace(made.around.config, models={"m": Model(pool="main", served_as="new")})
    assert json.loads((await made.chat("hello")).body or b"")["model"] == "new"


async def test_an_adapter_is_selected_as_the_engine_does() -> None:
    """The kind is what the endpoints turned out to be."""
    adapter = Model(pool="main", adapter=ModelAdapter(name="sql", id=7, path="/sql"))
    for kind, name in (("vllm", "sql"), ("sglang", "m:sql"), ("tensorrt_llm", "m")):
        decision = await bench(adapter, kinds=(kind, "", kind)).chat("hello")
        body = json.loads(decision.body or b"")
        assert body["model"] == name
        assert ("lora_request" in body) is (kind == "tensorrt_llm")


async def test_a_refused_request_is_never_charged() -> None:
    """Nothing is picked, pinned or believed to be cached for a salt that no engine of the pool keeps."""
    made = bench(Model(pool="main"), engine="tensorrt_llm")
    with pytest.raises(UnfitRequestError):
        await complete(made, cache_salt="tenant")
    assert not made.notes.outcomes
    assert not made.notes.deltas
    assert not await made.store.loads("main")


async def test_a_salted_request_goes_to_whoever_keeps_it_apart() -> None:
    """In a pool of several kinds, also when a session is pinned to one that cannot."""
    made = bench(Model(pool="main"), kinds=("tensorrt_llm", "tensorrt_llm", "vllm"))
    pinned = await made.chat("hello", session="s", subset=("10.0.0.0:80",))
    assert pinned.destinations == ("10.0.0.0:80",)
    body = {"model": "m", "prompt": "hello", "cache_salt": "tenant"}
    call = Call("POST", COMPLETION, {"x-session-id": "s"}, json.dumps(body).encode())
    decision = await made.router.decide(call)
    assert (decision.destinations, decision.body) == (("10.0.0.2:80",), None)
    with pytest.raises(NoEndpointError):
        await made.router.decide(msgspec.structs.replace(call, subset=("10.0.0.0:80",)))


async def test_fallbacks_are_of_the_picks_kind() -> None:
    """They get the same bytes; cheaper endpoints of another kind take nobody's place."""
    made = bench(Model(pool="main"), kinds=("tensorrt_llm", "vllm") * 6)
    kinds = {each.destination: each.kind for each in made.around.fleet.pools["main"].endpoints}
    for number in range(12):
        decision = await made.chat(f"{number}", priority=10)
        found = {kinds[at] for at in decision.destinations}
        assert len(found) == 1
        assert len(decision.destinations) == 4
        assert (decision.body is not None) is (found == {"tensorrt_llm"})


async def test_an_unread_endpoint_is_as_good_a_fallback_as_any() -> None:
    """Where all that is known are of one kind."""
    made = bench(Model(pool="main", served_as="base"), kinds=("vllm", "", "", "vllm"))
    assert all([len((await made.chat(f"{number}")).destinations) == 4 for number in range(6)])


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_sleeping_engine_is_never_named(policy: str) -> None:
    """Not as the pick, not for a session that is pinned to it, not to be tried after another, not when it is the last.

    A sleeping vLLM takes requests and lets them hang.
    """
    made = Bench(*endpoints(3), policy=policy, routing=Routing())
    awake = made.around.fleet.pools["main"].endpoints
    for number in range(6):
        await made.chat("hello", session=f"s{number}")
    for sleeping in range(1, 4):
        members = tuple(
            msgspec.structs.replace(each, asleep=at < sleeping, running=100 * (at >= sleeping))
            for at, each in enumerate(awake)
        )
        made.around.fleet = Fleet({"main": Pool("main", policy, members)}, {"m": "main"}, "main")
        for number in range(6):
            if sleeping == len(awake):
                with pytest.raises(NoEndpointError):
                    await made.chat("hello", session=f"s{number}")
            else:
                decision = await made.chat("hello", session=f"s{number}")
                assert set(decision.destinations) == {each.destination for each in awake[sleeping:]}

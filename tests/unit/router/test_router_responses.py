"""Stored responses: whose id is whose, and that only the engine which has one continues it."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.envoy.contract import Call, Decision, Served
from extproc.learner import answered
from extproc.router import Surroundings
from extproc.state.knowledge import PoolKnowledge, Priors
from tests.unit.router.parts import Bench, text

PATH = "/v1/responses"
POLICIES = ["predicted_ttft", "weighted", "least_tokens", "session_hash", "round_robin"]


async def respond(bench: Bench, asked: str, path: str = PATH, tenant: str = "", **fields: Any) -> Decision:
    """Decide on a Responses call and end it."""
    body = json.dumps({"model": "m", "input": asked, **fields}).encode() if asked else b""
    headers = {"x-warmpath-tenant": tenant} if tenant else {}
    decision = await bench.router.decide(Call("POST" if asked else "GET", path, headers, body))
    await bench.router.settle(decision)
    return decision


def sent(decision: Decision) -> Mapping[str, Any]:
    """The body that the engine gets."""
    assert decision.body is not None
    fields: Mapping[str, Any] = json.loads(decision.body)
    return fields


async def overload(bench: Bench, decision: Decision) -> None:
    """Put far more work on the picked endpoint than any session would stay for."""
    for number in range(10):
        await bench.chat(text(8000, seed=f"{number:>3}"), subset=decision.destinations[:1])


async def test_a_response_gets_an_id_that_is_known_here() -> None:
    """The engine is told to store the response under an id of ours; the rest of the body is as it came."""
    bench = Bench()
    first, second = sent(await respond(bench, "hello", store=True)), sent(await respond(bench, "hello"))
    assert first["request_id"].startswith("resp_")
    assert first["request_id"] != second["request_id"]
    assert {key: value for key, value in first.items() if key != "request_id"} == {
        "model": "m",
        "input": "hello",
        "store": True,
    }


async def test_an_id_that_the_client_chose_stays() -> None:
    """The body is passed on untouched, and the response is found under the client's id."""
    bench = Bench()
    first = await respond(bench, "hello", request_id="resp_mine")
    assert first.body is None
    await overload(bench, first)
    follow = await respond(bench, "and then?", previous_response_id="resp_mine")
    assert follow.destinations[0] == first.destinations[0]


@pytest.mark.parametrize("body", [b"", b"no json", b"[]", b'{"model":"m","input"'])
async def test_a_body_that_cannot_be_read_is_left_alone(body: bytes) -> None:
    """The engine answers for what a client sends; nothing is put into it."""
    for policy in POLICIES:
        assert (await Bench(policy=policy).router.decide(Call("POST", PATH, {}, body))).body is None


async def test_other_apis_get_no_id() -> None:
    """Only Responses are stored."""
    assert (await Bench().chat("hello")).body is None


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_response_is_continued_where_it_is_under_any_policy(policy: str) -> None:
    """However much work is there, and however the policy places others; and so is the continuation of that one."""
    bench = Bench(policy=policy)
    places = set()
    for number in range(6):
        decision = await respond(bench, f"question {number}")
        await overload(bench, decision)
        chain = [decision]
        for _ in range(3):
            chain.append(await respond(bench, "go on", previous_response_id=sent(chain[-1])["request_id"]))
        assert len({each.destinations[0] for each in chain}) == 1
        places.add(decision.destinations[0])
    assert len(places) > 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("action", ["", "/cancel", "/input_items?limit=3"])
async def test_a_stored_response_is_read_and_cancelled_where_it_is(policy: str, action: str) -> None:
    """Calls that carry the id in their path go to the engine that has the response."""
    bench = Bench(policy=policy)
    first = await respond(bench, "hello")
    await overload(bench, first)
    for _ in range(4):
        read = await respond(bench, "", path=f"{PATH}/{sent(first)['request_id']}{action}")
        assert read.destinations[0] == first.destinations[0]


async def test_a_response_is_read_in_the_pool_that_has_it() -> None:
    """Reading names no model: the id that was given tells the pool, before anything is known of the answer."""
    bench = Bench()
    around, main = bench.around, bench.around.fleet.pools["main"]
    second = Pool("second", "predicted_ttft", tuple(Endpoint(f"s{at}", f"10.0.1.{at}:80", 1e4) for at in range(3)))
    around.fleet = Fleet({"main": main, "second": second}, {"m": "main", "n": "second"}, "main")
    around.knowledge = {**around.knowledge, "second": PoolKnowledge(Priors())}
    for number in range(6):
        for model, pool in (("m", "main"), ("n", "second")):
            first = await respond(bench, f"{number}", model=model)
            read = await respond(bench, "", path=f"{PATH}/{sent(first)['request_id']}")
            assert (read.pool, read.destinations[0]) == (pool, first.destinations[0])


async def test_another_tenant_does_not_find_a_response_by_its_id() -> None:
    """Pins of stored responses are apart by tenant: the id alone leads nowhere."""
    bench = Bench()
    first = await respond(bench, "hello", tenant="t1")
    await respond(bench, "go on", tenant="t2", previous_response_id=sent(first)["request_id"])
    await respond(bench, "go on", tenant="t1", previous_response_id=sent(first)["request_id"])
    assert [outcome.pinned for outcome in bench.notes.outcomes] == [False, False, True]


async def test_a_continued_response_is_priced_with_its_conversation() -> None:
    """Once the answer is known, the follow-up counts what the engine puts in front, cached where that is."""
    bench = Bench()
    first = await respond(bench, text(3000))
    learn(bench.around, first, prompt_tokens=3100, output_tokens=200)
    follow = await respond(bench, "go on", previous_response_id=sent(first)["request_id"])
    assert 3300 < float(follow.metadata["prompt_tokens"]) < 3350
    assert float(follow.metadata["uncached_tokens"]) < 100
    assert bench.notes.outcomes[-1].best_cached_tokens > 3200


async def test_repeated_instructions_of_a_continued_response_count_once() -> None:
    """Clients send them with every turn, and the engine takes them in place of the stored ones."""
    bench = Bench()
    first = await respond(bench, "hello", instructions=text(8000))
    learn(bench.around, first, prompt_tokens=2100, output_tokens=100)
    follow = await respond(bench, "go on", instructions=text(8000), previous_response_id=sent(first)["request_id"])
    assert 2200 < float(follow.metadata["prompt_tokens"]) < 2250
    assert float(follow.metadata["uncached_tokens"]) < 100


def learn(around: Surroundings, decision: Decision, prompt_tokens: int, output_tokens: int) -> None:
    """Let the access log tell how the engine answered."""
    served = Served(
        charge_id=decision.charge_id,
        pool="main",
        destination=decision.destinations[0],
        status=200,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=0,
        metadata=decision.metadata,
    )
    around.knowledge["main"].apply(answered(served, str(decision.metadata["endpoint"]), -1.0))

"""Policies that look at no prompt: what is read for them, and where requests go."""

import pytest

from extproc.envoy.contract import Call
from tests.unit.router.parts import Bench, text


async def test_round_robin_takes_turns() -> None:
    """The baseline policy visits every endpoint before it repeats one."""
    bench = Bench(policy="round_robin")
    picks = [str((await bench.chat("same")).metadata["endpoint"]) for _ in range(6)]
    assert sorted(picks[:3]) == ["a", "b", "c"]
    assert picks[3:] == picks[:3]


@pytest.mark.parametrize("policy", ["round_robin", "session_hash"])
async def test_a_body_that_is_no_json_is_no_flaw_to_a_policy_without_prefixes(policy: str) -> None:
    """Nothing that it goes by is missing; to a policy that reads prompts it is a flaw."""
    call = Call("POST", "/v1/chat/completions", {"x-session-id": "s"}, b"no json")
    for name, flaw in ((policy, ""), ("predicted_ttft", "not_json")):
        bench = Bench(policy=name)
        await bench.router.decide(call)
        assert bench.notes.outcomes[0].flaw == flaw


async def test_policies_without_prefixes_take_the_body_for_the_prompt_and_hash_nothing() -> None:
    """The charge is the body's length, no profile is written, and its bytes teach no ratio."""
    bench = Bench(policy="round_robin")
    decision = await bench.chat(text(4000))
    assert 4000 < float(decision.metadata["prompt_tokens"]) < 4100
    assert decision.metadata["prompt_bytes"] == -1.0
    assert bench.notes.deltas == []


async def test_session_hash_places_who_names_no_session_by_the_prompt() -> None:
    """Turns of one conversation begin alike and so have one home; different conversations spread."""
    bench = Bench(policy="session_hash")
    for seed in range(12):
        opening = text(200, seed=f"{seed}")
        picks = {(await bench.chat(opening + more)).metadata["endpoint"] for more in ("", text(50), text(500))}
        assert len(picks) == 1
    assert {outcome.session for outcome in bench.notes.outcomes} == {False}
    assert len(await bench.store.loads("main")) == 3


async def test_session_hash_needs_no_prompt_of_a_named_session() -> None:
    """A session goes to its home whatever it asks, without its prompt being read; sessions spread."""
    bench = Bench(policy="session_hash")
    for session in range(12):
        picks = {(await bench.chat(text(100, seed=f"{n}"), session=session)).metadata["endpoint"] for n in range(4)}
        assert len(picks) == 1
    assert bench.notes.deltas == []
    assert len(await bench.store.loads("main")) == 3

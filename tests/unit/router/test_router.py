"""The path of a decision, with the real parser, chooser, knowledge and memory store."""

import pytest

from extproc.choose.fleet import Endpoint
from extproc.envoy.contract import Call
from extproc.errors import NoEndpointError, UnknownModelError
from extproc.state.feed import Dropped, Held
from tests.unit.router.parts import Bench, text


async def test_a_prompt_seen_before_goes_back_to_its_endpoint() -> None:
    """The second request of a long prompt is predicted as cached where the first one went."""
    bench = Bench()
    first = await bench.chat(text(4000))
    bench.clock.advance(60)
    again = await bench.chat(text(4000))
    assert again.metadata["endpoint"] == first.metadata["endpoint"]
    assert first.metadata["uncached_tokens"] == first.metadata["prompt_tokens"]
    assert float(again.metadata["uncached_tokens"]) < 100


async def test_destinations_start_with_the_pick_and_hold_fallbacks() -> None:
    """Envoy gets an ordered list: the pick, then other endpoints, none of them twice."""
    decision = await Bench().chat("hi")
    assert len(decision.destinations) == len(set(decision.destinations)) == 3


async def test_the_charge_is_on_the_ledger_until_the_stream_ends() -> None:
    """One request in flight between decision and settle, none after, and settling twice changes nothing."""
    bench = Bench()
    decision = await bench.chat(text(2000))
    endpoint = str(decision.metadata["endpoint"])
    load = (await bench.store.loads("main"))[endpoint]
    assert load.running == 1
    assert load.backlog_tokens == pytest.approx(decision.metadata["uncached_tokens"])
    await bench.router.settle(decision)
    await bench.router.settle(decision)
    after = (await bench.store.loads("main")).get(endpoint)
    assert after is None or after.running == 0


async def test_cold_prompts_spread_by_the_shared_backlog() -> None:
    """Twelve different long prompts at once: no endpoint of three gets more than half of them."""
    bench = Bench()
    picks = [str((await bench.chat(text(4000, seed=f"{n:>3}"))).metadata["endpoint"]) for n in range(12)]
    assert max(map(picks.count, picks)) <= 6


async def test_an_unknown_model_is_refused_and_leaves_no_trace() -> None:
    """404 before anything is charged, published or recorded."""
    bench = Bench()
    with pytest.raises(UnknownModelError, match="nope"):
        await bench.chat("hi", model="nope")
    assert not bench.notes.deltas
    assert not await bench.store.loads("main")


async def test_an_empty_subset_is_refused() -> None:
    """503: the gateway said that none may serve."""
    with pytest.raises(NoEndpointError):
        await Bench().chat("hi", subset=())


@pytest.mark.parametrize("body", [b"", b"\xff\x00", b"[]", b"{", b'{"messages": 3}'])
async def test_what_cannot_be_read_is_still_routed(body: bytes) -> None:
    """A body that is no request is picked by load alone and passed to the engine, which answers for itself."""
    decision = await Bench().router.decide(Call("POST", "/v1/chat/completions", {}, body))
    assert decision.destinations
    assert decision.charge_id


async def test_unreadable_requests_spread() -> None:
    """Requests without a prompt are not all sent to one endpoint by a constant tie-break."""
    bench = Bench()
    picks = {(await bench.router.decide(Call("GET", "/v1/models", {}))).destinations[0] for _ in range(60)}
    assert len(picks) == 3


async def test_a_foreign_gateway_s_word_moves_the_profile() -> None:
    """Another endpoint served: the new blocks leave the picked profile and enter the other, and replicas are told."""
    bench = Bench()
    decision = await bench.chat(text(4000))
    picked = str(decision.metadata["endpoint"])
    other = next(e for e in bench.around.fleet.pools["main"].endpoints if e.id != picked)
    await bench.router.settle(decision, served=other.destination)
    knowledge = bench.around.knowledge["main"]
    assert knowledge.held(picked) == 0
    assert knowledge.held(other.id) > 50
    assert [type(delta) for delta in bench.notes.deltas] == [Held, Dropped, Held]


async def test_charge_and_session_follow_while_the_answer_runs() -> None:
    """A foreign gateway chose another endpoint: that has the request, its tokens, and the session's next turn."""
    bench = Bench()
    decision = await bench.chat(text(4000), session="s")
    picked = str(decision.metadata["endpoint"])
    other = next(e for e in bench.around.fleet.pools["main"].endpoints if e.id != picked)
    before = (await bench.store.loads("main"))[picked]
    await bench.router.served(decision, other.destination)
    assert await bench.store.loads("main") == {other.id: before}
    knowledge = bench.around.knowledge["main"]
    assert (knowledge.held(picked), knowledge.held(other.id) > 50) == (0, True)
    await bench.router.settle(decision, other.destination)
    assert (await bench.store.loads("main"))[other.id].running == 0
    assert knowledge.held(other.id) > 50
    again = await bench.chat(text(4000), session="s")
    assert (again.metadata["endpoint"], bench.notes.outcomes[-1].pinned) == (other.id, True)


async def test_an_address_that_nobody_knows_moves_no_charge() -> None:
    """An endpoint that left the pool meanwhile cannot be charged."""
    bench = Bench()
    decision = await bench.chat(text(4000))
    before = await bench.store.loads("main")
    await bench.router.served(decision, "10.9.9.9:80")
    assert await bench.store.loads("main") == before


async def test_the_metadata_holds_nothing_of_prompt_or_session() -> None:
    """What goes to Envoy's access log is numbers and bounded names."""
    bench = Bench()
    decision = await bench.chat("the secret word is xyzzy", session="session-4711")
    told = repr(decision) + repr(bench.notes.outcomes) + repr(bench.notes.deltas)
    assert "xyzzy" not in told
    assert "4711" not in told


async def test_an_endpoint_with_a_queue_of_its_own_is_passed_over() -> None:
    """The engine's own queue counts although the ledger knows of none, and stands in the prediction."""
    busy = Endpoint("busy", "10.0.0.1:80", 10_000.0, floor_tokens=9000.0)
    idle = Endpoint("idle", "10.0.0.2:80", 10_000.0)
    for seed in range(8):
        assert (await Bench(busy, idle).chat(text(500, seed=f"{seed}"))).metadata["endpoint"] == "idle"
    alone = await Bench(busy).chat(text(500))
    assert alone.metadata["backlog_tokens"] == 9000.0
    assert float(alone.metadata["predicted_ttft_ms"]) > 9000.0 / 10_000.0 * 0.8 * 1000


async def test_the_outcome_tells_the_overlap_that_load_made_it_pass_up() -> None:
    """A warm endpoint far behind is left: what it has cached is told beside what the pick has, which is nothing."""
    bench = Bench()
    first = await bench.chat(text(2000))
    warm = first.destinations[:1]
    taken = await bench.chat(text(2000), subset=warm)
    for number in range(10):
        await bench.chat(text(4000, seed=f"{number:>3}"), subset=warm)
    left = await bench.chat(text(2000))
    cold, hit, passed_up = bench.notes.outcomes[0], bench.notes.outcomes[1], bench.notes.outcomes[-1]
    assert (cold.best_cached_tokens, cold.cached_tokens) == (0.0, 0.0)
    assert hit.best_cached_tokens == hit.cached_tokens > 1900
    assert taken.destinations[0] == first.destinations[0] != left.destinations[0]
    assert (passed_up.best_cached_tokens, passed_up.cached_tokens) == (hit.cached_tokens, 0.0)

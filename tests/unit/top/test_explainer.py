"""What a worker answers who asks why, over a real Valkey: it agrees with the decision, and asking changes nothing."""

import itertools
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import msgspec
import pytest

import redis
from extproc.choose.explain import BEYOND, Explanation
from extproc.choose.fleet import Endpoint
from extproc.clock import ManualClock
from extproc.config import Config
from extproc.deciding import Outcome
from extproc.envoy.contract import Call, Decision
from extproc.errors import NoEndpointError, UnknownDecisionError, UnknownModelError
from extproc.explainer import Explainer
from extproc.router import Router, Surroundings
from extproc.state.feed import Delta
from extproc.state.memory import MemoryStore
from extproc.state.redis import RedisStore
from tests.unit.top.parts import config, surroundings
from tests.valkey import Valkey

ABC = tuple(Endpoint(name, f"10.0.0.{at}:80", 10_000.0) for at, name in enumerate("abc", 1))
NUMBERS = itertools.count()


class Notes:
    """Keeps what a router tells others."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.outcomes: list[Outcome] = []

    def publish(self, _pool: str, delta: Delta) -> None:
        """See `router.Publisher`."""
        self.deltas.append(delta)

    def decided(self, outcome: Outcome) -> None:
        """See `router.Recorder`."""
        self.outcomes.append(outcome)

    def settled(self, _pool: str) -> None:
        """See `router.Recorder`."""


class Bench:
    """A router and its explainer on one store."""

    def __init__(self, url: str) -> None:
        self.around: Surroundings = surroundings(*ABC)
        self.prefix = f"bench{next(NUMBERS)}"
        self.store = RedisStore(url, 5000, self.prefix)
        self.around.store = self.store
        self.notes = Notes()
        self.clock = ManualClock()
        self.use(ABC)
        self.router = Router(self.around, self.notes, self.notes, self.clock)
        self.explainer = Explainer(self.around, self.router, self.clock)

    def use(
        self, endpoints: tuple[Endpoint, ...], policy: str = "predicted_ttft", settings: Config | None = None
    ) -> None:
        """Put these endpoints, this policy and this configuration in place."""
        self.around.config = settings or config(routing={"rate_factor": 1.0})
        pool = msgspec.structs.replace(self.around.fleet.pools["main"], endpoints=endpoints, policy=policy)
        self.around.fleet = msgspec.structs.replace(self.around.fleet, pools={"main": pool})

    async def decide(self, call: Call) -> Decision:
        """Decide."""
        return await self.router.decide(call)

    async def explain(self, call: Call) -> Explanation:
        """Ask what would be decided."""
        return await self.explainer.explain(call)


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    """One store for all tests here."""
    with Valkey() as running:
        yield running


@pytest.fixture
async def bench(valkey: Valkey) -> AsyncIterator[Bench]:
    """Endpoints a, b, c at 10,000 tokens a second, under keys of their own."""
    made = Bench(valkey.url)
    await made.store.ping()
    yield made
    await made.store.close()


def chat(text: str, headers: Mapping[str, str] | None = None, **more: Any) -> Call:
    """A chat with one question."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    return Call("POST", "/v1/chat/completions", dict(headers or {}), json.dumps(body).encode())


def prompt(seed: str, tokens: int = 2000) -> str:
    """About `tokens` tokens that differ by seed from their beginning."""
    return "".join(f"{seed}{number:>7}" for number in range(tokens // 2))


@pytest.mark.parametrize("policy", ["predicted_ttft", "weighted", "least_tokens", "session_hash", "round_robin"])
@pytest.mark.parametrize("infer", [False, True])
async def test_it_agrees_with_the_decision_that_follows(bench: Bench, policy: str, infer: bool) -> None:
    """Same pick, cost, tokens, prediction and pin as the next decision, whatever came before; on a clock of our own."""
    bench.around.store = MemoryStore(bench.clock)
    # The queue of the first engine proves work that the ledger may not know of.
    bench.use(
        (msgspec.structs.replace(ABC[0], floor_tokens=700.0), *ABC[1:]),
        policy,
        config(routing={"session": {"infer": infer}}),
    )
    pins = set()
    for turn in range(24):
        # Five prompts that grow, three sessions that do not go with them, some requests of several answers.
        session = {"x-session-id": f"s{turn % 3}"} if turn % 4 else {}
        call = chat(prompt(f"p{turn % 5}", 400 * (1 + turn // 5)), session, n=1 + turn % 2)
        told = await bench.explain(call)
        decision = await bench.decide(call)
        assert told.pick == decision.metadata["endpoint"]
        picked = next(each for each in told.candidates if each.endpoint == told.pick)
        assert picked.cost_ms == pytest.approx(decision.metadata["cost_ms"])
        assert picked.uncached_tokens == decision.metadata["uncached_tokens"]
        assert picked.predicted_ttft_ms == decision.metadata["predicted_ttft_ms"]
        assert bench.explainer.recall(decision.charge_id).pin == told.pin
        pins.add(told.pin)
        bench.clock.advance(0.02)
    sticky = {"new", "honoured"} if infer else {"none", "new", "honoured"}
    # Requests pile up here, so that a session may also leave its endpoint.
    assert pins - {"moved"} == (sticky if policy in {"predicted_ttft", "weighted"} else {"none"})


async def test_a_conversation_that_nobody_names_is_pinned_by_its_turns(bench: Bench) -> None:
    """Without a session id, each turn honours the pin of the one before; asking breaks no chain."""
    messages = [{"role": "user", "content": "hi"}]
    pins = []
    for turn in range(4):
        call = Call("POST", "/v1/chat/completions", {}, json.dumps({"model": "m", "messages": messages}).encode())
        told = await bench.explain(call)
        decision = await bench.decide(call)
        assert (told.pick, told.pin) == (decision.metadata["endpoint"], bench.explainer.recall(decision.charge_id).pin)
        pins.append(told.pin)
        messages += [{"role": "assistant", "content": f"a{turn}"}, {"role": "user", "content": f"q{turn}"}]
    assert pins == ["new", "honoured", "honoured", "honoured"]


def dumped(valkey: Valkey, bench: Bench) -> Mapping[bytes, bytes]:
    """Everything the store holds of this bench."""
    with redis.Redis(port=valkey.port) as raw:
        return {key: raw.dump(key) for key in raw.scan_iter(f"{bench.prefix}:*")}


async def test_asking_changes_nothing(bench: Bench, valkey: Valkey) -> None:
    """Nothing in the store, no profile, no turn; nothing is told to others, nothing remembered."""
    session = {"x-session-id": "s1", "x-warmpath-tenant": "t1"}
    await bench.decide(chat(prompt("a"), session))
    known = bench.around.knowledge["main"]
    before, held = dumped(valkey, bench), {name: known.held(name) for name in "abc"}
    assert before
    for call in (chat(prompt("a"), session), chat(prompt("b")), chat("short", {"x-session-id": "s2"})):
        await bench.explain(call)
    assert dumped(valkey, bench) == before
    assert {name: known.held(name) for name in "abc"} == held
    assert (len(bench.notes.deltas), len(bench.notes.outcomes), bench.router.turn) == (1, 1, 1)
    assert len(bench.around.recent) == 1


async def test_past_decisions_are_found_by_either_id(bench: Bench) -> None:
    """The charge's and the request's id lead to the same explanation; others to none."""
    decision = await bench.decide(chat(prompt("a"), {"x-request-id": "r-1"}))
    bench.clock.advance(60)
    told = bench.explainer.recall("r-1")
    assert told == bench.explainer.recall(decision.charge_id)
    assert (told.request_id, told.charge_id, told.at) == ("r-1", decision.charge_id, 1000.0)
    assert (told.pick, told.why, told.replica) == (decision.metadata["endpoint"], "least_cost", "r1")
    picked, *others = sorted(told.candidates, key=lambda each: each.endpoint != told.pick)
    assert picked.cost_ms == pytest.approx(decision.metadata["cost_ms"])
    assert picked.predicted_ttft_ms == decision.metadata["predicted_ttft_ms"]
    assert [each.cost_ms for each in others] == [None, None]
    with pytest.raises(UnknownDecisionError):
        bench.explainer.recall("r-2")


async def test_a_past_decision_is_told_as_it_was(bench: Bench) -> None:
    """What changed since in fleet, profiles and configuration changes nothing of it."""
    decision = await bench.decide(chat(prompt("a"), {"x-request-id": "r-1"}))
    before = bench.explainer.recall("r-1")
    bench.use(ABC[:1], "round_robin", config(routing={"prefill_weight": 9.0, "tie_ms": 77.0}))
    await bench.decide(chat(prompt("a")))
    assert bench.explainer.recall("r-1") == before
    assert before.pick == decision.metadata["endpoint"]


@pytest.mark.parametrize("inferred", [False, True])
async def test_nothing_of_the_client_is_told(bench: Bench, inferred: bool) -> None:
    """Neither prompt nor session nor tenant, of a decision that was made or asked for."""
    headers = {"x-warmpath-tenant": "tenant-t", "x-request-id": "r-1"} | (
        {} if inferred else {"x-session-id": "sess-s"}
    )
    call = chat(prompt("word"), headers, user="user-u", prompt_cache_key="key-k")
    asked = await bench.explain(call)
    await bench.decide(call)
    text = (msgspec.json.encode(asked) + msgspec.json.encode(bench.explainer.recall("r-1"))).decode()
    kept = repr(bench.around.recent.find("r-1"))
    for secret in ("word", "tenant-t", "sess-s", "user-u", "key-k"):
        assert secret not in text
        assert secret not in kept


async def test_a_pin_is_told_honoured_and_moved(bench: Bench) -> None:
    """A session is new, then where it is pinned, then elsewhere once its endpoint is dearer by too much."""
    session = {"x-session-id": "s"}
    first = await bench.explain(chat("hi", session))
    assert (first.pin, first.pinned_to) == ("new", "")
    pinned = str((await bench.decide(chat("hi", session))).metadata["endpoint"])
    second = await bench.explain(chat("go on", session))
    assert (second.pin, second.pinned_to, second.pick, second.why) == ("honoured", pinned, pinned, "pin")
    slow = tuple(msgspec.structs.replace(each, kv_usage=1.0) if each.id == pinned else each for each in ABC)
    bench.use(slow, settings=config(routing={"kv_penalty_ms": 5000.0}))
    third = await bench.explain(chat("go on", session))
    assert (third.pin, third.pinned_to) == ("moved", pinned)
    assert third.pick != pinned
    moved = await bench.decide(chat("go on", session))
    assert moved.metadata["endpoint"] == third.pick
    assert bench.explainer.recall(moved.charge_id).pin == "moved"


async def test_a_pin_outside_the_candidates_is_found_all_the_same(bench: Bench) -> None:
    """The pinned endpoint is weighed although others are cheaper by local knowledge, as the decision does."""
    session = {"x-session-id": "s"}
    pinned = str((await bench.decide(chat("hi", session))).metadata["endpoint"])
    full = tuple(msgspec.structs.replace(each, kv_usage=0.95) if each.id == pinned else each for each in ABC)
    bench.use(full, settings=config(routing={"candidates": 1}))
    told = await bench.explain(chat("go on", session))
    assert (told.pick, told.pin) == (pinned, "honoured")
    assert sorted(each.dropped for each in told.candidates) == ["", "", BEYOND]
    decision = await bench.decide(chat("go on", session))
    assert decision.metadata["endpoint"] == pinned
    past = bench.explainer.recall(decision.charge_id)
    assert (past.pick, past.pinned_to, past.why) == (pinned, pinned, "pin")


async def test_a_pin_to_who_may_not_serve_is_moved(bench: Bench) -> None:
    """The pinned endpoint sleeps: its row says so, and the session goes elsewhere."""
    session = {"x-session-id": "s"}
    pinned = str((await bench.decide(chat("hi", session))).metadata["endpoint"])
    bench.use(tuple(msgspec.structs.replace(each, asleep=each.id == pinned) for each in ABC))
    told = await bench.explain(chat("go on", session))
    assert (told.pin, told.pinned_to) == ("moved", pinned)
    assert {each.endpoint: each.dropped for each in told.candidates}[pinned] == "asleep"
    assert (await bench.decide(chat("go on", session))).metadata["endpoint"] == told.pick != pinned


async def test_a_tie_is_told_from_the_cheapest(bench: Bench) -> None:
    """Who costs a little more than another and stands before it says so."""
    first = (await bench.explain(chat("hi"))).candidates
    assert (await bench.explain(chat("hi"))).why == "cheapest"
    dearer = tuple(
        msgspec.structs.replace(each, kv_usage=0.9002) if each.id == first[0].endpoint else each for each in ABC
    )
    bench.use(dearer)
    told = await bench.explain(chat("hi"))
    assert (told.pick, told.why) == (told.candidates[0].endpoint, "tie_order")


async def test_when_nobody_may_serve_each_reason_stands_there(bench: Bench) -> None:
    """What a decision refuses is still explained."""
    bench.use(tuple(msgspec.structs.replace(each, asleep=True) for each in ABC))
    told = await bench.explain(chat("hi"))
    assert (told.pick, told.why) == ("", "no_endpoint")
    assert {each.endpoint: each.dropped for each in told.candidates} == dict.fromkeys("abc", "asleep")
    with pytest.raises(NoEndpointError):
        await bench.decide(chat("hi"))


async def test_an_unknown_model_is_refused_as_by_a_decision(bench: Bench) -> None:
    """The same error, so the same text."""
    with pytest.raises(UnknownModelError):
        await bench.explain(Call("POST", "/v1/chat/completions", {}, b'{"model":"other"}'))


async def test_pins_that_cannot_be_read_are_told_unknown(bench: Bench, valkey: Valkey) -> None:
    """Where the shared store knows the load and keeps the pins to itself, nobody says that a session has no pin."""
    with redis.Redis(port=valkey.port) as raw:
        raw.execute_command("ACL SETUSER half-blind on >secret ~* +@all -get -mget")
    store = RedisStore(valkey.url.replace("//", "//half-blind:secret@"), 5000, bench.prefix)
    await store.ping()
    bench.around.store = store
    told = await bench.explain(chat("hi", {"x-session-id": "s"}))
    assert (told.pin, told.pinned_to) == ("unknown", "")
    assert told.pick
    await store.close()

"""A router over a model with two versions: what its decisions say, and where conversations go as weights change."""

import json
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from random import Random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from extproc.choose.fleet import Pool
from extproc.clock import ManualClock
from extproc.deciding import Asked
from extproc.envoy.contract import Call, Decision
from extproc.errors import DuplicateRequestError, UnknownVersionError
from extproc.explainer import Explainer
from extproc.quotas import Quotas
from extproc.rollout.state import Phase
from extproc.router import Router
from extproc.surroundings import Admitted
from extproc.telemetry.families import Families
from extproc.telemetry.quota_metrics import QuotaMetrics
from extproc.versions import life_s
from tests.unit.router.versions import (
    Conversation,
    Worker,
    fleet,
    hand_out,
    memory,
    settings,
    split_by_version,
)
from tests.unit.state.unsteady import GONE, Unsteady, mended, resilient
from tests.unit.top.test_splits import rollout

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def worker(**more: Any) -> Worker:
    """One worker on a store of its own."""
    store, clock = memory()
    return Worker("r1", settings(**more), store, clock)


async def decide(router: Router, path: str = CHAT, model: str = "m", **headers: str) -> Decision:
    """Decide on a short request; underscores of header names stand for dashes."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}], "input": "hi"}).encode()
    return await router.decide(Call("POST", path, {k.replace("_", "-"): v for k, v in headers.items()}, body))


async def test_a_decision_says_which_version_of_which_model_serves() -> None:
    """For the response header and for what is measured: model, version, unit, and the epoch of a rollout."""
    one = worker()
    told = (await decide(one.router, x_session_id="s")).metadata
    assert (told["model"], told["version"]) == ("m", "old")
    assert 0.0 <= float(told["unit"]) < 1.0
    assert "epoch" not in told
    one.follow(rollout(1.0, step=3))
    told = (await decide(one.router, x_session_id="t")).metadata
    assert (told["version"], told["epoch"]) == ("new", "r1-3")


async def test_a_decision_about_a_model_with_one_version_says_nothing_of_it() -> None:
    """Nothing is computed, told or sent there that was not before."""
    decision = await decide(worker().router, model="one")
    assert {"model", "version", "unit", "epoch"}.isdisjoint(decision.metadata)


@pytest.mark.parametrize(("share", "served"), [(0.0, b"org/m-1"), (1.0, b"org/m-2")])
@pytest.mark.parametrize("model", ["m", "gpt"])
async def test_the_body_names_the_model_as_the_versions_engines_know_it(
    share: float, served: bytes, model: str
) -> None:
    """Whatever name the client used; the decision has the model's own, by which limits go."""
    one = worker()
    one.follow(rollout(share))
    decision = await decide(one.router, model=model)
    assert decision.body is not None
    assert json.loads(decision.body)["model"].encode() == served
    assert decision.model == "m"


async def test_a_testers_answers_are_not_measured() -> None:
    """The version is the one that was asked for; no epoch stands by it, and a version that is not there is refused."""
    one = worker(testers=["*"])
    one.follow(rollout(0.05))
    told = (await decide(one.router, x_warmpath_version="new")).metadata
    assert told["version"] == "new"
    assert "epoch" not in told
    with pytest.raises(UnknownVersionError):
        await decide(one.router, x_warmpath_version="newer")


@pytest.mark.parametrize("policy", ["predicted_ttft", "least_tokens", "session_hash", "round_robin"])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, "/v1/messages"])
async def test_a_conversation_stays_where_it_began(policy: str, named: bool, path: str) -> None:
    """Under every policy, also those that keep no pins; with and without an id; whoever keeps the history."""
    one = worker(policy=policy)
    talk = Conversation("c", named=named, draw=Random(1), path=path)
    await talk.turn(one)
    one.follow(rollout(1.0, 0.25, 0.0))
    for _ in range(3):
        await talk.turn(one)
    assert talk.versions == ["old"] * 4
    later = Conversation("d", named=named, draw=Random(2), path=path)
    for _ in range(3):
        await later.turn(one)
    assert later.versions == ["new"] * 3
    one.follow(rollout(1.0, phase="retired"))
    await talk.turn(one)
    assert talk.versions[-1] == "new"


@pytest.mark.parametrize("policy", ["round_robin", "least_tokens"])
async def test_where_pins_do_not_count_they_choose_no_endpoint(policy: str) -> None:
    """A policy that passes over sessions goes on to do so: the pin tells the version, not the endpoint."""
    one = worker(policy=policy)
    talk = Conversation("c", named=True, draw=Random(1))
    picks = {(await talk.turn(one)).metadata["endpoint"] for _ in range(4)}
    assert len(picks) == 2
    assert {(outcome.session, outcome.pinned) for outcome in one.notes.outcomes} == {(False, False)}


async def test_a_session_that_has_ended_may_move() -> None:
    """Nobody remembers it any more, and nothing of it but its id can be told."""
    store, clock = memory()
    one = Worker("r1", settings(), store, clock)
    call = Call("POST", "/v1/completions", {"x-session-id": "s"}, b'{"model":"m","prompt":"hi"}')
    first = await one.answered(call)
    one.follow(rollout(1.0, 0.0))
    kept = await one.answered(call)
    clock.advance(life_s(one.around.config) + 1)
    later = await one.answered(call)
    assert [each.metadata["version"] for each in (first, kept, later)] == ["old", "old", "new"]


async def test_a_response_is_stored_in_the_pool_that_the_conversation_keeps() -> None:
    """The id that we choose for a response tells the pool which has it: also when that is not the weights' choice."""
    one = worker()
    body = {"model": "m", "input": "hi", "session_id": "s"}
    one.follow(rollout(0.0))
    await one.router.decide(Call("POST", RESPONSES, {}, json.dumps(body).encode()))
    one.follow(rollout(1.0, 0.0))
    kept = await one.router.decide(Call("POST", RESPONSES, {}, json.dumps(body).encode()))
    assert kept.body is not None
    stored = json.loads(kept.body)["request_id"]
    read = await one.router.decide(Call("GET", f"{RESPONSES}/{stored}", {}))
    assert [kept.metadata["version"], read.metadata["version"]] == ["old", "old"]
    more = {**body, "previous_response_id": stored, "session_id": "other"}
    again = await one.router.decide(Call("POST", RESPONSES, {}, json.dumps(more).encode()))
    assert again.metadata["version"] == "old"


class Counting(Unsteady):
    """Counts the looks at pins."""

    @property
    def looks(self) -> int:
        """How often a pin was looked up."""
        return self.calls.count("pinned")


async def test_the_store_is_asked_only_for_conversations_that_may_run_elsewhere() -> None:
    """Not for requests without a conversation, nor where earlier weights give the same version or this worker knows."""
    store = Counting()
    one = Worker("r1", settings(), store, store.clock)
    completion = Call("POST", "/v1/completions", {"x-request-id": "1"}, b'{"model":"m","prompt":"hi"}')
    await decide(one.router, x_session_id="s")
    one.follow(rollout(1.0))
    await decide(one.router, x_session_id="s")
    one.follow(rollout(1.0, 0.0))
    await one.router.decide(completion)
    await decide(one.router, x_session_id="s")
    assert store.looks == 0
    await decide(one.router, x_session_id="another")
    assert store.looks == 1


async def test_without_the_store_a_conversation_that_nobody_knows_goes_by_the_weights_of_now() -> None:
    """All workers come to the same version: those that began earlier, and would move, were told to all."""
    shared = Unsteady()
    workers = [Worker(f"r{n}", settings(), resilient(shared, memory()[0]), shared.clock) for n in range(2)]
    knows, other = workers
    for each in workers:
        each.follow(rollout(1.0, 0.25, 0.0))
    talk = Conversation("c", named=True, draw=Random(1))
    await talk.turn(knows)
    shared.fault = GONE
    await talk.turn(knows)
    assert talk.versions == ["new", "new"]
    strange = Conversation("d", named=True, draw=Random(2))
    for at in range(4):
        await strange.turn(workers[at % 2])
    assert strange.versions == ["new"] * 4
    assert other.around.fleet.splits["m"].weights["new"] == 1.0


async def test_without_the_store_a_worker_goes_by_the_pins_that_it_made() -> None:
    """Also where nothing of a conversation but its session can be told, as of completions."""
    shared = Unsteady()
    one = Worker("r1", settings(), resilient(shared, memory()[0]), shared.clock)
    one.follow(rollout(1.0, 0.25, 0.0))
    call = Call("POST", "/v1/completions", {"x-session-id": "s"}, b'{"model":"m","prompt":"hi"}')
    first = await one.answered(call)
    shared.fault = GONE
    assert [first.metadata["version"], (await one.answered(call)).metadata["version"]] == ["new", "new"]


@pytest.mark.parametrize("named", [True, False])
async def test_without_the_store_what_the_feed_told_of_a_conversation_counts(named: bool) -> None:
    """A worker that never saw it goes by the turns that others answered, also when the newest were not told."""
    shared = Unsteady()
    workers = [Worker(f"r{n}", settings(), resilient(shared, memory()[0]), shared.clock) for n in range(3)]
    for each in workers:
        each.follow(rollout(1.0, 0.25, 0.0))
    talk = Conversation("c", named=named, draw=Random(1))
    await talk.turn(workers[0])
    hand_out(workers)
    shared.fault = GONE
    await talk.turn(workers[0])
    for each in workers[1:]:
        await talk.turn(each)
    assert talk.versions == ["new"] * 4


async def test_twenty_turns_have_one_version_over_four_workers_while_the_share_goes_up() -> None:
    """1 -> 5 -> 25 -> 100 % and the store away in between: no conversation flips, none leaves the canary.

    All leave it together when it is rolled back.
    """
    draw, shared = Random(1), Unsteady()
    workers = [Worker(f"r{n}", settings(), resilient(shared, memory()[0]), shared.clock) for n in range(4)]

    def follow(share: float, *earlier: float, **more: Any) -> None:
        for each in workers:
            each.follow(rollout(share, *earlier, **more))

    talks: list[Conversation] = []

    async def round_of(new: int) -> None:
        """One turn of each conversation that has not had its twenty, at any worker; some begin."""
        talks.extend([Conversation(f"c{len(talks) + n}", named=bool(n % 2), draw=draw) for n in range(new)])
        for talk in talks:
            if len(talk.versions) < 20:
                await talk.turn(draw.choice(workers))
        if shared.fault is None:
            hand_out(workers)

    steps: list[tuple[float, ...]] = [(0.01, 0.0), (0.05, 0.01, 0.0), (0.25, 0.05, 0.01, 0.0)]
    steps.append((1.0, 0.25, 0.05, 0.01, 0.0))
    for step in steps:
        follow(*step)
        canary = set(split_by_version(talks).get("new", ()))
        await round_of(40)
        shared.fault = GONE
        await round_of(10)
        await round_of(0)
        for each in workers:
            store = each.around.store
            await mended(store, shared)  # type: ignore[arg-type]
        await round_of(20)
        assert canary <= split_by_version(talks)["new"]
        assert [talk.name for talk in talks if len(set(talk.versions)) > 1] == []
    for _ in range(20):
        await round_of(0)
    assert {len(talk.versions) for talk in talks} == {20}
    assert [talk.name for talk in talks if len(set(talk.versions)) > 1] == []
    assert len(split_by_version(talks)["new"]) > 40
    follow(0.0, phase="rolled_back")
    last = Conversation("c-last", named=True, draw=draw)
    for talk in [*talks, last]:
        await talk.turn(draw.choice(workers))
    assert {talk.versions[-1] for talk in talks} == {"old"}


class Full:
    """A gate before a saturated pool: its requests go to model `m`."""

    def __init__(self, pool: str) -> None:
        self._pool = pool

    def watches(self, pool: str) -> bool:
        """See `Gate.watches`."""
        return pool == self._pool

    async def admit(self, _asked: Asked, pool: Pool, _subset: AbstractSet[str] | None, _call: Call) -> Admitted:
        """See `Gate.admit`."""
        return Admitted(pool.name, 0, model="m")

    def arrived(self, admitted: Admitted) -> None:
        """See `Gate.arrived`."""

    def charged(self, pool: str, sequences: int) -> None:
        """See `Gate.charged`."""

    def settled(self, pool: str, sequences: int) -> None:
        """See `Gate.settled`."""


class Busy(Full):
    """A gate at which requests wait, once, until something else has happened.

    Attributes:
        arrivals: what was admitted and came to its end.
    """

    def __init__(self, pool: str, meanwhile: Callable[[], None]) -> None:
        super().__init__(pool)
        self.arrivals: list[str] = []
        self._meanwhile = meanwhile

    async def admit(self, _asked: Asked, pool: Pool, _subset: AbstractSet[str] | None, _call: Call) -> Admitted:
        """See `Gate.admit`."""
        self._meanwhile()
        return Admitted(pool.name, 1, 1.0, waited_s=2.0)

    def arrived(self, admitted: Admitted) -> None:
        """See `Gate.arrived`."""
        self.arrivals.append(admitted.pool)


@pytest.mark.parametrize(("phase", "expected"), [("rolled_back", "old"), ("promoted", "new")])
async def test_who_waited_for_a_version_that_was_rolled_back_goes_to_the_other(phase: Phase, expected: str) -> None:
    """What waits in the canary's queue leaves it as all others do, and what was admitted there is given up."""
    one = worker()
    one.follow(rollout(1.0))
    share = 0.0 if phase == "rolled_back" else 1.0
    one.around.gate = gate = Busy("new", lambda: one.follow(rollout(share, phase=phase)))
    decision = await decide(one.router, x_session_id="s")
    assert (decision.metadata["version"], decision.pool) == (expected, expected)
    assert decision.metadata["queued_ms"] == 2000.0
    assert gate.arrivals == ["new"]


async def test_a_model_with_versions_answers_for_a_saturated_one() -> None:
    """By its own weights and names: a version that the client asked of the other model is none of it."""
    one = worker(testers=["*"])
    one.around.gate = Full("alone")
    one.follow(rollout(1.0))
    decision = await decide(one.router, model="one", x_warmpath_version="nightly")
    assert (decision.metadata["fallback"], decision.metadata["version"]) == ("m", "new")
    assert decision.body is not None
    assert json.loads(decision.body)["model"] == "org/m-2"


async def test_a_fallback_keeps_the_version_of_a_conversation_that_runs() -> None:
    """It was answered by the old version before: the weights of now count for what begins."""
    one = worker()
    one.around.gate = Full("alone")
    first = await decide(one.router, model="one", x_session_id="s")
    one.follow(rollout(1.0, 0.0))
    second = await decide(one.router, model="one", x_session_id="s")
    assert [first.metadata["version"], second.metadata["version"]] == ["old", "old"]


async def test_an_explanation_says_which_version_and_why() -> None:
    """What would be decided now, and what was decided, in the same words; a model with one version has none."""
    one = worker(testers=["*"])
    explainer = Explainer(one.around, one.router, ManualClock())

    async def told(model: str = "m", **headers: str) -> tuple[str, str, str, str]:
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "hi"}]}).encode()
        sent = {name.replace("_", "-"): text for name, text in headers.items()}
        now = await explainer.explain(Call("POST", CHAT, sent, body))
        past = explainer.recall((await one.router.decide(Call("POST", CHAT, sent, body))).charge_id)
        for each in (now, past):
            assert (each.pool == each.version) is (model == "m")
        found = (now.model, now.version, now.version_why, now.version_by)
        assert found == (past.model, past.version, past.version_why, past.version_by)
        return found

    assert await told(x_session_id="s") == ("m", "old", "weight", "session")
    one.follow(rollout(1.0, 0.0))
    assert await told(x_session_id="s") == ("m", "old", "running", "session")
    assert await told(x_session_id="t") == ("m", "new", "weight", "session")
    assert await told(x_warmpath_version="old") == ("m", "old", "tester", "conversation")
    assert await told(model="one") == ("", "", "weight", "nobody")


async def test_a_rollout_that_is_followed_keeps_the_endpoints() -> None:
    """Only versions change in the fleet."""
    one = worker()
    one.follow(rollout(0.5))
    assert one.around.fleet.pools == fleet(one.around.config).pools


async def test_an_idempotency_key_is_one_for_all_versions() -> None:
    """Sent again while the first still runs, a request is refused, whatever version it would get by then."""
    one = worker()
    one.around.meter = Quotas(one.around, QuotaMetrics(Families(CollectorRegistry())), ManualClock())
    await decide(one.router, x_session_id="s", idempotency_key="k")
    one.follow(rollout(1.0))
    with pytest.raises(DuplicateRequestError):
        await decide(one.router, x_session_id="s", idempotency_key="k")

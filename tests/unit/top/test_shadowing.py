"""Which decisions get a shadow, and what that adds to them: never more than a header, and never a failure."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.clock import ManualClock
from extproc.config import Config
from extproc.config import Model as ModelSettings
from extproc.config import Pool as PoolSettings
from extproc.config_relay import AVOID
from extproc.config_rollouts import Shadow, Version
from extproc.envoy.contract import CAPTURE_HEADER, FALLBACK, MODEL, SHADOW_HEADER, VERSION, Call, Copy, Decision
from extproc.envoy.copies import Copies
from extproc.errors import NoEndpointError
from extproc.govern.saturation import UNKNOWN, Room
from extproc.shadow.results import Results, read
from extproc.shadow.scoring import Scorer
from extproc.shadow.sender import Letter, Sender
from extproc.shadow_jobs import Jobs
from extproc.shadowing import Shadowing
from extproc.state.memory import MemoryStore
from extproc.surroundings import Surroundings
from extproc.telemetry.families import Families
from extproc.telemetry.shadow_metrics import ShadowMetrics

ENDPOINTS = (
    Endpoint("n1", "10.0.1.1:80", 1000.0, running=5),
    Endpoint("n2", "10.0.1.2:80", 1000.0, running=2),
    Endpoint("n3", "10.0.1.3:80", 1000.0, running=0, reachable=False),
)
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
TOLD: dict[str, str | float] = {MODEL: "m", VERSION: "old", "kind": "chat", "streamed": 1.0, "prompt_tokens": 7.4}
WHOLE = json.dumps({"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}).encode()


class Post(Sender):
    """Notes what it is given, and answers it as it is told to.

    Attributes:
        sent: every letter.
        answers: until set, no answer comes.
    """

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.sent: list[Letter] = []
        self.answers = asyncio.Event()
        self.given_up = 0

    async def send(self, letter: Letter, collector: Any) -> None:
        """See `Sender.send`."""
        self.sent.append(letter)
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        collector.began(200, {"content-type": "application/json"}, 1.0)
        collector.chunk(WHOLE, 1.0)
        collector.over(1.0, complete=True)


class Stand:
    """Shadows around a decider that always takes the old version."""

    def __init__(self, **shadow: Any) -> None:
        self.clock = ManualClock()
        self.registry = CollectorRegistry()
        self.post, self.copies = Post(), Copies(self.clock, grace_s=0.0)
        self.decision = Decision("old", ("10.0.0.1:80",), metadata=TOLD, headers={"x-kept": "1"})
        self.error: Exception | None = None
        self.room: dict[str, tuple[Room, int]] = {}
        self.settled: list[str] = []
        self._charges = itertools.count()
        settings = ModelSettings(
            versions={"old": Version(pool="old", weight=1.0), "new": Version(pool="new", served_as="m-next")},
            shadow=Shadow(**{"version": "new", "share": 1.0, "mode": "compare", **shadow}),
        )
        config = Config(
            models={"m": settings, "plain": ModelSettings(pool="old")},
            pools={"old": PoolSettings(endpoints=["o:1"]), "new": PoolSettings(endpoints=["n:1"])},
        )
        old = Pool("old", "round_robin", (Endpoint("o", "10.0.0.1:80", 1000.0),))
        fleet = Fleet({"old": old, "new": Pool("new", "round_robin", ENDPOINTS)}, {"m": "old", "plain": "old"}, "old")
        self.store = MemoryStore(self.clock)
        self.around = Surroundings(config, fleet, {}, self.store, "r", lambda: "c")
        metrics, scorer = ShadowMetrics(Families(self.registry)), Scorer()
        results = Results(self.store, "w", scorer.executor)
        self.jobs = Jobs(self.around, self.post, scorer, results, metrics, self.clock)
        self.shadowing = Shadowing(
            self,
            self.around,
            self.jobs,
            self.copies,
            metrics,
            self.clock,
            lambda pool: self.room.get(pool, (UNKNOWN, 0)),
        )

    async def decide(self, call: Call) -> Decision:
        """See `Decider.decide`."""
        assert call.body
        if self.error is not None:
            raise self.error
        return msgspec.structs.replace(self.decision, charge_id=f"r-{next(self._charges)}")

    async def served(self, decision: Decision, served: str) -> None:
        """See `Decider.served`."""

    async def settle(self, decision: Decision, served: str = "") -> None:
        """See `Decider.settle`."""
        assert not served
        self.settled.append(decision.charge_id)

    async def ask(self, request_id: str = "id", body: dict[str, Any] | None = None, avoid: str = "") -> Decision:
        """What is decided of a request."""
        raw = json.dumps(BODY if body is None else body).encode()
        told = {"x-request-id": request_id, "authorization": "Bearer secret", AVOID: avoid}
        return await self.shadowing.decide(Call("POST", "/v1/chat/completions?a=1", told, raw))

    async def idle(self) -> None:
        """Return once no comparison is under way."""
        async with asyncio.timeout(10.0):
            await self.jobs.idle()

    def counted(self) -> dict[str, int]:
        """Requests that were drawn, by what became of them."""
        return {
            sample.labels["outcome"]: int(sample.value)
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == "warmpath_shadow_requests_total"
        }


@pytest_asyncio.fixture
async def stand() -> AsyncIterator[Stand]:
    """Every request is compared."""
    stand = Stand()
    yield stand
    await stand.shadowing.close()


def copy_of(body: bytes, *, complete: bool = True) -> Copy:
    """What a client got."""
    return Copy(200, {"content-type": "application/json"}, 1000.0, ((1000.0, body),), 1000.0, complete)


async def test_a_compared_request(stand: Stand) -> None:
    """It gets one header more; the shadow's least busy endpoint that serves gets it under its own name of the model."""
    decision = await stand.ask()
    assert decision.headers == {"x-kept": "1", CAPTURE_HEADER: "1"}
    assert (decision.pool, decision.destinations, decision.body) == ("old", ("10.0.0.1:80",), None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    [letter] = stand.post.sent
    assert (letter.destination, letter.path) == ("10.0.1.2:80", "/v1/chat/completions?a=1")
    assert json.loads(letter.body) == {**BODY, "model": "m-next"}
    assert not [name for name in letter.headers if name in ("authorization", "x-request-id")]
    stand.post.answers.set()
    stand.copies.give(decision.charge_id, copy_of(WHOLE))
    await stand.idle()
    assert stand.counted() == {"compared": 1}
    [result] = (await read(stand.store, "m", 0.0, 9)).results
    assert (result.id, result.primary, result.shadow, result.prompt_tokens) == ("id", "old", "new", 7)
    assert result.compared.exact is True
    assert result.answers is None
    assert stand.jobs.under_way("m") == 0
    assert stand.jobs.at == {}


async def test_a_mirrored_request() -> None:
    """It gets the name of the shadow's cluster, and nothing else happens here."""
    stand = Stand(mode="mirror")
    decision = await stand.ask()
    assert decision.headers == {"x-kept": "1", SHADOW_HEADER: "warmpath_shadow_new"}
    assert decision.capture is None
    assert stand.counted() == {"mirrored": 1}
    await asyncio.sleep(0)
    assert stand.post.sent == []


async def test_no_request_is_drawn_twice(stand: Stand) -> None:
    """A relay, or a client, that sends a request again under its id gets one shadow."""
    assert CAPTURE_HEADER in (await stand.ask("a")).headers
    assert CAPTURE_HEADER not in (await stand.ask("a")).headers
    assert CAPTURE_HEADER in (await stand.ask("b")).headers


@pytest.mark.parametrize(
    "told",
    [
        {"kind": "embedding"},
        {"kind": "other"},
        {VERSION: "new"},
        {MODEL: "gone"},
        {MODEL: "plain"},
        {FALLBACK: "m"},
    ],
)
async def test_what_is_not_the_model_s_or_cannot_be_compared_is_not_drawn(stand: Stand, told: dict[str, Any]) -> None:
    """Nothing is counted: it is of no shadow."""
    stand.decision = msgspec.structs.replace(stand.decision, metadata={**TOLD, **told})
    assert (await stand.ask()).headers == {"x-kept": "1"}
    assert stand.counted() == {}


async def test_other_requests_are_not_drawn(stand: Stand) -> None:
    """Without an id, and the second half of an answer that a relay goes on with; and decisions without versions."""
    assert CAPTURE_HEADER not in (await stand.ask("")).headers
    assert CAPTURE_HEADER not in (await stand.ask("a", avoid="10.0.0.1:80")).headers
    stand.decision = msgspec.structs.replace(stand.decision, metadata={"kind": "chat"})
    assert CAPTURE_HEADER not in (await stand.ask("b")).headers
    assert stand.counted() == {}


async def test_several_answers_are_unfit(stand: Stand) -> None:
    """They are counted, so that nobody wonders."""
    assert (await stand.ask(body={**BODY, "n": 2})).capture is None
    assert stand.counted() == {"unfit": 1}


async def test_load_is_a_reason_to_do_without(stand: Stand) -> None:
    """A full pool, a queue, the cap: each drop has its reason, and clients their decision."""
    full = Room(sequences=2.0, tokens=100.0, limit=10.0, saturated=0, waiting=0.0, near=True)
    stand.room = {"old": (full, 0)}
    await stand.ask("a")
    stand.room = {"new": (full, 0)}
    await stand.ask("b")
    stand.room = {"new": (UNKNOWN, 1)}
    await stand.ask("c")
    stand.room = {}
    for number in range(9):
        await stand.ask(f"d{number}")
    assert stand.counted() == {"primary_busy": 1, "shadow_busy": 1, "queued": 1, "over_cap": 1}
    assert stand.jobs.under_way("m") == 8


async def test_a_worker_that_is_behind_sends_no_shadow(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop that slept for 0.1 s and came back half a second later is late; and soon after it is not."""

    async def slept(seconds: float) -> None:
        stand.clock.advance(seconds + late.pop())
        if not late:
            raise asyncio.CancelledError

    monkeypatch.setattr("extproc.shadowing.asyncio.sleep", slept)
    late = [0.0, 0.5, 0.0]
    with pytest.raises(asyncio.CancelledError):
        await stand.shadowing.run()
    monkeypatch.undo()
    assert (await stand.ask("a")).capture is None
    assert stand.counted() == {"late": 1}
    monkeypatch.setattr("extproc.shadowing.asyncio.sleep", slept)
    late = [0.0] * 8
    with pytest.raises(asyncio.CancelledError):
        await stand.shadowing.run()
    monkeypatch.undo()
    assert (await stand.ask("b")).capture is not None


async def test_a_shadow_that_nobody_serves_is_left_alone(stand: Stand) -> None:
    """An endpoint that cannot be reached is not tried for a shadow's sake."""
    pools = {**stand.around.fleet.pools, "new": Pool("new", "round_robin", ENDPOINTS[2:])}
    stand.around.fleet = msgspec.structs.replace(stand.around.fleet, pools=pools)
    assert (await stand.ask()).capture is None
    assert stand.counted() == {"no_endpoint": 1}


async def test_shadows_spread_over_what_is_under_way(stand: Stand) -> None:
    """Pages are old: of three requests at once the fourth goes to the next endpoint, which has three more."""
    for number in range(5):
        await stand.ask(str(number))
    assert stand.jobs.at == {"10.0.1.2:80": 4, "10.0.1.1:80": 1}


@pytest.mark.parametrize(("copy", "outcome"), [(None, "no_copy"), (copy_of(b"{", complete=False), "cut")])
async def test_without_the_client_s_answer_the_shadow_is_given_up(
    stand: Stand, copy: Copy | None, outcome: str
) -> None:
    """Its engine works for nobody then."""
    decision = await stand.ask()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stand.copies.give(decision.charge_id, copy)
    await stand.idle()
    assert stand.counted() == {outcome: 1}
    assert stand.post.given_up == 1


async def test_a_request_that_ends_without_a_copy_ends_the_comparison(stand: Stand) -> None:
    """Envoy was restarted, or its client left before anything was answered."""
    decision = await stand.ask()
    await stand.shadowing.settle(decision)
    await stand.idle()
    assert stand.counted() == {"no_copy": 1}
    assert stand.settled == [decision.charge_id]
    assert len(stand.copies) == 0


async def test_a_fault_of_a_shadow_costs_no_decision(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    """The client's decision goes out as it was made; the log says where, and quotes nothing."""
    stand.around.fleet = msgspec.structs.replace(stand.around.fleet, pools={"new": stand.around.fleet.pools["new"]})
    decision = await stand.ask(body={**BODY, "messages": "sesame"})
    assert decision.headers == {"x-kept": "1"}
    assert "KeyError" in caplog.text
    assert "sesame" not in caplog.text


async def test_an_error_of_the_decider_is_the_client_s(stand: Stand) -> None:
    """Nothing is drawn of what is refused."""
    stand.error = NoEndpointError("none")
    with pytest.raises(NoEndpointError):
        await stand.ask()
    assert stand.counted() == {}


async def test_a_worker_that_stops_gives_all_up(stand: Stand) -> None:
    """Nobody waits for a shadow."""
    await stand.ask()
    await asyncio.sleep(0.01)
    await stand.shadowing.close()
    assert stand.post.given_up == 1
    assert stand.jobs.under_way("m") == 0

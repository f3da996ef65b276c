"""The values of a decision: what is asked, which pins count, what the store gets and what the answer brings back."""

from typing import Any

import msgspec
import pytest

from extproc import continuing, deciding, pools
from extproc.choose import chooser
from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.config import Config
from extproc.continuing import Pins
from extproc.deciding import Asked, Facts, Moment
from extproc.envoy.contract import BRIEF, CONTINUED, Decision
from extproc.request.model import Request, RouteKind
from extproc.rollout.split import Choice, Why
from extproc.state.feed import Answered, Turned
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.learn import PRIOR_OUTPUT
from extproc.state.values import Reservation, Reserve
from tests.unit.top.parts import config

AT = Moment(turn=1, now=100.0, rare_gap=1.0)

A, B = Endpoint("a", "10.0.0.1:80", 8000.0), Endpoint("b", "10.0.0.2:80", 8000.0)
CONTINUES = Request(RouteKind.RESPONSES, tenant="t", previous_response="resp_1", response="resp_2")


def pool(policy: str = "predicted_ttft", *endpoints: Endpoint) -> Pool:
    """A pool of endpoints a and b."""
    return Pool("main", policy, endpoints or (A, B))


def pins(request: Request, settings: Config | None = None, **session: Any) -> Pins:
    """The pins of a request under these session settings."""
    return continuing.pins_of(settings or config(routing={"session": session}), pool(), request)


def reserved(request: Request, policy: str = "predicted_ttft", *endpoints: Endpoint) -> Reserve:
    """The reservation of a request of 4,000 bytes."""
    settings, members = config(), pool(policy, *endpoints)
    ask = deciding.ask_of(Asked(request, (), 4000.0), PoolKnowledge(Priors()), AT)
    plan = chooser.plan(ask, members, deciding.weights_of(settings))
    kept = continuing.pins_of(settings, members, request)
    return deciding.reserve_of(settings, members, plan, ask, kept, ("r1", "c1"))


def decision(request: Request, *, read: bool = True) -> Decision:
    """The decision on a request of 4,000 bytes that endpoint a got."""
    known, members = PoolKnowledge(Priors()), pool()
    asked = Asked(request, (), 4000.0, read=read)
    ask = deciding.ask_of(asked, known, AT)
    plan = chooser.plan(ask, members, deciding.weights_of(config()))
    picked = next(each for each in plan.candidates if each.endpoint.id == "a")
    return deciding.decision_of(
        asked, ask, members, deciding.order_of(plan, picked), Reservation("a"), Facts("c1", 5.0)
    )


def after_response(tenant: str = "t") -> PoolKnowledge:
    """Knowledge of a stored response of 3,000 prompt tokens and 200 of answer, at endpoint b."""
    known = PoolKnowledge(Priors())
    digest = continuing.response_digest(Request(tenant=tenant), "resp_1")
    known.apply(Turned(digest, "b", 3000.0, 200.0))
    return known


def test_a_named_session_has_one_pin() -> None:
    """One key is honoured and renewed, whatever turn it is; strict only when configured."""
    first = Request(RouteKind.CHAT, session="s", turn=b"1" * 16)
    later = Request(RouteKind.CHAT, session="s", turn=b"2" * 16, follows=b"1" * 16)
    assert pins(first) == pins(later)
    assert (pins(first).next_key, pins(first).strict) == ("", False)
    assert pins(first, strict=True).strict
    assert pins(Request(RouteKind.CHAT, session="other")).key != pins(first).key


def test_an_unnamed_conversation_is_a_chain_of_pins() -> None:
    """A turn is pinned under its own name; the next turn asks for that one, and is pinned under another."""
    first = pins(Request(RouteKind.CHAT, turn=b"1" * 16))
    second = pins(Request(RouteKind.CHAT, turn=b"2" * 16, follows=b"1" * 16))
    assert first.key == ""
    assert second.key == first.next_key != ""
    assert second.next_key not in {"", second.key}


def test_nothing_is_inferred_when_that_is_switched_off() -> None:
    """`infer: false`: only what the client names is pinned; a request that is no conversation has nothing to infer."""
    turn = Request(RouteKind.CHAT, turn=b"2" * 16, follows=b"1" * 16)
    assert pins(turn, infer=False) == Pins()
    assert pins(Request(RouteKind.CHAT, session="s", turn=b"1" * 16), infer=False).key
    assert pins(Request(RouteKind.EMBEDDING)) == Pins()


def test_a_stored_response_is_continued_where_it_is_and_nowhere_else() -> None:
    """Its pin is strict, and the continuation is pinned under its own id; a first response has nothing to honour."""
    first = pins(Request(RouteKind.RESPONSES, tenant="t", response="resp_1"))
    second = pins(CONTINUES)
    assert (first.key, first.strict) == ("", False)
    assert second.key == first.next_key != ""
    assert second.strict
    read = pins(Request(RouteKind.OTHER, tenant="t", previous_response="resp_1"))
    assert (read.key, read.next_key, read.strict) == (second.key, "", True)


@pytest.mark.parametrize(
    "request_",
    [
        Request(RouteKind.CHAT, session="s"),
        Request(RouteKind.CHAT, turn=b"2" * 16, follows=b"1" * 16),
        CONTINUES,
    ],
    ids=["session", "turn", "response"],
)
def test_tenants_and_pools_share_no_pin(request_: Request) -> None:
    """The same names of another tenant, or in another pool, are other sessions; so they are under another secret."""
    mine = pins(request_)
    theirs = pins(msgspec.structs.replace(request_, tenant="other"))
    elsewhere = continuing.pins_of(config(), Pool("second", "predicted_ttft", (A,)), request_)
    secret = pins(request_, secret="key")
    for other in (theirs, elsewhere, secret):
        assert not {mine.key, mine.next_key} & {other.key, other.next_key} - {""}


def test_kinds_of_pins_with_one_name_are_apart() -> None:
    """A client cannot take a stored response's pin by naming its session like it."""
    named = pins(Request(RouteKind.CHAT, tenant="t", session="resp_1"))
    assert named.key != pins(CONTINUES).key


def test_policies_without_pins_still_keep_stored_responses() -> None:
    """A rotation keeps no session, but only one engine can continue a response: its pins are written and honoured."""
    assert reserved(Request(RouteKind.CHAT, session="s"), "round_robin").pin_key == ""
    first = reserved(Request(RouteKind.RESPONSES, tenant="t", response="resp_1"), "round_robin")
    follow = reserved(CONTINUES, "round_robin")
    assert follow.pin_key == first.next_pin_key != ""
    assert follow.strict


def test_the_floor_of_an_engines_queue_reaches_the_store() -> None:
    """What the engine's own queue proves is in the reservation, endpoint by endpoint."""
    queued = msgspec.structs.replace(A, floor_tokens=1200.0)
    offered = reserved(Request(RouteKind.CHAT), "predicted_ttft", queued, B).candidates
    assert {each.endpoint: each.floor_tokens for each in offered} == {"a": 1200.0, "b": 0.0}


def test_all_answers_that_are_asked_for_are_charged() -> None:
    """`n` sequences, each with the output that is expected of one answer, `max_tokens` at the most."""
    reserve = reserved(Request(RouteKind.CHAT, n=8, max_tokens=100))
    assert (reserve.sequences, reserve.output_tokens) == (8, 800.0)
    assert reserved(Request(RouteKind.CHAT)).output_tokens == PRIOR_OUTPUT


@pytest.mark.parametrize("kind", [RouteKind.EMBEDDING, RouteKind.RERANK, RouteKind.SCORE])
def test_what_generates_nothing_is_charged_no_output(kind: RouteKind) -> None:
    """Embeddings and scores end with their prefill."""
    assert reserved(Request(kind)).output_tokens == 0.0


def test_the_prompt_of_a_continued_response_counts_the_stored_conversation() -> None:
    """The body holds what is new; the engine puts the rest in front, which one endpoint has and no other."""
    ask = deciding.ask_of(Asked(CONTINUES, (1, 2), 400.0), after_response(), AT)
    assert ask.prompt_tokens == 100.0 + 3200.0
    assert ask.matched_tokens == {"b": 3200.0}
    stranger = deciding.ask_of(Asked(CONTINUES, (1, 2), 400.0), after_response(tenant="other"), AT)
    assert (stranger.prompt_tokens, dict(stranger.matched_tokens)) == (100.0, {})


def test_a_continued_response_teaches_no_bytes_per_token() -> None:
    """The engine reports the tokens of a whole conversation, of which the body held the end; nor does a body unread."""
    assert decision(CONTINUES).metadata["prompt_bytes"] == -1.0
    assert decision(Request(RouteKind.CHAT), read=False).metadata["prompt_bytes"] == -1.0
    assert decision(Request(RouteKind.CHAT)).metadata["prompt_bytes"] == 4000.0


def test_a_request_without_a_model_goes_to_the_pool_of_its_response() -> None:
    """Reading names an id alone. Ours tell their pool at once, the client's once answered; a named model goes first."""
    both = {name: Pool(name, "predicted_ttft", (A, B)) for name in ("first", "second")}
    fleet = Fleet(both, {"m": "first", "n": "second"}, "first")
    knowledge = {"first": PoolKnowledge(Priors()), "second": after_response()}
    read = Request(tenant="t", previous_response="resp_1")
    for request, pool_name in (
        (read, "second"),
        (msgspec.structs.replace(read, tenant="other"), "first"),
        (msgspec.structs.replace(read, previous_response="resp_9"), "first"),
        (msgspec.structs.replace(read, model="m"), "first"),
        (Request(), "first"),
        (msgspec.structs.replace(read, previous_response=pools.response_id("resp_7", "second")), "second"),
        (msgspec.structs.replace(read, previous_response=pools.response_id("resp_1", "first")), "first"),
    ):
        assert pools.pool_of(request, fleet, knowledge).name == pool_name


def test_turns_and_stored_responses_are_told_apart_by_tenant() -> None:
    """A conversation goes by its digest; a stored response by its id and tenant, on both ends of a turn."""
    chat = Request(RouteKind.CHAT, turn=b"2" * 16, follows=b"1" * 16)
    assert (continuing.turn_of(chat), continuing.follows_of(chat)) == (b"2" * 16, b"1" * 16)
    first = Request(RouteKind.RESPONSES, tenant="t", response="resp_1", turn=b"1" * 16)
    assert continuing.turn_of(first) == continuing.follows_of(CONTINUES)
    assert continuing.follows_of(msgspec.structs.replace(CONTINUES, tenant="u")) != continuing.turn_of(first)


def test_a_session_has_one_home_and_so_have_requests_that_begin_alike() -> None:
    """Named: by tenant and id. Unnamed: by the beginning of the prompt. Neither: one further for each request."""
    known = PoolKnowledge(Priors())

    def home(request: Request, blocks: tuple[int, ...] = (), turn: int = 1) -> int:
        return deciding.ask_of(Asked(request, blocks, 40.0), known, Moment(turn, 0.0, 1.0)).home

    named = Request(RouteKind.CHAT, session="s")
    assert home(named, (1,), 1) == home(named, (2, 3), 2) != home(msgspec.structs.replace(named, tenant="t"))
    assert home(Request(RouteKind.CHAT), (7, 8), 1) == home(Request(RouteKind.CHAT), (7, 9), 2) == 7
    assert [home(Request(), turn=turn) for turn in (1, 2)] == [1, 2]


def test_a_prediction_goes_by_the_speed_that_was_learnt() -> None:
    """Neither the share that is believed nor the slowing-in of an endpoint makes its first token later."""
    usual = Endpoint("a", "10.0.0.1:80", 0.8 * 10_000.0, overhead_ms=30.0)
    young = msgspec.structs.replace(usual, rate=0.8 * 10_000.0 * 0.1, slowed=0.1)
    for endpoint in (usual, young):
        assert deciding.predicted_ttft_ms(endpoint, 2000.0, 500.0, 0.8) == pytest.approx(30.0 + 250.0)


def test_the_fallbacks_are_the_next_cheapest() -> None:
    """Envoy gets the pick, then three others by their cost, however they stand in the tie order."""
    members = pool("predicted_ttft", *(Endpoint(f"e{at}", f"10.0.0.{at}:80", 1000.0 * at) for at in range(1, 7)))
    asked = Asked(Request(RouteKind.CHAT), (), 4000.0)
    ask = deciding.ask_of(asked, PoolKnowledge(Priors()), AT)
    plan = chooser.plan(ask, members, deciding.weights_of(config()))
    picked = next(each for each in plan.candidates if each.endpoint.id == "e2")
    made = deciding.decision_of(
        asked, ask, members, deciding.order_of(plan, picked), Reservation("e2"), Facts("c1", 5.0)
    )
    assert made.destinations == ("10.0.0.2:80", "10.0.0.6:80", "10.0.0.5:80", "10.0.0.4:80")


def test_an_answer_teaches_the_output_that_is_expected() -> None:
    """What is charged for output follows what prompts of the pool are answered with."""
    known = PoolKnowledge(Priors())
    for at in range(200):
        known.apply(Answered(f"c{at}", "a", -1.0, -1.0, 400.0, 100.0, output_tokens=10.0))
    assert deciding.ask_of(Asked(Request(RouteKind.CHAT, n=2), (), 400.0), known, AT).output_tokens < 50.0


def test_how_rare_a_prompt_is_is_told_by_the_longest_beginning_that_anybody_holds() -> None:
    """Blocks 1 and 2 are at `a`: their last use counts, what comes behind it does not, and asking is no use."""
    known = PoolKnowledge(Priors())
    known.decided("c0", "a", (1, 2))
    asked = Asked(Request(RouteKind.CHAT, max_tokens=100), (1, 2, 3, 4), 1024.0)  # an answer of a second
    fresh = deciding.ask_of(asked, known, Moment(1, 10.0, rare_gap=2.0))
    assert (fresh.shared_block, fresh.rarity) == (2, 1.0)
    known.heat.used(2, 10.0)
    for _ in range(2):
        assert deciding.ask_of(asked, known, Moment(2, 10.5, rare_gap=2.0)).rarity == 0.25
    nobody = deciding.ask_of(Asked(Request(RouteKind.CHAT), (9,), 256.0), known, AT)
    assert (nobody.shared_block, nobody.rarity) == (0, 0.0)


@pytest.mark.parametrize(
    ("request_", "why", "reservation", "continued"),
    [
        (Request(RouteKind.CHAT), "weight", Reservation("a"), False),
        (Request(RouteKind.CHAT, follows=b"1" * 16), "weight", Reservation("a"), True),
        (Request(RouteKind.RESPONSES, previous_response="resp_1"), "response", Reservation("a"), True),
        (Request(RouteKind.CHAT, session="s"), "weight", Reservation("a", pinned=True), True),
        (Request(RouteKind.CHAT, session="s"), "weight", Reservation("a", moved=True), True),
        (Request(RouteKind.CHAT, session="s"), "running", Reservation("a"), True),
    ],
)
def test_a_conversation_that_had_begun_is_told(
    request_: Request, why: Why, reservation: Reservation, continued: bool
) -> None:
    """By its earlier turns, its stored response, its pin, or the version that it runs on; of models with versions."""
    known, members = PoolKnowledge(Priors()), pool()
    choice = Choice("m", "two", "main", 0.5, "r1-0", why=why)
    asked = Asked(request_, (), 4000.0, choice=choice)
    ask = deciding.ask_of(asked, known, AT)
    plan = chooser.plan(ask, members, deciding.weights_of(config()))
    order = deciding.order_of(plan, plan.candidates[0])
    told = deciding.decision_of(asked, ask, members, order, reservation, Facts("c1", 5.0)).metadata
    assert (told.get(CONTINUED) == 1.0) is continued
    alone = msgspec.structs.replace(asked, choice=None)
    assert CONTINUED not in deciding.decision_of(alone, ask, members, order, reservation, Facts("c1", 5.0)).metadata


@pytest.mark.parametrize(("max_tokens", "brief"), [(None, False), (1, True), (2, False)])
def test_an_answer_of_one_token_that_was_asked_for_is_told(max_tokens: int | None, brief: bool) -> None:
    """Else it would look empty; of models with versions alone."""
    known, members = PoolKnowledge(Priors()), pool()
    asked = Asked(Request(RouteKind.CHAT, max_tokens=max_tokens), (), 4000.0, choice=Choice("m", "two", "main"))
    ask = deciding.ask_of(asked, known, AT)
    plan = chooser.plan(ask, members, deciding.weights_of(config()))
    order = deciding.order_of(plan, plan.candidates[0])
    told = deciding.decision_of(asked, ask, members, order, Reservation("a"), Facts("c1", 5.0)).metadata
    assert (told.get(BRIEF) == 1.0) is brief
    alone = msgspec.structs.replace(asked, choice=None)
    assert BRIEF not in deciding.decision_of(alone, ask, members, order, Reservation("a"), Facts("c1", 5.0)).metadata

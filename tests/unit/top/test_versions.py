"""The version of a request, as values: what it is chosen for, testers, aliases, stored responses, pools that fail."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from extproc import pools, versions
from extproc.choose.fleet import Endpoint, Fleet, Pool
from extproc.clock import ManualClock
from extproc.config import Config
from extproc.errors import StoreError, UnknownModelError, UnknownVersionError
from extproc.request.conversation import turns_before
from extproc.request.model import Request, RouteKind
from extproc.request.shapes import parse, peek
from extproc.rollout.split import Choice
from extproc.splits import fleet_of, splits_of
from extproc.state.feed import Turned
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from extproc.versions import Around, Placed
from tests.unit.top.parts import config

POOLS = ("old", "new", "third", "alone")
HEADER = "x-warmpath-version"


def settings(weights: Mapping[str, float] | None = None, testers: tuple[str, ...] = (), **model: Any) -> Config:
    """Model `m`, also `gpt`, with versions `old`, `new` and `third` in pools of their names, and model `one`."""
    shares = weights or {"old": 0.5, "new": 0.5}
    made = {name: {"pool": name, "weight": shares.get(name, 0.0)} for name in POOLS[:3]}
    return config(
        models={"m": {"versions": made, "aliases": ["gpt"], **model}, "one": {"pool": "alone", "aliases": ["uno"]}},
        pools={name: {"endpoints": ["10.0.0.1:80"]} for name in POOLS},
        rollouts={"testers": list(testers)},
    )


def around(config: Config, without: tuple[str, ...] = (), **endpoint: Any) -> Around:
    """One endpoint in each pool; those `without` an endpoint that may serve have one of such a state."""

    def members(at: int, pool: str) -> tuple[Endpoint, ...]:
        state = (endpoint or {"asleep": True}) if pool in without else {}
        return (Endpoint(f"e-{pool}", f"10.0.0.{at}:80", 1000.0, **state),)

    found = {pool: Pool(pool, "predicted_ttft", members(at, pool)) for at, pool in enumerate(POOLS)}
    knowledge = {pool: PoolKnowledge(Priors()) for pool in POOLS}
    return Around(fleet_of(found, config, splits_of(config, {})), knowledge, config)


def chat(*texts: str, model: str | None = "m", tenant: str = "", **more: Any) -> Request:
    """A chat whose messages take turns, the user's first."""
    headers = {"x-warmpath-tenant": tenant} if tenant else {}
    headers |= {"x-session-id": more.pop("session")} if "session" in more else {}
    roles = ("user", "assistant")
    body = {"messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)], **more}
    body |= {"model": model} if model else {}
    return parse("/v1/chat/completions", headers, json.dumps(body).encode())


def placed(request: Request, here: Around, **headers: str) -> Placed:
    """Where the request goes; underscores of header names stand for dashes."""
    return versions.placed(request, {name.replace("_", "-"): value for name, value in headers.items()}, here)


def choice(request: Request, here: Around, **headers: str) -> Choice:
    """The version that it gets."""
    found = placed(request, here, **headers)
    assert found.choice is not None
    assert found.pool.name == found.choice.pool
    return found.choice


def test_one_session_has_one_unit_whatever_it_says_and_another_tenants_has_another() -> None:
    """The unit is of (model, tenant, session) alone: not of the prompt, nor of the request."""
    here = around(settings())
    one = choice(chat("a", session="s", tenant="t"), here, x_request_id="1")
    same = choice(chat("b", "c", "d", session="s", tenant="t"), here, x_request_id="2")
    assert (one.unit, one.version, one.by) == (same.unit, same.version, "session")
    assert one.unit != choice(chat("a", session="s", tenant="u"), here).unit
    assert one.unit != choice(chat("a", session="r", tenant="t"), here).unit


def test_two_models_draw_apart() -> None:
    """The model's name is part of the digest: a session in one model's canary is not in all of them."""
    both = {"old": {"pool": "old", "weight": 1.0}, "new": {"pool": "new", "weight": 1.0}}
    here = around(
        config(models={"m": {"versions": both}, "n": {"versions": both}}, pools=msgspec.to_builtins(settings().pools))
    )
    assert choice(chat("a", session="s"), here).unit != choice(chat("a", session="s", model="n"), here).unit


def test_another_secret_draws_other_units() -> None:
    """Who does not have the secret cannot tell which version a session gets."""
    plain, keyed = settings(), settings()
    session = msgspec.structs.replace(keyed.routing.session, secret="s" * 100)
    keyed = msgspec.structs.replace(keyed, routing=msgspec.structs.replace(keyed.routing, session=session))
    request = chat("a", session="s")
    assert choice(request, around(plain)).unit != choice(request, around(keyed)).unit


def test_a_conversation_without_an_id_has_one_unit_for_all_its_turns() -> None:
    """Twenty turns share the first message; a conversation that begins otherwise has another unit."""
    here, texts = around(settings()), ["hello"]
    units = set()
    for turn in range(20):
        units.add(choice(chat(*texts, tools=[{"type": "function", "function": {"name": f"f{turn}"}}]), here).unit)
        texts += [f"answer {turn}", f"question {turn}"]
    assert len(units) == 1
    assert choice(chat("hello!"), here).unit not in units
    assert choice(chat("hello", tenant="t"), here).unit not in units
    assert choice(chat("hello"), here).by == "conversation"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_conversations_of_other_apis_have_one_unit_too(path: str) -> None:
    """Anthropic's messages, and responses whose client sends all of the conversation again."""
    here, units = around(settings()), set()
    field = "messages" if path.endswith("messages") else "input"
    system: dict[str, Any] = {"system": "be brief"} if field == "messages" else {"instructions": "be brief"}
    said = [{"role": "user", "content": "hello"}]
    for turn in range(5):
        body = {"model": "m", "max_tokens": 9, **system, field: said}
        request = parse(path, {}, json.dumps(body).encode())
        assert not request.flaw
        units.add((choice(request, here).unit, choice(request, here).by))
        said = [*said, {"role": "assistant", "content": f"{turn}"}, {"role": "user", "content": "on"}]
    assert [by for _, by in units] == ["conversation"]


def test_without_a_session_the_tenant_has_a_unit_and_without_that_the_request() -> None:
    """A completion is no conversation: its tenant stays together; requests of nobody are each drawn anew."""
    here = around(settings())

    def completion(tenant: str) -> Request:
        headers = {"x-warmpath-tenant": tenant} if tenant else {}
        return parse("/v1/completions", headers, b'{"model":"m","prompt":"hi"}')

    assert {choice(completion("t"), here, x_request_id=str(n)).unit for n in range(9)} == {
        choice(completion("t"), here).unit
    }
    assert choice(completion("t"), here).by == "tenant"
    assert len({choice(completion(""), here, x_request_id=str(n)).unit for n in range(9)}) == 9
    assert choice(completion(""), here, x_request_id="1").by == "request"
    nobody = choice(completion(""), here)
    assert (nobody.by, nobody.version) == ("nobody", "old")


@pytest.mark.parametrize(("split_by", "expected"), [("tenant", "tenant"), ("request", "request")])
def test_a_model_can_be_split_by_tenant_or_by_request(split_by: str, expected: str) -> None:
    """A session then counts for nothing; without a tenant each request is drawn anew."""
    here = around(settings(split_by=split_by))
    assert choice(chat("a", session="s", tenant="t"), here, x_request_id="1").by == expected
    assert choice(chat("a", session="s"), here, x_request_id="1").by == "request"


def test_a_prompt_is_read_only_where_the_version_follows_from_it() -> None:
    """A policy that passes over prompts leads to a second look only for conversations that nobody names."""
    here = around(settings())

    def needs(body: bytes, path: str = "/v1/chat/completions", **headers: str) -> bool:
        return versions.needs_prompt(peek(path, headers, body), here)

    assert needs(b'{"model":"m"}')
    assert needs(b'{"model":"gpt"}')
    assert needs(b"{}")
    assert not needs(b'{"model":"one"}')
    assert not needs(b'{"model":"who"}')
    assert not needs(b'{"model":"m"}', path="/v1/completions")
    assert not needs(b'{"model":"m","session_id":"s"}')


def test_an_alias_is_the_model_under_another_name() -> None:
    """Limits, rules and versions go by the model's own name; the name in the body is kept for whoever rewrites it."""
    here = around(settings())
    found = placed(chat("a", session="s", model="gpt"), here)
    assert (found.request.model, found.named) == ("m", "gpt")
    assert found.choice == choice(chat("a", session="s"), here)
    single = placed(chat("a", model="uno"), here)
    assert (single.request.model, single.named, single.pool.name, single.choice) == ("one", "uno", "alone", None)
    with pytest.raises(UnknownModelError):
        placed(chat("a", model="due"), here)


@pytest.mark.parametrize("version", ["old", "new", "third"])
@pytest.mark.parametrize("testers", [("t",), ("*",)])
def test_a_tester_gets_the_version_that_the_header_names(version: str, testers: tuple[str, ...]) -> None:
    """Also one without traffic; the choice says that it was asked for."""
    here = around(settings(testers=testers))
    found = choice(chat("a", session="s", tenant="t"), here, x_warmpath_version=f" {version} ")
    assert (found.version, found.asked, found.why, found.earlier) == (version, True, "tester", ())


@pytest.mark.parametrize("tenant", ["", "u"])
def test_nobody_else_can_choose(tenant: str) -> None:
    """The header of other tenants, and of clients without one, counts for nothing, whatever it says."""
    here, request = around(settings(testers=("t",))), chat("a", session="s", tenant=tenant)
    usual = choice(request, here)
    for version in ("old", "new", "third", "fourth"):
        assert choice(request, here, x_warmpath_version=version) == usual


def test_a_version_that_there_is_not_is_an_error_that_names_those_there_are() -> None:
    """400, with the names; a long text is cut."""
    here = around(settings(testers=("*",)))
    with pytest.raises(UnknownVersionError, match=r"`x{64}`.*`old`, `new`, `third`") as caught:
        choice(chat("a"), here, x_warmpath_version="x" * 1000)
    assert (caught.value.status, caught.value.reason) == (400, "unknown_version")


def test_a_stored_response_is_continued_and_read_where_it_is() -> None:
    """Whatever the weights, and whatever a tester asks for: no other engine has it."""
    here = around(settings({"old": 1.0}, testers=("*",)))
    stored = pools.response_id("resp_1", "new")
    body = {"model": "m", "input": "go on", "previous_response_id": stored}
    found = choice(parse("/v1/responses", {}, json.dumps(body).encode()), here, x_warmpath_version="old")
    assert (found.version, found.why, found.asked) == ("new", "response", False)
    read = choice(parse(f"/v1/responses/{stored}", {}, b""), here)
    assert (read.model, read.version) == ("m", "new")
    elsewhere = placed(parse(f"/v1/responses/{pools.response_id('resp_1', 'alone')}", {}, b""), here)
    assert (elsewhere.pool.name, elsewhere.choice) == ("alone", None)


def test_a_response_of_unknown_place_is_looked_for_in_every_version() -> None:
    """Its id was chosen by the client, and this worker did not hear of it: the store's pins are to be asked."""
    here = around(settings({"old": 1.0}))
    body = {"model": "m", "input": "go on", "previous_response_id": "mine"}
    found = choice(parse("/v1/responses", {}, json.dumps(body).encode()), here)
    assert (found.version, found.earlier) == ("old", (("new", "new"), ("third", "third")))


def test_a_request_that_names_no_model_gets_a_version_of_the_first() -> None:
    """An engine would answer it; what is no API goes to the main version, and draws nothing."""
    here = around(settings({"old": 0.1, "new": 0.9}))
    assert {choice(chat("a", session=str(n), model=None), here).version for n in range(99)} == {"old", "new"}
    other = placed(parse("/metrics", {}, b""), here)
    assert (other.pool.name, other.choice) == ("new", None)


@pytest.mark.parametrize("state", [{"asleep": True}, {"reachable": False}, {"breaker": "open"}, {"draining": True}])
def test_while_a_version_cannot_serve_another_one_does(state: dict[str, Any]) -> None:
    """Its share goes to the main version, in place of a 503; it says so, and comes back with the first endpoint."""
    weights = {"old": 0.6, "new": 0.3, "third": 0.1}
    usual, without = around(settings(weights)), around(settings(weights), ("new",), **state)
    for session in map(str, range(50)):
        request = chat("a", session=session)
        before, after = choice(request, usual), choice(request, without)
        if before.version == "new":
            assert (after.version, after.pool, after.why) == ("old", "old", "no_endpoint")
        else:
            assert after == before


def test_the_old_version_serves_while_one_that_has_all_cannot() -> None:
    """Its engines stay up for the conversations on it until it is retired: better than a 503 for everybody."""
    here = around(settings({"new": 1.0}), ("new",))
    split = here.fleet.splits["m"]
    found = choice(chat("a", session="s"), here)
    assert versions.available(found, split, here.fleet) == found
    kept = msgspec.structs.replace(split, earlier=({"old": 0.75, "new": 0.25}, {"old": 1.0, "new": 0.0}))
    assert versions.available(found, kept, here.fleet).version == "old"
    third = msgspec.structs.replace(kept, weights={"new": 0.9, "third": 0.1})
    assert versions.available(found, third, here.fleet).version == "third"


def test_the_next_best_version_serves_while_the_main_one_cannot() -> None:
    """By weight; a version without traffic never does, and when all are gone the choice stays."""
    weights = {"old": 0.6, "new": 0.4}
    session = next(
        n for n in map(str, range(99)) if choice(chat("a", session=n), around(settings(weights))).version == "old"
    )
    request = chat("a", session=session)
    assert choice(request, around(settings(weights), ("old",))).version == "new"
    gone = choice(request, around(settings(weights), ("old", "new")))
    assert (gone.version, gone.why) == ("old", "weight")


def test_who_asked_for_a_version_gets_no_other() -> None:
    """A tester wants that one or an error; a stored response is nowhere else."""
    here = around(settings({"old": 1.0}, testers=("*",)), ("new",))
    assert choice(chat("a"), here, x_warmpath_version="new").version == "new"
    body = {"model": "m", "input": "go on", "previous_response_id": pools.response_id("resp_1", "new")}
    assert choice(parse("/v1/responses", {}, json.dumps(body).encode()), here).version == "new"


def test_a_fleet_without_versions_chooses_none() -> None:
    """One pool, no choice."""
    here = around(settings())
    single = Around(Fleet(here.fleet.pools, {"m": "old"}, "old"), here.knowledge, here.config)
    assert placed(chat("a"), single) == Placed(chat("a"), here.fleet.pools["old"])
    assert chat("a").kind is RouteKind.CHAT


class Silent(MemoryStore):
    """A store that does not answer."""

    async def pinned(self, pool: str, pin_key: str) -> str:
        """Fail."""
        raise StoreError(f"no answer from {pool}, of {len(pin_key)} digits")


async def pin(store: MemoryStore, here: Around, request: Request, *names: str) -> None:
    """Have the conversation of a request run in these pools."""
    for name in names:
        key = versions.conversation_key(here.config, here.fleet.pools[name], request)
        await store.pin(name, key, "e", 60_000)


async def moved(store: MemoryStore, here: Around, request: Request, digest: bytes = b"") -> Choice:
    """The version of a request that went to `old`, then to `third`, and by the weights of now goes to `new`."""
    earlier = (("third", "third"), ("old", "old"))
    before = Choice("m", "new", "new", epoch="r-3", earlier=earlier, by="session", digest=digest)
    found = await versions.settled(before, request, here, store, 0.0)
    assert found.earlier == ()
    return found


@pytest.mark.parametrize(
    ("pinned", "expected"),
    [((), "new"), (("new",), "new"), (("old",), "old"), (("third",), "third"), (("old", "third"), "third")],
)
async def test_a_conversation_is_looked_for_where_earlier_weights_put_it(
    pinned: tuple[str, ...], expected: str
) -> None:
    """The newest of them first; found nowhere, it begins by the weights of now. The epoch stays: it is measured."""
    store, here, request = MemoryStore(ManualClock()), around(settings()), chat("a", session="s")
    await pin(store, here, request, *pinned)
    found = await moved(store, here, request)
    assert (found.version, found.pool, found.epoch) == (expected, expected, "r-3")
    assert found.why == ("weight" if expected == "new" else "running")


async def test_without_the_store_what_nobody_knows_goes_by_the_weights_of_now() -> None:
    """As with a store that has no pin: what ran when the weights changed is known to all, so this began later."""
    here, request = around(settings()), chat("a", session="s")
    assert (await moved(Silent(ManualClock()), here, request)).version == "new"


@pytest.mark.parametrize("version", ["old", "third"])
async def test_without_the_store_a_turn_that_others_told_of_counts(version: str) -> None:
    """A conversation that carries its history is recognised by the newest turn whose answer is known."""
    here, request = around(settings()), chat("a", "b", "c", session="s")
    here.knowledge[version].apply(Turned(turns_before(request)[0], "e", 10.0, 5.0))
    assert (await moved(Silent(ManualClock()), here, request)).version == version


async def test_where_a_conversation_ran_last_counts_before_the_store() -> None:
    """This worker sent it there, or was told so: no pin is looked for, and of two versions the later one has it."""
    store, here, request = MemoryStore(ManualClock()), around(settings()), chat("a", session="s")
    await pin(store, here, request, "third")
    digest = bytes(16)
    here.knowledge["old"].conversations.used(digest, 1.0)
    assert (await moved(store, here, request, digest)).version == "old"
    here.knowledge["third"].conversations.told(digest, 2.0)
    assert (await moved(Silent(ManualClock()), here, request, digest)).version == "third"
    here.knowledge["new"].conversations.used(digest, 3.0)
    assert (await moved(store, here, request, digest)).version == "new"


async def test_without_the_store_a_response_goes_by_the_weights() -> None:
    """No version is more likely to have it; nothing was told of where it is."""
    body = {"model": "m", "input": "go on", "previous_response_id": "mine"}
    request = parse("/v1/responses", {}, json.dumps(body).encode())
    assert (await moved(Silent(ManualClock()), around(settings()), request)).version == "new"


async def test_a_response_whose_pin_is_found_is_continued_there() -> None:
    """The store knows what this worker has not heard of."""
    store, here = MemoryStore(ManualClock()), around(settings({"new": 1.0}))
    body = {"model": "m", "input": "first", "request_id": "mine"}
    await pin(store, here, parse("/v1/responses", {}, json.dumps(body).encode()), "third")
    after = parse(
        "/v1/responses", {}, json.dumps({"model": "m", "previous_response_id": "mine", "input": "x"}).encode()
    )
    found = await versions.settled(choice(after, here), after, here, store, 0.0)
    assert (found.version, found.why) == ("third", "response")


async def test_a_conversation_leaves_a_version_that_cannot_serve() -> None:
    """Its pool has no endpoint left: another version answers it rather than nobody."""
    store, here, request = MemoryStore(ManualClock()), around(settings(), ("third",)), chat("a", session="s")
    await pin(store, here, request, "third")
    found = await moved(store, here, request)
    assert (found.version, found.why) == ("old", "no_endpoint")


async def test_what_belongs_to_no_conversation_is_not_looked_for() -> None:
    """A completion of nobody goes by the weights of now; the store, which would fail, is not asked."""
    request = parse("/v1/completions", {}, b'{"model":"m","prompt":"hi"}')
    assert (await moved(Silent(ManualClock()), around(settings()), request)).version == "new"

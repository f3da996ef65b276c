"""Which version of its model a request gets: plain functions of values, and one look for conversations that run.

The version follows from the weights and from a keyed hash of what stays together, so every worker comes to the same one
without asking anybody. Only when weights have changed, and would have put a conversation elsewhere before, it matters
where it runs: workers know that of those that ran when the weights changed (see `keeping`), else the store is asked.
"""

import contextlib
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

import msgspec

from extproc import pools
from extproc.choose import filters
from extproc.choose.fleet import Fleet, Pool
from extproc.config import Config
from extproc.continuing import pins_of, secret_of
from extproc.envoy.contract import VERSION_HEADER
from extproc.errors import StoreError, UnknownModelError, UnknownVersionError
from extproc.request.conversation import beginning, turns_before
from extproc.request.model import Request, RouteKind
from extproc.request.session import hash_key
from extproc.rollout.split import By, Choice, Split, Why, chosen, of_weights
from extproc.state.knowledge import PoolKnowledge
from extproc.state.store import Store

_PERSON: Final = b"warmpath version"
"""Keeps these digests apart from all others that are made with the same secret (BLAKE2b's `person`, 16 bytes)."""
_UNIT_BYTES: Final = 16
_CONVERSATIONS: Final = frozenset({RouteKind.CHAT, RouteKind.RESPONSES, RouteKind.MESSAGES})
_EVERYBODY: Final = "*"
_LONGER: Final = 1.25
"""Conversations are remembered for so many lives of a pin: that one was used again is told only so often."""


class Placed(msgspec.Struct, frozen=True, gc=False):
    """A request, and where it goes.

    Attributes:
        request: the request, with its model's own name.
        pool: pool that serves it.
        named: further name that the client used for the model; empty for its own.
        choice: version; None for models with one.
    """

    request: Request
    pool: Pool
    named: str = ""
    choice: Choice | None = None


class Around(msgspec.Struct, frozen=True, gc=False):
    """What a version is chosen by, beside the request.

    Attributes:
        fleet: the versions, and who serves them.
        knowledge: by pool, what this worker knows.
        config: current configuration.
    """

    fleet: Fleet
    knowledge: Mapping[str, PoolKnowledge]
    config: Config


def placed(request: Request, headers: Mapping[str, str], around: Around) -> Placed:
    """Find the model by any of its names, and the version that serves.

    Where `Choice.earlier` is not empty, `settled` has the last word.

    Raises:
        UnknownModelError: a model is named that no pool serves.
        UnknownVersionError: a tester asks for a version that the model does not have.
    """
    fleet, named = around.fleet, ""
    if request.model and request.model not in fleet.models:
        own = fleet.aliases.get(request.model)
        if own is None:
            raise UnknownModelError(f"The model `{request.model[:200]}` does not exist.")
        named, request = request.model, msgspec.structs.replace(request, model=own)
    split = _split_of(request, around) if fleet.splits else None
    if split is None:
        return Placed(request, pools.pool_of(request, fleet, around.knowledge), named)
    choice = _choice(request, headers, split, around)
    if not choice.earlier:
        choice = available(choice, split, fleet)
    return Placed(request, fleet.pools[choice.pool], named, choice)


def needs_prompt(request: Request, around: Around) -> bool:
    """Whether the version of a request whose prompt was passed over follows from its prompt."""
    fleet = around.fleet
    model = request.model or next(iter(fleet.models))
    split = fleet.splits.get(fleet.aliases.get(model, model))
    if split is None or split.split_by != "session" or request.session:
        return False
    return request.kind in _CONVERSATIONS and around.config.routing.session.infer


def is_tester(config: Config, tenant: str) -> bool:
    """Whether a tenant may choose versions itself."""
    testers = config.rollouts.testers
    return _EVERYBODY in testers or (bool(tenant) and tenant in testers)


def unit_of(config: Config, split: Split, request: Request, request_id: str) -> tuple[bytes, By]:
    """Digest of what gets one version with a request, and what that is.

    The digest is keyed, as those of pins: who reads the store or the metrics can test no guess of a session or a
    tenant. Two models, and two tenants, have unrelated digests of one session.

    Args:
        config: has the secret.
        split: the model's versions.
        request: the request.
        request_id: its `x-request-id`; empty without one.
    """
    by, name = _belongs(config, split, request, request_id)
    framed = [each.encode("utf-8", "surrogatepass") for each in (split.model, by, request.tenant)]
    digest = blake2b(digest_size=_UNIT_BYTES, key=hash_key(secret_of(config)), person=_PERSON)
    for each in framed:
        digest.update(len(each).to_bytes(4, "big") + each)
    digest.update(name)
    return digest.digest(), by


def available(choice: Choice, split: Split, fleet: Fleet) -> Choice:
    """The choice, or another version with traffic while no endpoint of the chosen one's pool can serve.

    An answer of the version in use is worth more to a client than a 503 that keeps to a share. Who asked for a version
    wants that one or an error; a stored response is nowhere else. The main version comes first, then those of more
    weight, then those that had some before and still may have conversations. When none has an endpoint, the choice
    stays.
    """
    if choice.why in ("tester", "response") or _serves(fleet, choice.pool):
        return choice
    # Versions that conversations may still run on serve as well: the old one is kept warm for a canary that has all.
    weights: dict[str, float] = {}
    for each in (split.weights, *split.earlier):
        for version, part in each.items():
            if part > 0.0:
                weights.setdefault(version, part)
    others = sorted(
        (version for version in split.pools if version in weights),
        key=lambda version: (version not in split.weights, version != split.main, -weights[version]),
    )
    for version in others:
        if _serves(fleet, pool := split.pools[version]):
            return msgspec.structs.replace(choice, version=version, pool=pool, earlier=(), why="no_endpoint")
    return choice


def is_conversation(choice: Choice) -> bool:
    """Whether a version is chosen for a conversation, which is to keep it."""
    return choice.by in {"session", "conversation"}


def remembered(choice: Choice, around: Around, now: float) -> tuple[str, str]:
    """Version and pool in which a conversation was known to run last; two empty texts when this worker knows of none.

    Only those that the present weights give, or gave before, are looked at: nobody stays on a version that was rolled
    back or retired.
    """
    if not is_conversation(choice):
        return "", ""
    places = ((choice.version, choice.pool), *choice.earlier)
    last = [around.knowledge[pool].conversations.last(choice.digest) for _, pool in places]
    newest = max(last)
    return places[last.index(newest)] if newest >= now - life_s(around.config) else ("", "")


def life_s(config: Config) -> float:
    """How long a conversation is remembered, in seconds."""
    return _LONGER * config.routing.session.ttl_s


async def settled(
    choice: Choice, request: Request, around: Around, store: Store, now: float, *, fresh: bool = False
) -> Choice:
    """The version of a request whose weights have changed: the one that its conversation runs on, else the choice.

    Args:
        choice: what the present weights give, with what earlier ones gave.
        request: the request as its client sent it.
        around: who is there.
        store: has the pins.
        now: present time, by the clock of what is known of conversations.
        fresh: the weights changed a moment ago, and other workers may still go by those before.
    """
    kept = msgspec.structs.replace(choice, earlier=())
    if _found_by(around.config, around.fleet.pools[choice.pool], request):
        known = ("", "") if request.previous_response else remembered(choice, around, now)
        version, pool = known if known[1] else await _runs_on(choice, request, around, store, fresh=fresh)
        if pool != choice.pool:
            why: Why = "response" if request.previous_response else "running"
            kept = msgspec.structs.replace(kept, version=version, pool=pool, why=why)
    split = around.fleet.splits.get(choice.model)
    return kept if split is None else available(kept, split, around.fleet)


def conversation_key(config: Config, pool: Pool, request: Request) -> str:
    """Key of the pin in a pool by which the next turn of a conversation is found; empty for no conversation."""
    pins = pins_of(config, pool, request)
    return pins.next_key or pins.key


def _found_by(config: Config, pool: Pool, request: Request) -> str:
    """Key of the pin that the conversation so far has in a pool, if it runs there; empty for no conversation.

    A first turn whose client names no session has one as soon as it was sent once. It is looked for like all others,
    so that first turns and later ones go the same way while the store does not answer.
    """
    pins = pins_of(config, pool, request)
    return pins.key or pins.next_key


async def _runs_on(choice: Choice, request: Request, around: Around, store: Store, *, fresh: bool) -> tuple[str, str]:
    """Version and pool that a conversation, or a stored response, has; those of the choice when nobody knows of it.

    The store may not answer, or may have lost its pins. Then what this worker pinned itself counts, and whose turns the
    others told it of.
    """

    async def pinned(pool: str) -> bool:
        with contextlib.suppress(StoreError):
            return bool(await store.pinned(pool, _found_by(around.config, around.fleet.pools[pool], request)))
        return False

    for version, pool in choice.earlier:
        if await pinned(pool):
            return version, pool
    own = (choice.version, choice.pool)
    for turn in turns_before(request):
        for version, pool in (own, *choice.earlier):
            if around.knowledge[pool].continued(turn) is not None:
                return version, pool
    # All workers believe the same of one that they know nothing of, whether the store is silent or says nothing.
    before = _before(choice, around) if fresh and is_conversation(choice) else own
    return own if before == own or await pinned(choice.pool) else before


def _before(choice: Choice, around: Around) -> tuple[str, str]:
    """Version and pool by the weights that were in force before those of now."""
    split = around.fleet.splits.get(choice.model)
    if split is None or not split.earlier:
        return choice.version, choice.pool
    version = of_weights(split.earlier[0], choice.digest)
    return (version, split.pools[version]) if version in split.pools else (choice.version, choice.pool)


def _choice(request: Request, headers: Mapping[str, str], split: Split, around: Around) -> Choice:
    config = around.config
    unit, by = unit_of(config, split, request, headers.get("x-request-id", ""))
    choice = chosen(split, unit, by)
    if by == "nobody":
        choice = _other(choice, split, split.main, "weight")
    asked = headers.get(VERSION_HEADER, "").strip()
    if asked and is_tester(config, request.tenant):
        if asked not in split.pools:
            names = ", ".join(f"`{version}`" for version in split.pools)
            raise UnknownVersionError(
                f"The model `{split.model}` has no version `{asked[:64]}`: {VERSION_HEADER} may name {names}."
            )
        choice = _other(choice, split, asked, "tester")
    held = pools.holder(request, around.fleet, around.knowledge)
    version = next((version for version, pool in split.pools.items() if pool == held), "") if held else ""
    if version:
        return _other(choice, split, version, "response")
    if request.previous_response and choice.why != "tester":
        others = tuple((version, pool) for version, pool in split.pools.items() if version != choice.version)
        return msgspec.structs.replace(choice, earlier=others)
    return choice


def _other(choice: Choice, split: Split, version: str, why: Why) -> Choice:
    return msgspec.structs.replace(
        choice, version=version, pool=split.pools[version], earlier=(), why=why, asked=why == "tester"
    )


def _split_of(request: Request, around: Around) -> Split | None:
    """Versions of the model that a request asks for, or gets as it names none; None where there is only one."""
    fleet = around.fleet
    if request.model:
        return fleet.splits.get(request.model)
    if held := pools.holder(request, fleet, around.knowledge):
        return next((split for split in fleet.splits.values() if held in split.pools.values()), None)
    # What is no API has no body that any engine generates by: it goes where it went before there were versions.
    return None if request.kind is RouteKind.OTHER else fleet.splits.get(next(iter(fleet.models)))


def _belongs(config: Config, split: Split, request: Request, request_id: str) -> tuple[By, bytes]:
    if split.split_by == "session":
        if request.session:
            return "session", request.session.encode("utf-8", "surrogatepass")
        if config.routing.session.infer and request.turn and (began := beginning(request.segments)):
            return "conversation", began
    if split.split_by != "request" and request.tenant:
        return "tenant", b""
    return ("request", request_id.encode("utf-8", "surrogatepass")) if request_id else ("nobody", b"")


def _serves(fleet: Fleet, pool: str) -> bool:
    return any(
        not filters.hard_reason(each, None) and not filters.soft_reason(each) for each in fleet.pools[pool].endpoints
    )

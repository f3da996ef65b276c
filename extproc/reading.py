"""A call, read as far as its pool's policy needs it: its request, its pool, its prompt's blocks."""

from collections.abc import Callable

import msgspec

from extproc import pools, versions
from extproc.choose.fleet import Pool
from extproc.choose.policies import POLICIES
from extproc.deciding import Asked
from extproc.envoy.contract import Call
from extproc.request.blocks import chain
from extproc.request.insert import with_field
from extproc.request.model import Request, RouteKind
from extproc.request.shapes import parse, peek
from extproc.request.volatile import Rules
from extproc.rollout.split import Choice
from extproc.versions import Around, Placed


def read(
    call: Call, around: Around, volatile: Rules, new_response_id: Callable[[], str], *, whole: bool
) -> tuple[Asked, Pool]:
    """Read a call.

    Args:
        call: the call.
        around: who serves which model, and what is known of pools.
        volatile: what hashing passes over.
        new_response_id: see `router.Surroundings`.
        whole: every pool's policy looks at prompts, so that bodies are read whole at once.

    Raises:
        UnknownModelError: the body names a model that no pool serves.
        UnknownVersionError: a tester asks for a version that the model does not have.
    """
    if not whole:
        request = peek(call.path, call.headers, call.body)
        if not (around.fleet.splits and versions.needs_prompt(request, around)):
            place = _placed(request, call, around)
            policy = POLICIES[place.pool.policy]
            if not policy.prefix and (policy.order != "home" or request.session):
                request, body = _with_response(place.request, call.body, place.pool, new_response_id)
                # Nothing that the policy goes by is missing, whatever the body is.
                asked = msgspec.structs.replace(request, flaw="")
                size = float(len(call.body))
                return Asked(asked, (), size, read=False, body=body, choice=place.choice, named=place.named), place.pool
    place = _placed(parse(call.path, call.headers, call.body, volatile), call, around)
    return _whole(place, call, around, new_response_id)


def unminted(asked: Asked) -> Request:
    """The request as its client sent it, without the id that was chosen for its response."""
    return asked.request if asked.body is None else msgspec.structs.replace(asked.request, response="")


def on_version(
    asked: Asked, call: Call, choice: Choice, around: Around, volatile: Rules, new_response_id: Callable[[], str]
) -> tuple[Asked, Pool]:
    """A call that was read for one version of its model, for another one or for good; arguments as in `read`."""
    pool = around.fleet.pools[choice.pool]
    if asked.choice is not None and asked.choice.pool == choice.pool:
        return msgspec.structs.replace(asked, choice=choice), pool
    request = unminted(asked)
    if not asked.read:
        model = request.model
        request = msgspec.structs.replace(parse(call.path, call.headers, call.body, volatile), model=model)
    return _whole(Placed(request, pool, asked.named, choice), call, around, new_response_id)


def _placed(request: Request, call: Call, around: Around) -> Placed:
    """Where a request goes. Of a model with one version, asked for by its own name, no more than its pool is looked up.

    Raises as `read`.
    """
    fleet = around.fleet
    if fleet.splits or request.model in fleet.aliases:
        return versions.placed(request, call.headers, around)
    return Placed(request, pools.pool_of(request, fleet, around.knowledge))


def _whole(place: Placed, call: Call, around: Around, new_response_id: Callable[[], str]) -> tuple[Asked, Pool]:
    request, pool = place.request, place.pool
    blocks = chain(request.segments, request.salt, around.knowledge[pool.name].block_bytes)
    request, body = _with_response(request, call.body, pool, new_response_id)
    prompt_bytes = float(request.prompt_bytes)
    return Asked(request, blocks, prompt_bytes, body=body, choice=place.choice, named=place.named), pool


def _with_response(
    request: Request, body: bytes, pool: Pool, new_response_id: Callable[[], str]
) -> tuple[Request, bytes | None]:
    """Choose the id of a stored response ourselves, so that a request that continues it can be sent after it.

    vLLM takes `request_id` of a Responses body for the id of the response. An id that the client chose stays, and
    so does a body that cannot be read.
    """
    if request.kind is not RouteKind.RESPONSES or request.response or request.flaw:
        return request, None
    response = pools.response_id(new_response_id(), pool.name)
    changed = with_field(body, "request_id", response)
    return (request if changed is None else msgspec.structs.replace(request, response=response)), changed

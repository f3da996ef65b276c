"""A call, read as far as its pool's policy needs it: its request, its pool, its prompt's blocks."""

from collections.abc import Callable, Mapping

import msgspec

from extproc import pools
from extproc.choose.fleet import Fleet, Pool
from extproc.choose.policies import POLICIES
from extproc.deciding import Asked
from extproc.envoy.contract import Call
from extproc.request.blocks import chain
from extproc.request.insert import with_field
from extproc.request.model import Request, RouteKind
from extproc.request.shapes import parse, peek
from extproc.request.volatile import Rules
from extproc.state.knowledge import PoolKnowledge


def read(
    call: Call,
    fleet: Fleet,
    knowledge: Mapping[str, PoolKnowledge],
    volatile: Rules,
    new_response_id: Callable[[], str],
    *,
    whole: bool,
) -> tuple[Asked, Pool]:
    """Read a call.

    Args:
        call: the call.
        fleet: who serves which model.
        knowledge: by pool, what is known of stored responses, and the size of blocks.
        volatile: what hashing passes over.
        new_response_id: see `router.Surroundings`.
        whole: every pool's policy looks at prompts, so that bodies are read whole at once.

    Raises:
        UnknownModelError: the body names a model that no pool serves.
    """
    if not whole:
        request = peek(call.path, call.headers, call.body)
        pool = pools.pool_of(request, fleet, knowledge)
        policy = POLICIES[pool.policy]
        if not policy.prefix and (policy.order != "home" or request.session):
            request, body = _with_response(request, call.body, pool, new_response_id)
            # Nothing that the policy goes by is missing, whatever the body is.
            asked = msgspec.structs.replace(request, flaw="")
            return Asked(asked, (), float(len(call.body)), read=False, body=body), pool
    request = parse(call.path, call.headers, call.body, volatile)
    pool = pools.pool_of(request, fleet, knowledge)
    blocks = chain(request.segments, request.salt, knowledge[pool.name].block_bytes)
    request, body = _with_response(request, call.body, pool, new_response_id)
    return Asked(request, blocks, float(request.prompt_bytes), body=body), pool


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

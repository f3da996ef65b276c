"""Which pool serves a request."""

from collections.abc import Mapping

import xxhash

from extproc.choose.fleet import Fleet, Pool
from extproc.continuing import follows_of
from extproc.errors import UnknownModelError
from extproc.request.model import Request
from extproc.state.knowledge import PoolKnowledge


def pool_of(request: Request, fleet: Fleet, knowledge: Mapping[str, PoolKnowledge]) -> Pool:
    """The pool that serves the request's model.

    A request that names none goes to the pool of the stored response that it reads or continues, else to the default
    pool.

    Raises:
        UnknownModelError: a model is named that no pool serves.
    """
    if not request.model:
        return fleet.pools[holder(request, fleet, knowledge) or fleet.default_pool]
    name = fleet.models.get(request.model)
    if name is None:
        raise UnknownModelError(f"The model `{request.model[:200]}` does not exist.")
    return fleet.pools[name]


def response_id(unguessable: str, pool: str) -> str:
    """Id of a response that is to be stored in a pool, which is told by its end: reading it names no model."""
    return unguessable + _mark(pool)


def _mark(pool: str) -> str:
    return f"{xxhash.xxh32_intdigest(pool.encode()):08x}"


def holder(request: Request, fleet: Fleet, knowledge: Mapping[str, PoolKnowledge]) -> str:
    """The pool that has the stored response which a request reads or continues.

    It is told by an id of ours, else as its answer taught; empty when there is none, or none is known.
    """
    response = request.previous_response
    if not response:
        return ""
    marked = next((name for name in fleet.pools if response.endswith(_mark(name))), "")
    digest = follows_of(request)
    return marked or next((name for name in fleet.pools if knowledge[name].continued(digest)), "")

"""The keeper's pages behind `warmpath explain`: `POST /explain` and `GET /decisions/<id>`."""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Annotated, Final

import grpc
import msgspec
from aiohttp import web
from msgspec import Meta

from extproc import inner
from extproc.errors import BadQuestionError, BodyTooLargeError, UnknownDecisionError, WarmpathError, WorkerError
from extproc.inner import Question, Told

_ENVELOPE: Final = 64 * 1024
"""Room for path and headers around a body."""


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """JSON of `POST /explain`.

    Attributes:
        body_base64: the request's body in base64.
        path: its path.
        headers: its headers.
    """

    body_base64: bytes
    path: Annotated[str, Meta(pattern="^/")] = "/v1/chat/completions"
    headers: dict[str, str] = {}


_read_asked = msgspec.json.Decoder(Asked).decode


def largest_question(max_body_bytes: int) -> int:
    """Bytes of the longest JSON that `POST /explain` takes: base64 makes four bytes of three."""
    return (max_body_bytes + 2) // 3 * 4 + _ENVELOPE


def routes(workers: Mapping[str, grpc.aio.Channel], max_body_bytes: int) -> list[web.RouteDef]:
    """The two pages, answered by these workers of the host, for bodies up to this size."""

    async def explain(request: web.Request) -> web.Response:
        return await _answered(_explain(request, workers, max_body_bytes))

    async def recall(request: web.Request) -> web.Response:
        return await _answered(_recall(request.match_info["id"], workers))

    return [web.post("/explain", explain), web.get("/decisions/{id:.+}", recall)]


async def _answered(telling: Awaitable[Told]) -> web.Response:
    try:
        told = await telling
    except WarmpathError as error:
        told = Told(error.status, error.body())
    return web.Response(status=told.status, body=told.body, content_type="application/json")


async def _explain(request: web.Request, workers: Mapping[str, grpc.aio.Channel], max_body_bytes: int) -> Told:
    """Ask the first worker that answers: all of them know the same, but for the last milliseconds."""
    try:
        asked = _read_asked(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(max_body_bytes) from None
    except msgspec.DecodeError as error:
        raise BadQuestionError(
            f"the question cannot be read: {error}; send a JSON object with body_base64 and, if need be, path and "
            "headers (an object of texts)"
        ) from None
    if len(asked.body_base64) > max_body_bytes:
        raise _too_large(max_body_bytes)
    headers = {name.lower(): value for name, value in asked.headers.items()}
    question = Question(asked.path, headers, asked.body_base64)
    silent = WorkerError("this host has no worker")
    for channel in workers.values():
        try:
            return await inner.explain(channel, question)
        except WorkerError as error:
            silent = error
    raise silent


async def _recall(name: str, workers: Mapping[str, grpc.aio.Channel]) -> Told:
    """Ask all workers: each remembers its own decisions."""
    told = await asyncio.gather(*(_recalled(channel, name) for channel in workers.values()))
    for each in told:
        if each is not None and each.status != UnknownDecisionError.status:
            return each
    silent = [worker for worker, each in zip(workers, told, strict=True) if each is None]
    if len(silent) == len(workers):
        raise WorkerError("no worker of this host answers")
    raise UnknownDecisionError(
        "no worker of this host remembers this decision (any more): each keeps its last telemetry.recent_decisions; "
        "on another host ask that host's admin page" + (f"; {', '.join(silent)} did not answer" if silent else "")
    )


async def _recalled(channel: grpc.aio.Channel, name: str) -> Told | None:
    try:
        return await inner.recall(channel, name)
    except WorkerError:
        return None


def _too_large(max_body_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The request body is larger than {max_body_bytes} bytes (gateway.max_body_bytes).")

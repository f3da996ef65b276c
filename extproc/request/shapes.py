"""Path, headers and body of any API call into one `Request`, whatever they hold."""

import json
import math
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote

import msgspec
from xxhash import xxh3_64_intdigest, xxh3_128

from extproc.request.apis.body import Body, salt_of
from extproc.request.apis.chat import Chat, batch_prompt, chat_prompt
from extproc.request.apis.completion import Completion, completion_prompt
from extproc.request.apis.embedding import Embedding, embedding_prompt
from extproc.request.apis.messages import Messages, messages_prompt
from extproc.request.apis.rerank import Rerank, rerank_prompt
from extproc.request.apis.responses import Responses, responses_prompt
from extproc.request.apis.score import Score, score_prompt
from extproc.request.message import PromptError
from extproc.request.model import Request, RouteKind
from extproc.request.prompt import Prompt
from extproc.request.session import BODY_FIELDS, clean_id, session_of
from extproc.request.volatile import BUILTIN, Rules

Buffer: TypeAlias = bytes | bytearray | memoryview
B = TypeVar("B", bound=Body)

TENANT_HEADER = "x-warmpath-tenant"
"""Set by Envoy's authentication, never by the client."""
PRIORITY_HEADER = "x-warmpath-priority"

_MAX_INT = 2**31 - 1
_MAX_N = 16_384
"""Most answers to one request that vLLM takes (`VLLM_MAX_N_SEQUENCES`): more is refused, and must not be charged."""
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}")

# The lenient reader is ten times slower than the first one, and whoever sends a broken body chooses its size.
_LENIENT_BYTES = 1 << 20


class Flaw(StrEnum):
    """Why a body could not be read in full: the values of `Request.flaw`."""

    EMPTY = "empty"
    NOT_JSON = "not_json"
    TOO_DEEP = "too_deep"
    NOT_OBJECT = "not_object"
    NO_PROMPT = "no_prompt"
    BAD_PROMPT = "bad_prompt"


class _Api(msgspec.Struct, frozen=True):
    """One API: its kind, the fields of its body, its prompt, and the fields that limit the answer, best first."""

    kind: RouteKind
    body: type[Body]
    prompt: Callable[[Any, Rules], Prompt]
    limits: tuple[str, ...] = ("max_tokens",)


def parse(path: str, headers: Mapping[str, str], body: Buffer, volatile: Rules = BUILTIN) -> Request:
    """Reduce an API call to what a decision needs. Never raises: what could not be read is left at its default.

    Numbers and names are taken only when they make sense (an `n` from 1 to 16,384, a `max_tokens` of at least 0,
    nothing over 2**31 - 1, no booleans); anything else counts as not sent, and the engine answers for it.
    `max_completion_tokens` goes before `max_tokens`, and the priority header before the body's `priority`: both are
    vLLM's, lower is served first. A prompt in which anything is malformed has no segments.

    Args:
        path: request path. A query string, slashes at the end and whatever stands before the last `/v1/` or
            `/v2/` do not matter.
        headers: request headers, names in lower case.
        body: request body without content encoding; read only when the path is one of the known APIs.
        volatile: what hashing passes over at the beginning of a conversation.

    Returns:
        The request; its `flaw` is empty or one of `Flaw`.
    """
    api = _api_of(path)
    if api is None:
        return _unknown(path, headers)
    fields = _read(api.body, body)
    if isinstance(fields, Flaw):
        return _request(api, headers, Body(), Prompt(), fields)
    prompt = Prompt()
    flaw = ""
    try:
        prompt = api.prompt(fields, volatile)
        if not prompt.segments:
            flaw = Flaw.NO_PROMPT
    except PromptError:
        flaw = Flaw.BAD_PROMPT
    except RecursionError:
        flaw = Flaw.TOO_DEEP
    return _request(api, headers, fields, prompt, flaw)


def peek(path: str, headers: Mapping[str, str], body: Buffer) -> Request:
    """Like `parse`, but passes over the prompt: for policies that place a request without knowing its text.

    The reader skips the messages instead of building them, and nothing is hashed: 0.16 ms in place of 0.83 for a chat
    of 550 KB in 1,300 messages. There are no segments, `turn` and `follows` are empty, and a prompt that is missing or
    malformed is no flaw.
    """
    api = _api_of(path)
    if api is None:
        return _unknown(path, headers)
    fields = _read(Body, body)
    if isinstance(fields, Flaw):
        return _request(api, headers, Body(), Prompt(), fields)
    return _request(api, headers, fields, Prompt(), "")


def _api_of(path: str) -> _Api | None:
    bare = path.partition("?")[0].rstrip("/")
    if api := _APIS.get(bare):
        return api
    start = max(bare.rfind("/v1/"), bare.rfind("/v2/"))
    return _APIS.get(bare[start:]) if start > 0 else None


def _unknown(path: str, headers: Mapping[str, str]) -> Request:
    # Reading, cancelling or deleting a stored response is for the engine that has it. Bodies name it as it is, paths
    # may percent-encode any character of it (RFC 3986 section 2.1).
    stored = path.partition("?")[0].partition("/v1/responses/")[2]
    return Request(
        tenant=headers.get(TENANT_HEADER, ""),
        session=session_of(headers, {}),
        priority=_priority(headers, None),
        previous_response=clean_id(unquote(stored.partition("/")[0])),
    )


def _request(api: _Api, headers: Mapping[str, str], fields: Body, prompt: Prompt, flaw: str) -> Request:
    salt = salt_of(fields)
    turn, follows = _turns(prompt, salt)
    stored = api.kind is RouteKind.RESPONSES
    limits = (_integer(getattr(fields, name), at_least=0) for name in api.limits)
    return Request(
        kind=api.kind,
        model=fields.model if isinstance(fields.model, str) else "",
        tenant=headers.get(TENANT_HEADER, ""),
        session=session_of(headers, {name: getattr(fields, name) for name in BODY_FIELDS}),
        priority=_priority(headers, fields.priority),
        stream=fields.stream is True,
        max_tokens=next((limit for limit in limits if limit is not None), None),
        n=_integer(fields.n, at_least=1, at_most=_MAX_N) or 1,
        segments=prompt.segments,
        opening=prompt.opening,
        salt=salt,
        turn=turn,
        follows=follows,
        previous_response=clean_id(fields.previous_response_id) if stored else "",
        response=clean_id(fields.request_id) if stored else "",
        flaw=flaw,
    )


def _turns(prompt: Prompt, salt: bytes) -> tuple[bytes, bytes]:
    """Digests of the conversation so far, and of the part that its last answer was given to."""
    if not prompt.conversation:
        return b"", b""
    so_far = xxh3_128(seed=xxh3_64_intdigest(salt))
    # Joined first: a call for each of thousands of short segments costs more than the copy.
    so_far.update(b"".join(prompt.segments[: prompt.answered]))
    follows = so_far.digest() if prompt.answered else b""
    so_far.update(b"".join(prompt.segments[prompt.answered :]))
    return so_far.digest(), follows


def _integer(value: object, at_least: int, at_most: int = _MAX_INT) -> int | None:
    # A bool is an int to Python and a mistake to the engine.
    if isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= at_most:
        return value
    return None


def _priority(headers: Mapping[str, str], in_body: object) -> int:
    text = headers.get(PRIORITY_HEADER, "").strip()
    if _INTEGER.fullmatch(text) and (stated := _integer(int(text), at_least=-_MAX_INT)) is not None:
        return stated
    return _integer(in_body, at_least=-_MAX_INT) or 0


def _read(kind: type[B], body: Buffer) -> B | Flaw:
    if not len(body):
        return Flaw.EMPTY
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError:
        return _read_leniently(kind, body)
    except RecursionError:
        return Flaw.TOO_DEEP


def _read_leniently(kind: type[B], body: Buffer) -> B | Flaw:
    """Read what the first reader refuses and engines take: half surrogate pairs, a byte order mark, UTF-16, NaN.

    What is not finite counts as not sent. The rest counts: a field that no engine looks at must not hide the model, and
    with it the limits of that model.
    """
    if len(body) > _LENIENT_BYTES:
        return Flaw.NOT_JSON
    try:
        value = json.loads(bytes(body), parse_float=_finite, parse_constant=_absent)
    except ValueError:
        return Flaw.NOT_JSON
    except RecursionError:
        return Flaw.TOO_DEEP
    if not isinstance(value, dict):
        return Flaw.NOT_OBJECT
    return kind(**{name: value[name] for name in kind.__struct_fields__ if name in value})


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _absent(_text: str) -> None:
    """What stands for NaN, Infinity and -Infinity, which are no JSON."""


_CHAT_LIMITS = ("max_completion_tokens", "max_tokens")
_RERANK = _Api(RouteKind.RERANK, Rerank, rerank_prompt)
_SCORE = _Api(RouteKind.SCORE, Score, score_prompt)

_APIS = {
    "/v1/chat/completions": _Api(RouteKind.CHAT, Chat, chat_prompt, _CHAT_LIMITS),
    "/v1/chat/completions/batch": _Api(RouteKind.CHAT, Chat, batch_prompt, _CHAT_LIMITS),
    "/v1/completions": _Api(RouteKind.COMPLETION, Completion, completion_prompt),
    "/v1/responses": _Api(RouteKind.RESPONSES, Responses, responses_prompt, ("max_output_tokens",)),
    "/v1/messages": _Api(RouteKind.MESSAGES, Messages, messages_prompt),
    "/v1/embeddings": _Api(RouteKind.EMBEDDING, Embedding, embedding_prompt),
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/score": _SCORE,
    "/v1/score": _SCORE,
}
"""APIs by the path that clients call, behind any prefix that ends in front of `/v1/` or `/v2/`."""
PATHS = tuple(_APIS)
"""Paths of the APIs that can be read."""

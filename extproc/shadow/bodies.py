"""The body that a shadow gets, made of the client's. Pure: bytes in, bytes out.

Whatever names a person, a session or the request itself stays out, and nothing is kept at the engine.
"""

from typing import Final

import msgspec

from extproc.engines.fit_fields import Values, edited, values_of

LONGEST: Final = 2 << 20
"""Bytes of a body that is sent again: it is kept while the shadow is asked."""
_NULL: Final = b"null"
_NAMES: Final = (
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "metadata",
    "request_id",
    "session_id",
    "conversation_id",
    "kv_transfer_params",
)
"""Fields that say who asks, or that only the client's own engine knows."""
_ELSEWHERE: Final = ("previous_response_id", "conversation", "background")
"""Fields of the Responses API by which an answer follows from what one engine keeps, or is kept there for later."""
_SEVERAL: Final = ("n", "best_of")


def shadow_body(body: bytes, api: str) -> bytes | None:
    """The body for the shadow, before it is fitted to its engine.

    Args:
        body: the client's body.
        api: which API was called, a value of `RouteKind`.

    Returns:
        None for a request whose answers cannot be compared: it is too long, cannot be read, asks for several answers,
        or goes on from what one engine has.
    """
    if not body or len(body) > LONGEST:
        return None
    values = values_of(body)
    if values is None or any(_several(values, field) for field in _SEVERAL):
        return None
    if api == "responses" and any(bytes(values.get(field, _NULL)) not in (_NULL, b"false") for field in _ELSEWHERE):
        return None
    edits: dict[str, bytes | None] = {field: None for field in _NAMES if field in values}
    if api == "responses":
        edits["store"] = b"false"
    return edited(body, values, edits) if edits else body


def model_of(body: bytes) -> str:
    """The model that a body names; empty when it names none."""
    values = values_of(body) or {}
    try:
        found = msgspec.json.decode(bytes(values.get("model", b"null")))
    except (msgspec.DecodeError, RecursionError):
        return ""
    return found if isinstance(found, str) else ""


def _several(values: Values, field: str) -> bool:
    text = bytes(values.get(field, b"1"))
    try:
        return msgspec.json.decode(text) not in (1, None)
    except (msgspec.DecodeError, RecursionError):
        return True

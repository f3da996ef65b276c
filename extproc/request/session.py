"""Which session a call belongs to, by what the client says itself, and the name its pin is stored under."""

import re
from collections.abc import Callable, Mapping
from hashlib import blake2b

import msgspec

HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",  # Claude Code
    "x-session-affinity",  # OpenCode, and the router of TensorRT-LLM
    "session-id",  # Codex
    "session_id",  # Codex, older
    "x-multi-turn-session-id",  # the router of TensorRT-LLM
)
"""Request headers that carry a session id, in the order they are asked."""

# The router of TensorRT-LLM takes it for a conversation; elsewhere it often names one request, so it is asked late.
_LATE_HEADER = "x-correlation-id"

_MAX_BYTES = 1024
_MAX_KEY_BYTES = 64  # BLAKE2b takes no longer key (RFC 7693, section 2.1)

# What Claude Code writes into `metadata.user_id`, and gateways that translate its calls into `user`.
_CLAUDE_CODE = re.compile(r"user_[0-9A-Za-z-]*_account_[0-9A-Za-z-]*_session_([0-9A-Za-z-]+)")
_MAX_CLAUDE_CODE = 2048


class _ClaudeCode(msgspec.Struct):
    """The newer form, a JSON text beside `device_id` and `account_uuid`."""

    session_id: str


def session_of(headers: Mapping[str, str], body_fields: Mapping[str, object]) -> str:
    """Return the first session id that is not blank: `HEADERS` in their order, then `BODY_FIELDS`.

    `x-correlation-id` and then `prompt_cache_key` come last: the one may name a single request, the other may be
    shared by many conversations. A response that a request continues (`previous_response_id`) is no session, and
    neither is a user id: only the two forms in which Claude Code puts its session there count.

    Args:
        headers: request headers, names in lower case.
        body_fields: fields of the parsed body; those that are missing or of another type are passed over.
            `conversation` may be the id or an object with an `id`, as the OpenAI API has it.

    Returns:
        The id without surrounding white space; an id over 1 KiB (UTF-8) is replaced by a hash of it. Empty
        when the client names no session.
    """
    for name in HEADERS:
        if session := clean_id(headers.get(name)):
            return session
    for name, read in _BODY:
        value = body_fields.get(name)
        if value is not None and (session := clean_id(read(value))):
            return session
    return clean_id(headers.get(_LATE_HEADER)) or clean_id(body_fields.get(_LATE_FIELD))


def clean_id(value: object) -> str:
    """Return an id without surrounding white space, hashed when it is over 1 KiB; empty when it is no text."""
    if not isinstance(value, str):
        return ""
    text = value.strip()
    encoded = _encoded(text)
    return text if len(encoded) <= _MAX_BYTES else blake2b(encoded, digest_size=16).hexdigest()


def _itself(value: object) -> object:
    return value


def _field(name: str) -> Callable[[object], object]:
    return lambda value: value.get(name) if isinstance(value, dict) else None


def _id_of(value: object) -> object:
    return value.get("id") if isinstance(value, dict) else value


def _of_claude_code(value: object) -> str:
    """The session in a user id as Claude Code writes it; empty for every other user id."""
    if not isinstance(value, str) or len(value) > _MAX_CLAUDE_CODE:
        return ""
    if match := _CLAUDE_CODE.fullmatch(value):
        return match[1]
    if not value.startswith("{"):
        return ""
    try:
        return msgspec.json.decode(value, type=_ClaudeCode).session_id
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return ""


def _of_metadata(value: object) -> str:
    return _of_claude_code(value.get("user_id")) if isinstance(value, dict) else ""


_BODY: tuple[tuple[str, Callable[[object], object]], ...] = (
    ("session_id", _itself),
    ("conversation_params", _field("conversation_id")),  # TensorRT-LLM
    ("metadata", _of_metadata),
    ("user", _of_claude_code),
    ("conversation", _id_of),
)
_LATE_FIELD = "prompt_cache_key"

BODY_FIELDS = (*(name for name, _ in _BODY), _LATE_FIELD)
"""Body fields that may carry a session id, in the order they are asked, after every header but one."""


def pin_key(secret: bytes, pool: str, session: str) -> str:
    """Return the name under which the session's pin in a pool is stored: 32 hexadecimal digits.

    The digest is keyed, so who reads the store can neither recover a session id nor test a guess of one.

    Args:
        secret: the key all replicas share; any length above 0.
        pool: pool name; the same session has unrelated keys in two pools.
        session: raw session id.

    Raises:
        ValueError: when `secret` is empty, which would leave the digest open to guessing.
    """
    name = _encoded(pool)
    # The length in front keeps (pool "a", session "bc") apart from (pool "ab", session "c").
    framed = len(name).to_bytes(4, "big") + name + _encoded(session)
    return blake2b(framed, digest_size=16, key=hash_key(secret)).hexdigest()


def hash_key(secret: bytes) -> bytes:
    """A secret of any length as a key that BLAKE2b takes. Raises ValueError when it is empty."""
    if not secret:
        raise ValueError("the secret that session ids are hashed with is empty: set one, the same on every replica")
    return secret if len(secret) <= _MAX_KEY_BYTES else blake2b(secret).digest()


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")

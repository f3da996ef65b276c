"""One message as canonical bytes, and without what is volatile in it. `prompt` describes the layout."""

from typing import Any

from extproc.errors import WarmpathError
from extproc.request.canonical import json_bytes, plain_bytes, text_bytes
from extproc.request.media import Room, media_bytes
from extproc.request.tools import ordered_calls
from extproc.request.volatile import Rules

_MESSAGE = b"\xff"
_FIELD = b"\xfe"

_TEXT = _FIELD + b"t"
_MEDIA = _FIELD + b"m"
_CALLS = _FIELD + b"c"

# Fields of a message in front of its content, as chat templates print them.
_BEFORE_CONTENT = (("tool_call_id", _FIELD + b"i"), ("name", _FIELD + b"n"))
_REASONING = _FIELD + b"r"
# Structured fields behind the content: a spoken earlier answer, the tools of one developer message.
_AFTER_CONTENT = (("audio", _FIELD + b"a"), ("tools", _FIELD + b"d"))

# Types of parts that are text, and the field each has its text in.
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}


class PromptError(WarmpathError):
    """A prompt has a shape that no engine accepts; the engine's own answer tells the client."""

    status = 400
    reason = "bad_prompt"
    kind = "invalid_request_error"


def message_bytes(message: object, room: Room) -> bytes:
    """Return the segment of a message.

    Args:
        message: a message as the chat completions API has it; fields that no engine renders are passed over.
        room: what its images, sounds, films and files take their padding from.

    Raises:
        PromptError: when it is no message that an engine would accept.
    """
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise PromptError("a message is not an object with a role")
    if len(message) == 2 and isinstance(text := message.get("content"), str):
        # Most messages are a role and a text, for which this line halves the time: 0.34 us, not 0.77.
        return b"".join((_MESSAGE, text_bytes(role), _TEXT, text_bytes(text)))
    parts = [_MESSAGE, text_bytes(role)]
    for name, mark in _BEFORE_CONTENT:
        if isinstance(value := message.get(name), str):
            parts += mark, text_bytes(value)
    # Engines rename the older `reasoning_content` to `reasoning`.
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning:
        parts += _REASONING, plain_bytes(reasoning)
    add_content(parts, message.get("content"), room)
    if calls := message.get("tool_calls"):
        parts += _CALLS, json_bytes(ordered_calls(calls))
    for name, mark in _AFTER_CONTENT:
        if value := message.get(name):
            parts += mark, json_bytes(value)
    return b"".join(parts)


def add_content(parts: list[bytes], content: object, room: Room) -> None:
    """Append the bytes of a message's content.

    Args:
        parts: where to append.
        content: a text, a list of texts and parts, or None, which adds nothing.
        room: what parts that are no text take their padding from.

    Raises:
        PromptError: when it is anything else, or a part is malformed.
    """
    if content is None:
        return
    if isinstance(content, str):
        parts += _TEXT, text_bytes(content)
        return
    if not isinstance(content, list):
        raise PromptError("the content of a message is neither a text nor a list of parts")
    for part in content:
        if isinstance(part, str):
            parts += _TEXT, text_bytes(part)
            continue
        if not isinstance(part, dict):
            raise PromptError("a part of a message is neither a text nor an object")
        kind = part.get("type")
        field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            parts += _MEDIA, media_bytes(part, room)
        elif isinstance(text := part.get(field), str):
            parts += _TEXT, text_bytes(text)
        else:
            raise PromptError(f"a part of type {kind} has no text")


def settled_message(message: object, rules: Rules) -> object:
    """Return a message without what is volatile in the first bytes of its texts; anything else as it is."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        settled = rules.settle(content, rules.first_bytes)
        return message if settled is content else {**_fields(message), "content": settled}
    if not isinstance(content, list):
        return message
    left = rules.first_bytes
    parts: list[object] = []
    for part in content:
        name, text = _text_of(part)
        if left <= 0 or text is None:
            parts.append(part)
            continue
        settled = rules.settle(text, left)
        left -= len(text_bytes(text[:left]))
        if settled is text:
            parts.append(part)
        elif settled:
            # A part of which nothing remains is left out, as vLLM leaves out the billing line of Claude Code.
            parts.append({**_fields(part), name: settled} if name else settled)
    return {**_fields(message), "content": parts}


def _text_of(part: object) -> tuple[str, str | None]:
    """The field a part has its text in, and the text; the text is None when the part is of another kind."""
    if isinstance(part, str):
        return "", part
    kind = part.get("type") if isinstance(part, dict) else None
    name = _TEXT_PARTS.get(kind, "") if isinstance(kind, str) else ""
    text = _fields(part).get(name) if name else None
    return name, text if isinstance(text, str) else None


def _fields(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}

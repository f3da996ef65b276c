r"""Canonical prompt bytes: equal bytes where the engine's prompt is equal, in the order it renders them.

Layout. UTF-8 never contains the bytes 0xF8 to 0xFF, so they mark where things begin, and nothing has to be
escaped or preceded by its length. A length in front would change the first bytes of a long document
whenever its end changes, and with them every block that the engine still shares.

    lead      0xFC letter value …            segments, only for the fields of `Lead` that are set
    message   0xFF role (0xFE letter value)* one segment a message
    text      0xFD text                      one segment a prompt of the completions and embeddings APIs
    tokens    0xFB id …                      the same, for prompts of token ids; 4 bytes an id, big-endian

Order. What shapes the whole rendering comes first, then a system message that opens the conversation, the tools, what
is stored of the conversation at the engine, and the other messages. Most templates print tools behind the
system text, inside one block (Qwen 2.5 and 3, Llama 3 and 4, DeepSeek V3.1, gpt-oss); where one prints them in
front (GLM 4.5, Kimi K2), prompts with other tools under the same system text match too far, until the engine's
reported cached tokens correct it.

An overhead of 2 bytes a field and 1 + the role a message stands against the 3 to 5 template tokens that
an engine adds, so that a quarter of the bytes remains a fair estimate of the tokens.

JSON values (tools, tool calls, documents) are written again without white space. Their key order is kept where
the engine shows it to the model and settled where it does not: vLLM reads a tool into a model with the fields
`type` and `function` (`name`, `description`, `parameters`), which fixes their order, but passes the schema under
`parameters` through as the client ordered it, into a template that prints it unsorted. Sorting there would
promise hits the engine cannot have.
"""

import sys
from array import array
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from extproc.request.canonical import json_bytes, plain_bytes, text_bytes
from extproc.request.media import Room
from extproc.request.message import PromptError, add_content, message_bytes, settled_message
from extproc.request.tools import ordered_tools
from extproc.request.volatile import NONE, Rules

_LEAD = b"\xfc"
_PROMPT = b"\xfd"
_TOKENS = b"\xfb"

_SYSTEM = frozenset({"system", "developer"})


class Lead(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What changes the rendering of every message; each field as the client sent it, None when it did not.

    Attributes:
        chat_template: the client's own Jinja template.
        chat_template_kwargs: variables of the template.
        reasoning_effort: turns thinking on or off in many templates.
        media_kwargs: how images, sounds and films are read and turned into tokens.
        special_tokens: whether a beginning-of-text token is added, when that is not the API's default.
        truncation: how many tokens of the prompt are kept, and from which side.
        documents: documents the template prints in front of the conversation.
        tools: tools the model may call.
        history: what identifies messages that the engine keeps itself and puts before these.
    """

    chat_template: object = None
    chat_template_kwargs: object = None
    reasoning_effort: object = None
    media_kwargs: object = None
    special_tokens: bool | None = None
    truncation: object = None
    documents: object = None
    tools: object = None
    history: object = None


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """The canonical bytes of one call.

    Attributes:
        segments: canonical bytes in the order the engine renders them.
        conversation: whether they are one conversation, which a later request may continue.
        answered: how many segments stand before the last run of assistant messages: the request that those
            answered. 0 when there is no such run, or nothing before it.
        opening: how many segments stand before a stored history, or would: what shapes the rendering, a system
            message in front, and the tools.
    """

    segments: tuple[bytes, ...] = ()
    conversation: bool = False
    answered: int = 0
    opening: int = 0


def conversation(lead: Lead, messages: object, rules: Rules = NONE, room: Room | None = None) -> Prompt:
    """Return the segments of a conversation: what leads it, and one segment a message.

    A conversation with more messages yields the same segments first. A text and a list with that text
    as its only part are the same prompt and give the same bytes.

    Args:
        lead: what is rendered around the messages.
        messages: messages as the chat completions API has them, decoded from JSON.
        rules: what to pass over in the system messages that open the conversation and the message after them.
        room: what parts that are no text take their padding from; a whole one when this is the request's only prompt.

    Raises:
        PromptError: when `messages` is not a list of messages that an engine would accept.
    """
    if not isinstance(messages, list):
        raise PromptError("messages is not a list")
    room = Room() if room is None else room
    if rules:
        opening = _opening(messages)
        segments = [message_bytes(settled_message(message, rules), room) for message in messages[:opening]]
        segments += [message_bytes(message, room) for message in islice(messages, opening, None)]
    else:
        segments = [message_bytes(message, room) for message in messages]
    answered = _answered(messages)
    count = len(segments)
    behind_system = 1 if messages and messages[0]["role"] in _SYSTEM else 0
    segments[behind_system:behind_system] = _tools_and_history(lead)
    segments[:0] = leading(lead)
    added = len(segments) - count
    if answered:
        answered += added
    opening = behind_system + added - bool(lead.history)
    return Prompt(tuple(segments), conversation=bool(messages), answered=answered, opening=opening)


def prompts(value: object) -> tuple[bytes, ...]:
    """Return one segment for each prompt of a `prompt` or `input` field.

    Args:
        value: a text, a list of token ids, or a list of texts and lists of token ids.

    Raises:
        PromptError: when it is anything else, or an empty list.
    """
    if isinstance(value, str):
        return (_PROMPT + text_bytes(value),)
    if not isinstance(value, list) or not value:
        raise PromptError("the prompt is neither a text nor a list with at least one item")
    if isinstance(value[0], int):
        return (_token_ids(value),)
    return tuple(_PROMPT + text_bytes(item) if isinstance(item, str) else _token_ids(item) for item in value)


def content_prompt(content: object, room: Room) -> bytes:
    """Return the segment of a prompt that is the content of a message without a role, as scores take it.

    Args:
        content: a text, or a list of parts.
        room: what parts that are no text take their padding from.

    Raises:
        PromptError: when it is anything else.
    """
    parts = [_PROMPT]
    add_content(parts, content, room)
    return b"".join(parts)


def leading(lead: Lead) -> list[bytes]:
    """Return the one segment that stands before everything else, or none when no field of it is set."""
    # None, {}, [] and "" all render as nothing, so none of them leaves a trace.
    head: list[bytes] = []
    if lead.chat_template:
        head += _LEAD, b"j", plain_bytes(lead.chat_template)
    if lead.chat_template_kwargs:
        head += _LEAD, b"k", json_bytes(lead.chat_template_kwargs, in_order=False)
    if lead.reasoning_effort:
        head += _LEAD, b"e", plain_bytes(lead.reasoning_effort)
    if lead.media_kwargs:
        head += _LEAD, b"p", json_bytes(lead.media_kwargs, in_order=False)
    if lead.special_tokens is not None:
        head += _LEAD, b"s", b"1" if lead.special_tokens else b"0"
    if lead.truncation:
        head += _LEAD, b"u", json_bytes(lead.truncation)
    if lead.documents:
        head += _LEAD, b"d", json_bytes(lead.documents)
    return [b"".join(head)] if head else []


def _tools_and_history(lead: Lead) -> list[bytes]:
    segments = []
    if lead.tools:
        segments.append(_LEAD + b"t" + json_bytes(ordered_tools(lead.tools)))
    if lead.history:
        segments.append(_LEAD + b"h" + plain_bytes(lead.history))
    return segments


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None


def _opening(messages: Sequence[object]) -> int:
    """How many messages the rules look into: the system messages in front, and one more."""
    for at, message in enumerate(messages):
        role = _role(message)
        if not isinstance(role, str) or role not in _SYSTEM:
            return at + 1
    return len(messages)


def _answered(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many messages stand before the last run of assistant messages; 0 without one."""
    at = len(messages)
    while at and messages[at - 1]["role"] != "assistant":
        at -= 1
    while at and messages[at - 1]["role"] == "assistant":
        at -= 1
    return at


def _token_ids(ids: object) -> bytes:
    if not isinstance(ids, list) or not ids:
        raise PromptError("a prompt is neither a text nor a list of token ids")
    try:
        packed = array("I", ids)
    except (TypeError, OverflowError):
        raise PromptError("a prompt of token ids has an item that is no token id") from None
    if sys.byteorder == "little":
        packed.byteswap()
    data = packed.tobytes()
    # Ids stay below 2**31, so that the first byte of an id is never a mark.
    if not data[::4].isascii():
        raise PromptError("a token id is 2147483648 or more")
    return _TOKENS + data

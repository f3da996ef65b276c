"""The body that continues an answer on another engine, made from the client's request and what was received of it.

Two forms. By token ids, where the lost engine told them: the engine that goes on sees the very tokens that were
generated, and nothing is tokenized again. By text, where it did not: the partial answer is an open message of the
assistant (`continue_final_message`, vLLM and SGLang), or stands behind the prompt of a completion.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from extproc.relay.asked import Asked, Hindrance, prompt_of

Form = Literal["whole", "ids", "text"]
"""How a request is sent: as the client wrote it, or continued in one of two ways."""

_CHAT_ONLY: Final = frozenset(
    {
        *("messages", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "response_format"),
        *("max_completion_tokens", "logprobs", "top_logprobs", "n", "echo", "documents", "reasoning_effort"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens", "include_reasoning", "reasoning"),
        *("chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "return_prompt_text"),
        *("modalities", "audio", "prediction", "store", "metadata", "verbosity", "separate_reasoning"),
    }
)
"""Fields of chats that completions lack, or mean otherwise by: `logprobs` is a truth there and a number here."""
_TRUNCATING: Final = ("truncate_prompt_tokens", "truncation_side")

_Changes = dict[str, Any]


class Received(msgspec.Struct):
    """What was received of an answer with one choice.

    Attributes:
        parts: pieces of its text, as they were sent to the client.
        tokens: how many tokens that is.
        prompt_ids: token ids of the prompt; None when they were not told.
        ids: token ids of the answer; None as soon as some of it came without.
        beyond: what it has beside text; None for nothing.
    """

    parts: list[str] = msgspec.field(default_factory=list)
    tokens: int = 0
    prompt_ids: list[int] | None = None
    ids: list[int] | None = msgspec.field(default_factory=list)
    beyond: Hindrance | None = None

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(self.parts)

    @property
    def empty(self) -> bool:
        """Whether nothing of the answer itself was received."""
        return not (self.parts or self.tokens or self.beyond)


class Sending(msgspec.Struct, frozen=True):
    """One request to an engine.

    Attributes:
        path: path below the client's prefix.
        body: JSON.
        form: how it is made.
        trimmed: white space at the end of what was received, which a chat template may take away: then it is generated
            again, although the client has it.
    """

    path: str
    body: bytes
    form: Form
    trimmed: str = ""


class Hindered(Exception):  # noqa: N818 -- an answer to a question, not a fault
    """The answer cannot be continued."""

    def __init__(self, hindrance: Hindrance) -> None:
        super().__init__(hindrance)
        self.hindrance: Hindrance = hindrance


def first(asked: Asked, path: str, *, ids: bool) -> Sending:
    """A stream's request as the client wrote it, but asking for what a continuation will need.

    Args:
        asked: the request.
        path: its path.
        ids: ask for token ids as well; engines that do not know the field pass over it.
    """
    options = asked.value("stream_options")
    options = dict(options) if isinstance(options, dict) else {}
    changes: _Changes = {"stream_options": {**options, "include_usage": True, "continuous_usage_stats": True}}
    if ids:
        changes["return_token_ids"] = True
    return Sending(path, _laid_over(asked, changes), "whole")


def continued(asked: Asked, path: str, received: Received, *, open_messages: bool = True) -> Sending:
    """The request that continues an answer of which something was received.

    Args:
        asked: the client's request.
        path: its path.
        received: what was received, from all engines together.
        open_messages: whether the engines take an open message of a chat.

    Raises:
        Hindered: it cannot be continued.
    """
    if asked.hindrance:
        raise Hindered(asked.hindrance)
    if received.beyond:
        raise Hindered(received.beyond)
    if received.ids and received.prompt_ids is not None and _ids_suffice(asked):
        return _by_ids(asked, path, received, [*received.prompt_ids, *received.ids])
    if any(asked.value(name) is not None for name in _TRUNCATING):
        raise Hindered("prompt")
    told = received.text
    if _stopping(told, asked.stops):
        raise Hindered("stop")
    changes: _Changes = {}
    if asked.api == "completion":
        prompt = prompt_of(asked.value("prompt"))
        if not isinstance(prompt, str):
            raise Hindered("prompt")
        changes["prompt"] = prompt + told
    elif not open_messages:
        raise Hindered("engine")
    else:
        changes["messages"] = _with_answer(asked, told)
        changes |= {"continue_final_message": True, "add_generation_prompt": False}
    body = _laid_over(asked, {**changes, **_rest(asked, received)})
    return Sending(path, body, "text", "" if asked.api == "completion" else told[len(told.rstrip()) :])


def _ids_suffice(asked: Asked) -> bool:
    """Whether token ids alone say how to go on.

    Text that was held back because it might begin a stop text is not in what the client has, but its ids are. A chat
    goes on as a completion, which must be told its length and cannot take images.
    """
    if asked.stops:
        return False
    return asked.api == "completion" or (asked.limit is not None and not _has_media(asked.value("messages")))


def _by_ids(asked: Asked, path: str, received: Received, prompt: list[int]) -> Sending:
    changes: _Changes = {"prompt": prompt, **_rest(asked, received), "return_token_ids": True}
    gone: Sequence[str] = _TRUNCATING
    if asked.api == "chat":
        gone = (*_TRUNCATING, *_CHAT_ONLY)
        path = _completions(path)
        changes["max_tokens"] = (asked.limit or 0) - received.tokens
        changes.pop("max_completion_tokens", None)
    return Sending(path, _laid_over(asked, changes, gone), "ids")


def _completions(path: str) -> str:
    """Path of the completions beside those of the chats; the query stays."""
    place, mark, query = path.partition("?")
    return f"{place.rstrip('/').removesuffix('/chat/completions')}/completions{mark}{query}"


def _rest(asked: Asked, received: Received) -> _Changes:
    """How much may still come, and what is to be told of it."""
    changes: _Changes = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    if asked.limit is not None:
        name = "max_completion_tokens" if asked.value("max_completion_tokens") is not None else "max_tokens"
        changes[name] = asked.limit - received.tokens
    if isinstance(least := asked.value("min_tokens"), int) and least:
        changes["min_tokens"] = max(0, least - received.tokens)
    return changes


def _laid_over(asked: Asked, changes: _Changes, gone: Sequence[str] = ()) -> bytes:
    kept = {name: value for name, value in asked.fields.items() if name not in gone and name not in changes}
    return msgspec.json.encode({**kept, **changes})


def _with_answer(asked: Asked, text: str) -> list[Any]:
    """The messages with the partial answer as the last one, or behind the one that the client itself left open.

    Raises:
        Hindered: the messages are none that can be added to.
    """
    messages = asked.value("messages")
    if not isinstance(messages, list):
        raise Hindered("prompt")
    if not asked.value("continue_final_message"):
        return [*messages, {"role": "assistant", "content": text}]
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or not isinstance(last.get("content"), str):
        raise Hindered("prompt")
    return [*messages[:-1], {**last, "content": last["content"] + text}]


def _has_media(messages: Any) -> bool:
    """Whether a message holds more than text: its token ids would stand for images that are not sent along."""
    if not isinstance(messages, list):
        return True
    contents = (one.get("content") for one in messages if isinstance(one, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(not isinstance(part, str) and (not isinstance(part, dict) or "text" not in part) for part in parts)


def _stopping(text: str, stops: Sequence[str]) -> bool:
    """Whether a text ends in the beginning of one that ends the answer: the rest might complete it unseen."""
    return any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))

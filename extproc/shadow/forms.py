"""What engines answer, API by API: the text, tool calls and end of an answer, in one piece or event by event.

Field names: OpenAI's of chats, completions and responses, Anthropic's of messages, as vLLM 0.32
(`entrypoints/openai`, `entrypoints/anthropic`), SGLang and TensorRT-LLM send them. Whatever has another type than
expected counts as not sent. Only the first choice of several is read; how many there were is counted.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from extproc.request.model import RouteKind

_Json = dict[str, Any]
_MOST_TOKENS: Final = 1 << 31
_LONGEST_FINISH: Final = 32
_ENDS: Final = {"completed": "stop", "max_output_tokens": "length"}
"""What the Responses API calls its ends, in the words of the others."""


class Found:
    """What was found of an answer so far.

    Attributes:
        text: pieces of the text.
        reasoning: characters of reasoning.
        tools: of each tool call its name and the pieces of its arguments, in the order in which they began.
        finish: why the engine ended, as it said it.
        tokens: generated tokens by `usage`, else by token ids; None when neither was told.
        choices: indexes of the choices that were seen.
        ended: whether the engine said that the answer is whole.
        failed: whether it sent an error in the answer.
        refused: whether it marked the answer as a refusal.
    """

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning = 0
        self.tools: dict[int, tuple[str, list[str]]] = {}
        self.finish = ""
        self.tokens: int | None = None
        self.choices: set[int] = set()
        self.ended = False
        self.failed = False
        self.refused = False
        self._ids = 0

    def write(self, text: object) -> bool:
        """Add to the text; whether there was any."""
        if not isinstance(text, str) or not text:
            return False
        self.text.append(text)
        return True

    def think(self, text: object) -> bool:
        """Add to the reasoning; whether there was any."""
        if not isinstance(text, str) or not text:
            return False
        self.reasoning += len(text)
        return True

    def call(self, index: object, name: object, arguments: object) -> bool:
        """Add to a tool call; whether there was anything to add."""
        at = index if isinstance(index, int) else 0
        known, pieces = self.tools.get(at, ("", []))
        named = name if isinstance(name, str) else ""
        more = arguments if isinstance(arguments, str) else ""
        if not named and not more:
            return False
        if more:
            pieces.append(more)
        self.tools[at] = (known or named, pieces)
        return True

    def end(self, reason: object) -> None:
        """Note why the engine ended, if it says so."""
        if isinstance(reason, str) and reason:
            self.finish = reason[:_LONGEST_FINISH]

    def use(self, usage: object, name: str) -> None:
        """Note the tokens that `usage` tells."""
        told = usage.get(name) if isinstance(usage, dict) else None
        if isinstance(told, int) and not isinstance(told, bool) and 0 <= told < _MOST_TOKENS:
            self.tokens = told
            self._ids = -1

    def count(self, ids: object) -> None:
        """Count token ids, while there is no usage."""
        if isinstance(ids, list) and self._ids >= 0:
            self._ids += len(ids)
            self.tokens = self._ids


Reader = Callable[[Found, _Json], bool]
"""Takes one event, or a whole answer; whether it held anything that was generated."""


def _choices(found: Found, event: _Json, read: Reader) -> bool:
    if event.get("error"):
        found.failed = True
        return False
    found.use(event.get("usage"), "completion_tokens")
    choices, generated = event.get("choices"), False
    for choice in choices if isinstance(choices, list) else []:
        if not isinstance(choice, dict):
            continue
        index = choice.get("index", 0)
        found.choices.add(index if isinstance(index, int) else 0)
        if index != 0:
            continue
        generated |= read(found, choice)
        found.count(choice.get("token_ids"))
        if isinstance(choice.get("finish_reason"), str):
            found.end(choice["finish_reason"])
            found.ended = True
    return generated


def _chat(found: Found, event: _Json) -> bool:
    return _choices(found, event, _chat_choice)


def _chat_choice(found: Found, choice: _Json) -> bool:
    """The delta of an event, or the message of a whole answer."""
    said = choice.get("delta") or choice.get("message")
    if not isinstance(said, dict):
        return False
    generated = found.write(said.get("content"))
    generated |= found.think(said.get("reasoning") or said.get("reasoning_content"))
    if found.write(said.get("refusal")):
        generated = found.refused = True
    calls = said.get("tool_calls")
    for position, call in enumerate(calls if isinstance(calls, list) else []):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            index = call.get("index", position)
            generated |= found.call(index, function.get("name"), function.get("arguments"))
    return generated


def _completion(found: Found, event: _Json) -> bool:
    return _choices(found, event, lambda found, choice: found.write(choice.get("text")))


def _responses(found: Found, event: _Json) -> bool:
    kind = event.get("type")
    at = event.get("output_index")
    match kind:
        case "response.output_text.delta":
            return found.write(event.get("delta"))
        case "response.refusal.delta":
            found.refused = True
            return found.write(event.get("delta"))
        case "response.reasoning_text.delta" | "response.reasoning_summary_text.delta":
            return found.think(event.get("delta"))
        case "response.output_item.added" if isinstance(item := event.get("item"), dict):
            return item.get("type") in _CALLS and found.call(at, item.get("name"), None)
        case "response.function_call_arguments.delta" | "response.custom_tool_call_input.delta":
            return found.call(at, None, event.get("delta"))
        case "error" | "response.failed":
            found.failed = True
        case "response.completed" | "response.incomplete" if isinstance(whole := event.get("response"), dict):
            _response(found, whole)
        case None if event.get("error"):
            found.failed = True
    return False


_CALLS: Final = {"function_call": "arguments", "custom_tool_call": "input"}
"""Items of a response that call a tool, and the field of what they call it with."""


def _response(found: Found, whole: _Json) -> bool:
    """A whole response; what it holds goes before what its events held."""
    found.use(whole.get("usage"), "output_tokens")
    if whole.get("error") or whole.get("status") == "failed":
        found.failed = True
        return False
    output = whole.get("output")
    if isinstance(output, list) and output:
        found.text, found.reasoning, found.tools = [], 0, {}
        for index, item in enumerate(output):
            if isinstance(item, dict):
                _item(found, index, item)
    details = whole.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else whole.get("status")
    found.end(_ENDS.get(reason, reason) if isinstance(reason, str) else None)
    found.ended = isinstance(whole.get("status"), str)
    return bool(found.text or found.tools or found.reasoning)


def _item(found: Found, index: int, item: _Json) -> None:
    kind, content = item.get("type"), item.get("content")
    if kind in _CALLS:
        found.call(index, item.get("name"), item.get(_CALLS[kind]))
    for part in content if isinstance(content, list) else []:
        if not isinstance(part, dict):
            continue
        if kind == "reasoning":
            found.think(part.get("text"))
        elif found.write(part.get("text")):
            pass
        elif found.write(part.get("refusal")):
            found.refused = True


def _messages(found: Found, event: _Json) -> bool:
    at = event.get("index")
    match event.get("type"):
        case "content_block_start" if isinstance(block := event.get("content_block"), dict):
            return _block(found, at, block)
        case "content_block_delta" if isinstance(delta := event.get("delta"), dict):
            generated = found.write(delta.get("text")) or found.think(delta.get("thinking"))
            return generated or found.call(at, None, delta.get("partial_json"))
        case "message_delta":
            delta = event.get("delta")
            found.end(delta.get("stop_reason") if isinstance(delta, dict) else None)
            found.use(event.get("usage"), "output_tokens")
        case "message_stop":
            found.ended = True
        case "error":
            found.failed = True
        case None if event.get("error"):
            found.failed = True
    return False


def _message(found: Found, whole: _Json) -> bool:
    if whole.get("type") == "error":
        found.failed = True
        return False
    content = whole.get("content")
    for index, block in enumerate(content if isinstance(content, list) else []):
        if isinstance(block, dict):
            _block(found, index, block)
    found.end(whole.get("stop_reason"))
    found.use(whole.get("usage"), "output_tokens")
    found.ended = isinstance(whole.get("stop_reason"), str)
    return bool(found.text or found.tools or found.reasoning)


def _block(found: Found, index: object, block: _Json) -> bool:
    """A block of a message; the input of a tool call that streams is empty here."""
    generated = found.write(block.get("text")) or found.think(block.get("thinking"))
    if block.get("type") == "tool_use":
        given = block.get("input")
        arguments = msgspec.json.encode(given).decode() if isinstance(given, dict) and given else None
        generated |= found.call(index, block.get("name"), arguments)
    return generated


EVENTS: Final[Mapping[RouteKind, Reader]] = {
    RouteKind.CHAT: _chat,
    RouteKind.COMPLETION: _completion,
    RouteKind.RESPONSES: _responses,
    RouteKind.MESSAGES: _messages,
}
"""Who reads an event of a stream, by API; the keys are the APIs whose answers can be compared."""

WHOLES: Final[Mapping[RouteKind, Reader]] = {
    RouteKind.CHAT: _chat,
    RouteKind.COMPLETION: _completion,
    RouteKind.RESPONSES: _response,
    RouteKind.MESSAGES: _message,
}
"""Who reads an answer in one piece."""

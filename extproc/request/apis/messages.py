"""Anthropic's Messages API: `/v1/messages`, turned into the conversation that engines make of it.

vLLM (0.32, `entrypoints/anthropic/serving.py`) rewrites such a body as a chat completion, and so it shares its cache
with one: the system text becomes the first message, a tool result a message of its own in front of the message it
came in, thinking the reasoning of its message. `cache_control`, signatures and redacted thinking reach no prompt.
"""

from collections.abc import Iterator
from typing import Any

from extproc.request.apis.body import Templated, templated_lead
from extproc.request.message import PromptError
from extproc.request.prompt import Prompt, conversation
from extproc.request.volatile import Rules


class Messages(Templated, gc=False):
    """Body of a message."""

    system: Any = None
    messages: Any = None
    tools: Any = None
    thinking: Any = None
    output_config: Any = None


def messages_prompt(body: Messages, rules: Rules) -> Prompt:
    """Return the prompt of a message; one without segments when the body has no messages.

    Raises:
        PromptError: the messages are malformed.
    """
    if body.messages is None or body.messages == []:
        return Prompt()
    if not isinstance(body.messages, list):
        raise PromptError("messages is not a list")
    turns = [turn for message in body.messages for turn in _turns(message)]
    if body.system:
        turns.insert(0, {"role": "system", "content": _content(body.system)})
    return conversation(templated_lead(body, effort=_effort(body), tools=_tools(body.tools)), turns, rules)


def _effort(body: Messages) -> object:
    """How hard the model thinks: `thinking` switched off goes before the effort; its budget only limits sampling."""
    if isinstance(body.thinking, dict) and body.thinking.get("type") == "disabled":
        return "none"
    return body.output_config.get("effort") if isinstance(body.output_config, dict) else None


def _tools(tools: object) -> object:
    """Tools as the chat completions API has them; those that run at Anthropic have no schema and stay as they are."""
    if not isinstance(tools, list):
        return tools
    return [_tool(tool) if isinstance(tool, dict) and "input_schema" in tool else tool for tool in tools]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in tool.items() if key not in {"type", "input_schema", "cache_control"}}
    return {"type": "function", "function": {**rest, "parameters": tool["input_schema"]}}


def _turns(message: object) -> Iterator[object]:
    """The messages that one message of the API becomes."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        yield message
        return
    turn: dict[str, Any] = {"role": message.get("role")}
    content: list[object] = []
    calls: list[object] = []
    thoughts: list[str] = []
    for block in message["content"]:
        if not isinstance(block, dict):
            raise PromptError("a block of a message is no object")
        match block.get("type"):
            case "tool_result":
                yield {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": _content(block.get("content")),
                }
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "thinking":
                thoughts.append(block["thinking"] if isinstance(block.get("thinking"), str) else "")
            case "redacted_thinking":
                pass
            case _:
                content += _parts(block)
    if content or calls or thoughts or not message["content"]:
        yield {**turn, "reasoning": "".join(thoughts), "content": content or None, "tool_calls": calls}


def _content(content: object) -> object:
    """The content of a system text or of a tool result."""
    if not isinstance(content, list):
        return content
    return [part for block in content for part in (_parts(block) if isinstance(block, dict) else [block])]


def _parts(block: dict[str, Any]) -> list[object]:
    """The parts that a block becomes.

    An image with data or a URL is one by its URL, a document of text that text; the rest stays as it is: an image that
    an uploaded file's id names is told apart by that id.
    """
    source = block.get("source")
    if not isinstance(source, dict):
        return [block]
    kind, data = source.get("type"), source.get("data")
    if block.get("type") == "image" and (kind == "url" or data):
        url = source.get("url") if kind == "url" else f"data:{source.get('media_type')};base64,{data}"
        return [{"type": "image_url", "image_url": {"url": url}}]
    if block.get("type") == "document" and kind == "text" and isinstance(data, str):
        return [{"type": "text", "text": data}]
    return [block]

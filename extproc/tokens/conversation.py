"""Messages and tools as a chat template sees them, in the way that vLLM prepares them (0.32 and 0.33).

After `renderers/chat_utils.py` (`parse_chat_messages`), `renderers/hf.py` and the request models of
`entrypoints/openai/chat_completion/protocol.py`. What those refuse is refused here, and what they drop is dropped.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from extproc.tokens.values import NoTokensError, Why

_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_reference": "name",
}
_PART_FIELDS = frozenset(
    {
        "audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url", "input_audio",
        "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid", "video_embeds", "video_url",
    }
)  # fmt: skip
"""Fields of parts that vLLM knows; others reach templates that take parts."""
_BILLING = "x-anthropic-billing-header"
"""First word of a line that Claude Code puts in front of its system text, and that vLLM leaves out."""


def rendered_messages(messages: Iterable[object], *, parts: bool, developer: bool) -> list[dict[str, Any]]:
    """Messages as a template is given them.

    Args:
        messages: as the client wrote them, without media.
        parts: the template takes the parts of a message; otherwise their texts are joined by new lines.
        developer: the template knows the role `developer`; otherwise such messages become system messages, and all of
            those one in front.

    Raises:
        NoTokensError: a message is none that the engine would take.
    """
    out = [_message(message, parts=parts) for message in messages]
    if developer or all(message["role"] != "developer" for message in out):
        return out
    for message in out:
        if message["role"] == "developer":
            message["role"] = "system"
            message.pop("tools", None)
    return _one_system_message(out)


def rendered_tools(tools: object) -> list[dict[str, Any]] | None:
    """Tools as a template is given them: the fields of vLLM's models in their order, null where absent.

    Raises:
        NoTokensError: a tool is none that the engine would take.
    """
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise NoTokensError(Why.REFUSED)
    return [_tool(tool) for tool in tools]


def _tool(tool: object) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise NoTokensError(Why.REFUSED)
    inner = {name: function.get(name) for name in ("name", "description", "parameters")}
    deferred = tool.get("defer_loading")
    inner |= {
        name: value
        for name, value in (
            ("strict", function.get("strict")),
            ("defer_loading", deferred if function.get("defer_loading") is None else function["defer_loading"]),
        )
        if value is not None
    }
    outer = {"type": "function", "function": inner}
    return outer if deferred is None else {**outer, "defer_loading": deferred}


def _message(message: object, *, parts: bool) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise NoTokensError(Why.REFUSED)
    given = _parts(message.get("content"))
    if role == "system":
        given = [kept for part in given if (kept := _without_billing(part)) is not None]
    read = [(part, text) for part in given if (text := _text(part)) is not None]
    content: Any = [_part(*each) for each in read] if parts else "\n".join(text for _, text in read)
    out: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        _add_answer(out, message)
    elif role == "tool":
        if "tool_call_id" in message:
            out["tool_call_id"] = message["tool_call_id"]
        if parts and all(part["type"] == "text" for part in content):
            # Most templates take the result of a tool as a text only.
            out["content"] = "\n".join(part["text"] for part in content)
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            out[name] = message[name]
    if role == "developer":
        tools = message.get("tools")
        out["tools"] = [_tool_of_message(tool) for tool in tools] if isinstance(tools, list) else None
    return out


def _tool_of_message(tool: object) -> dict[str, Any]:
    """A tool that a developer's message carries, which vLLM does not read into a model but orders."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict):
        raise NoTokensError(Why.REFUSED)
    inner = _in_order(function, ("name", "description", "parameters", "strict"))
    return _in_order(tool, ("function", "type")) | {"function": inner}


def _add_answer(out: dict[str, Any], message: Mapping[str, Any]) -> None:
    """What only an assistant's message has: its calls, and what it thought, by the older name as well."""
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        out["tool_calls"] = [_call(call) for call in calls]
    elif calls is not None and not isinstance(calls, list):
        raise NoTokensError(Why.REFUSED)
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        out["reasoning"] = out["reasoning_content"] = reasoning


def _call(call: object) -> dict[str, Any]:
    """A tool call in the field order of the engine's model, its arguments read from the JSON they are."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
        raise NoTokensError(Why.REFUSED)
    inner = _in_order(function, ("arguments", "name")) | {"arguments": _arguments(function.get("arguments"))}
    return _in_order(call, ("id", "function", "type")) | {"function": inner}


def _in_order(value: Mapping[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
    return {name: value[name] for name in first if name in value} | dict(value)


def _arguments(text: object) -> dict[str, Any]:
    if not isinstance(text, str):
        raise NoTokensError(Why.REFUSED)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _parts(content: object) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise NoTokensError(Why.REFUSED)
    return content


def _text(part: object) -> str | None:
    """The text of a part; None for one that has none, which is left out."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    field = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
    if not isinstance(part, dict) or field is None or part.get("uuid") is not None:
        raise NoTokensError(Why.UNSUPPORTED)
    text = part.get(field)
    if text is not None and not isinstance(text, str):
        raise NoTokensError(Why.REFUSED)
    return text


def _part(part: Any, text: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": text}
    if part["type"] == "tool_reference":
        return {"type": "tool_reference", "name": text}
    return {"type": "text", "text": text} | {name: part[name] for name in part if name not in _PART_FIELDS}


def _without_billing(part: Any) -> Any:
    """A part of a system text without the billing line; None when nothing else was in it."""
    is_text = isinstance(part, dict) and part.get("type") == "text"
    text = part.get("text") if is_text else part
    if not isinstance(text, str) or not text.startswith(_BILLING):
        return part
    rest = text.partition("\n")[2]
    if not rest:
        return None
    return {**part, "text": rest} if is_text else rest


def _one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several system messages, or one that is not the first, become one in front of all others."""
    system = [message for message in messages if message["role"] == "system"]
    if len(system) == 1 and messages[0] is system[0]:
        return messages
    texts = [_joined(message["content"]) for message in system]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in messages if message["role"] != "system")]


def _joined(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)

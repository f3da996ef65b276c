"""OpenAI's Responses API: `/v1/responses`, turned into the conversation that engines make of it.

vLLM (0.32, `entrypoints/openai/responses/utils.py`) renders the instructions as a system message, then what it stored
of the response that is continued, then the items. The answer of one turn is several items (reasoning, a message,
calls); each is an assistant message here, so that a longer list of items still begins with the same segments. Ids and
states of items reach no prompt.
"""

from typing import Any

from extproc.request.apis.body import Templated, templated_lead
from extproc.request.canonical import plain_bytes
from extproc.request.message import PromptError
from extproc.request.prompt import Prompt, conversation
from extproc.request.volatile import Rules

_UNREAD = frozenset({"id", "status"})


class Responses(Templated, gc=False):
    """Body of a response."""

    input: Any = None
    instructions: Any = None
    tools: Any = None
    reasoning: Any = None


def responses_prompt(body: Responses, rules: Rules) -> Prompt:
    """Return the prompt of a response; one without segments when the body has no input.

    Messages that the engine or a conversation object holds are not in the body. Their id stands in their place, so that
    two histories under the same instructions never share what follows.

    Raises:
        PromptError: the input is malformed.
    """
    if body.input is None or body.input == []:
        return Prompt()
    if isinstance(body.input, str):
        messages = [{"role": "user", "content": body.input}]
    elif isinstance(body.input, list):
        messages = [_message(item) for item in body.input]
    else:
        raise PromptError("the input is neither a text nor a list of items")
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    effort = body.reasoning.get("effort") if isinstance(body.reasoning, dict) else None
    history = body.previous_response_id or body.conversation
    return conversation(templated_lead(body, effort=effort, tools=_tools(body.tools), history=history), messages, rules)


def _tools(tools: object) -> object:
    """Functions as the chat completions API has them, one level deeper; other tools as they are."""
    if not isinstance(tools, list):
        return tools
    return [_tool(tool) if isinstance(tool, dict) and tool.get("type") == "function" else tool for tool in tools]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {key: value for key, value in tool.items() if key not in {"type", "cache_control"}}
    return {"type": "function", "function": function}


def _message(item: object) -> dict[str, Any]:
    """The message that an item becomes."""
    if not isinstance(item, dict):
        raise PromptError("an item of the input is no object")
    kind = item.get("type")
    if kind == "message" or (kind is None and "role" in item):
        return {"role": item.get("role"), "content": item.get("content")}
    if kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments") if kind == "function_call" else {"input": item.get("input")}
        function = {"name": item.get("name"), "arguments": arguments}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _output(item.get("output"))}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning": _reasoning(item)}
    if not isinstance(kind, str):
        raise PromptError("an item of the input has neither a type nor a role")
    # Calls of tools that run at the provider, and what they returned.
    part = {key: value for key, value in item.items() if key not in _UNREAD}
    return {"role": "tool" if kind.endswith("_output") else "assistant", "content": [part]}


def _output(output: object) -> object:
    if output is None or isinstance(output, str | list):
        return output
    return plain_bytes(output).decode()


def _reasoning(item: dict[str, Any]) -> object:
    """What the model thought, or the summary of it, or the sealed form that only its provider can read."""
    for name in ("content", "summary"):
        texts = item.get(name)
        if isinstance(texts, list) and texts:
            return "\n".join(
                part["text"] for part in texts if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
    return item.get("encrypted_content")

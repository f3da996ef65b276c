"""Tools and tool calls in the order an engine writes their fields, whatever order the client sent them in."""

from collections.abc import Mapping, Sequence

import msgspec


def ordered_tools(tools: object) -> object:
    """Return a copy of tools; what is no list comes back as it is."""
    if not isinstance(tools, list):
        return tools
    return [_with_function(tool, ("type",), ("name", "description", "parameters")) for tool in tools]


def ordered_calls(calls: object) -> object:
    """Return a copy of tool calls, with arguments read as the object they spell; what is no list as it is."""
    if not isinstance(calls, list):
        return calls
    ordered = [_with_function(call, ("id", "type"), ("name", "arguments")) for call in calls]
    for call in ordered:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(arguments := function.get("arguments"), str):
            function["arguments"] = _parsed(arguments)
    return ordered


def _with_function(item: object, first: Sequence[str], function_first: Sequence[str]) -> object:
    """Copy a tool or a tool call with the fields that the API defines in front, in the engine's order."""
    if not isinstance(item, dict):
        return item
    ordered = _ordered(item, (*first, "function"))
    function = ordered.get("function")
    if isinstance(function, dict):
        ordered["function"] = _ordered(function, function_first)
    return ordered


def _ordered(value: Mapping[str, object], first: Sequence[str]) -> dict[str, object]:
    # A field that is null and one that is missing are the same to the engine; cache_control means nothing to it.
    ordered = {key: value[key] for key in first if value.get(key) is not None}
    ordered.update((key, item) for key, item in value.items() if key not in first and key != "cache_control")
    return ordered


def _parsed(arguments: str) -> object:
    """Return the object that a tool call's arguments spell, as the engine reads them, else the text itself."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments

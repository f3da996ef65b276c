"""What is told of a conversation by its segments: how it began, and which turns it had."""

import json
from typing import Any

from extproc.request.conversation import beginning, turns_before
from extproc.request.model import Request
from extproc.request.shapes import parse

USER, ANSWER = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "well"}


def chat(*messages: dict[str, Any], **more: Any) -> Request:
    """A chat as it is read."""
    return parse("/v1/chat/completions", {}, json.dumps({"model": "m", "messages": messages, **more}).encode())


def test_earlier_turns_have_the_digests_that_they_had() -> None:
    """Each request of a conversation of five names all before it, the newest first, as they named themselves."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, USER]
    more = {"tools": [{"type": "function", "function": {"name": "f"}}], "cache_salt": "x"}
    seen: list[bytes] = []
    for turn in range(5):
        request = chat(*messages, **more)
        assert turns_before(request) == seen[::-1]
        assert request.follows == (seen[-1] if seen else b"")
        seen.append(request.turn)
        call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
        result = {"role": "tool", "tool_call_id": "1", "content": "done"}
        messages += [ANSWER, USER] if turn % 2 else [ANSWER, call, result]


def test_what_is_no_conversation_had_no_turns() -> None:
    """A completion has neither turns nor a beginning, whatever its text."""
    request = parse("/v1/completions", {}, b'{"model":"m","prompt":"assistant"}')
    assert (turns_before(request), beginning(request.segments)) == ([], b"")


def test_a_conversation_begins_with_its_system_messages_and_one_more() -> None:
    """What comes later changes nothing, nor do tools; another system message does."""
    system = {"role": "system", "content": "be brief"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    first = beginning(chat(system, USER).segments)
    assert first
    assert beginning(chat(system, USER, ANSWER, USER, tools=tools).segments) == first
    assert beginning(chat({"role": "developer", "content": "be brief"}, USER).segments) != first
    assert beginning(chat({**system, "content": "be long"}, USER).segments) != first
    assert beginning(chat(USER).segments) != first
    assert beginning(chat(system, {"role": "user", "content": "hello!"}).segments) != first


def test_a_role_is_told_from_one_that_begins_like_it() -> None:
    """`systematic` is no system message: the conversation begins with it."""
    odd = {"role": "systematic", "content": "a"}
    assert beginning(chat(odd, USER).segments) == beginning(chat(odd, ANSWER).segments)

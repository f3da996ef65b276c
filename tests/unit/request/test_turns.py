"""Turns: how a growing list of messages says which request it continues, with no key at all."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.model import Request
from tests.unit.request.calls import CHAT, COMPLETION, EMBEDDING, MESSAGES, RERANK, RESPONSES, SCORE, call

TEXT = st.text(min_size=1, max_size=6)
ASKED = TEXT.map(lambda text: {"role": "user", "content": text})
ANSWERED = TEXT.map(lambda text: {"role": "assistant", "content": text})
CALLED = TEXT.map(
    lambda text: {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}
        ],
    }
)
TOOLS_SAID = TEXT.map(lambda text: {"role": "tool", "tool_call_id": "c", "content": text})
SYSTEM = TEXT.map(lambda text: {"role": "system", "content": text})
# What a client appends between two requests: the answer it got, then what it has to say to it.
STEP = st.tuples(
    st.lists(ANSWERED | CALLED, min_size=1, max_size=2), st.lists(ASKED | TOOLS_SAID, min_size=1, max_size=2)
).map(lambda step: step[0] + step[1])
FIRST = st.tuples(st.lists(SYSTEM, max_size=1), st.lists(ASKED, min_size=1, max_size=2)).map(
    lambda both: both[0] + both[1]
)
AROUND = st.fixed_dictionaries({}, optional={"tools": st.just([{"type": "function"}]), "documents": st.just(["d"])})


def anthropic(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The same conversation as the Messages API has it."""
    system = "".join(message["content"] for message in messages if message["role"] == "system")
    turns = []
    for message in messages:
        content: object = message["content"]
        if message["role"] == "tool":
            content = [{"type": "tool_result", "tool_use_id": "c", "content": content}]
        elif content is None:
            arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
            content = [{"type": "tool_use", "id": "c", "name": "f", "input": arguments}]
        if message["role"] != "system":
            turns.append({"role": "user" if message["role"] == "tool" else message["role"], "content": content})
    return {"messages": turns, **({"system": system} if system else {})}


def responses(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The same conversation as items of the Responses API."""
    items: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": "c", "output": message["content"]})
        elif message["content"] is None:
            items.append({"type": "function_call", "call_id": "c", **message["tool_calls"][0]["function"]})
        elif message["role"] == "assistant":
            part = {"type": "output_text", "text": message["content"]}
            items.append({"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": [part]})
        else:
            items.append(message)
    return {"input": items}


def said(path: str, messages: list[dict[str, Any]], **around: Any) -> Request:
    """One request of a conversation on one of the three APIs."""
    if path == MESSAGES:
        return call(path, **anthropic(messages), **{k: v for k, v in around.items() if k != "tools"})
    return call(path, **(responses(messages) if path == RESPONSES else {"messages": messages}), **around)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@given(first=FIRST, steps=st.lists(STEP, min_size=1, max_size=3), around=AROUND)
def test_every_turn_follows_the_one_before_it(
    path: str, first: list[dict[str, Any]], steps: list[list[dict[str, Any]]], around: dict[str, Any]
) -> None:
    """A client that appends answers and then more of its own continues exactly the request it had answered."""
    messages, before = first, said(path, first, **around)
    assert len(before.turn) == 16
    assert before.follows == b""
    for step in steps:
        messages = messages + step
        after = said(path, messages, **around)
        assert after.follows == before.turn
        assert after.turn != before.turn
        assert after.segments[: len(before.segments)] == before.segments
        before = after


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@given(one=FIRST, other=FIRST, step=STEP)
def test_another_history_is_another_turn(
    path: str, one: list[dict[str, Any]], other: list[dict[str, Any]], step: list[dict[str, Any]]
) -> None:
    """Turns, and what they follow, are equal only for equal histories."""
    first, second = said(path, one + step), said(path, other + step)
    same = one == other
    assert (first.turn == second.turn) == same
    assert (first.follows == second.follows) == same


@pytest.mark.parametrize(
    "more", [{"tools": [{"a": 1}]}, {"model": "b"}, {"cache_salt": "b"}, {"chat_template_kwargs": {"a": 1}}]
)
def test_what_leads_a_conversation_is_part_of_its_turn(more: dict[str, Any]) -> None:
    """Tools, template variables, model and salt tell two conversations apart whose messages are equal."""
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    plain, led = call(messages=messages, model="a"), call(messages=messages, **{"model": "a", **more})
    assert plain.turn != led.turn
    assert plain.follows != led.follows


@pytest.mark.parametrize(
    ("roles", "answered"),
    [
        ("u", 0),
        ("ua", 1),
        ("uau", 1),
        ("suau", 2),
        ("uauau", 3),
        ("uaau", 1),
        ("uatt", 1),
        ("a", 0),
        ("au", 0),
        ("aau", 0),
        ("auau", 2),
        ("sau", 1),
    ],
)
def test_the_last_answer_says_what_is_continued(roles: str, answered: int) -> None:
    """It follows what stands before the last run of assistant messages; an answer to nothing continues nothing."""
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    messages = [{"role": names[role], "content": str(at)} for at, role in enumerate(roles)]
    expected = call(messages=messages[:answered]).turn if answered else b""
    assert call(messages=messages).follows == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETION, {"prompt": "x"}),
        (EMBEDDING, {"input": "x"}),
        (EMBEDDING, {"messages": [{"role": "user", "content": "x"}]}),
        (RERANK, {"query": "x", "documents": ["y"]}),
        (SCORE, {"text_1": "x", "text_2": "y"}),
        (CHAT, {"prompt_token_ids": [1, 2]}),
        (CHAT, {"messages": 7}),
        (f"{CHAT}/batch", {"messages": [[{"role": "user", "content": "x"}]]}),
    ],
)
def test_what_is_no_conversation_has_no_turn(path: str, body: dict[str, Any]) -> None:
    """Nothing continues a completion, an embedding, a score or a batch, nor what could not be read."""
    request = call(path, **body)
    assert (request.turn, request.follows) == (b"", b"")

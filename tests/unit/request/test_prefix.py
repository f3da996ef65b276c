"""How far two prompts agree: the rule of prefix hashing, over every API."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.blocks import chain
from extproc.request.model import Request
from extproc.request.shapes import parse
from tests.unit.request.calls import CHAT, COMPLETION, EMBEDDING, MESSAGES, RERANK, RESPONSES, SCORE, call

BLOCK = 16
TEXT = st.text(min_size=1, max_size=60)
TEXTS = st.lists(TEXT, min_size=1, max_size=5)


def body_of(path: str, texts: list[str]) -> dict[str, Any]:
    """A body whose prompt is made of these texts, in their order."""
    turns = [{"role": "user" if at % 2 == 0 else "assistant", "content": text} for at, text in enumerate(texts)]
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": turns},
        MESSAGES: {"system": "be brief", "messages": turns},
        RESPONSES: {"instructions": "be brief", "input": turns},
        COMPLETION: {"prompt": "".join(texts)},
        EMBEDDING: {"input": texts},
        RERANK: {"query": "which?", "documents": texts},
        SCORE: {"text_1": "which?", "text_2": texts},
    }
    return bodies[path]


def blocks_of(request: Request, block: int = BLOCK) -> list[int]:
    """The chain of a request."""
    return chain(request.segments, request.salt, block)


def overlap(one: Request, other: Request, block: int = BLOCK) -> int:
    """Leading blocks that two requests share; no block behind the first difference may be equal."""
    pairs = [a == b for a, b in zip(blocks_of(one, block), blocks_of(other, block), strict=False)]
    shared = pairs.index(False) if False in pairs else len(pairs)
    assert not any(pairs[shared:])
    return shared


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, COMPLETION, EMBEDDING, RERANK, SCORE])
@given(shared=TEXTS, one=st.lists(TEXT, max_size=3), other=st.lists(TEXT, max_size=3))
def test_equal_beginnings_have_equal_blocks_and_nothing_else(
    path: str, shared: list[str], one: list[str], other: list[str]
) -> None:
    """Blocks agree at least as far as the shared texts reach, exactly as far as the bytes do, and never again."""
    before = call(path, **body_of(path, shared))
    first, second = (call(path, **body_of(path, shared + more)) for more in (one, other))
    joined = [b"".join(request.segments) for request in (first, second)]
    same = next((at for at, (a, b) in enumerate(zip(*joined, strict=False)) if a != b), min(map(len, joined)))
    assert overlap(first, second) == same // BLOCK
    assert overlap(before, first) == before.prompt_bytes // BLOCK


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, COMPLETION, EMBEDDING, RERANK, SCORE])
@given(texts=TEXTS, at=st.integers(0, 4), character=st.characters(codec="utf-8"))
def test_one_changed_character_leaves_no_block_equal_behind_it(
    path: str, texts: list[str], at: int, character: str
) -> None:
    """Whatever stands behind the change, nothing of it counts as cached."""
    at %= len(texts)
    changed = [*texts[:at], character + texts[at], *texts[at + 1 :]]
    first, second = call(path, **body_of(path, texts)), call(path, **body_of(path, changed))
    assert first.segments != second.segments
    overlap(first, second)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, COMPLETION, EMBEDDING, RERANK, SCORE])
@pytest.mark.parametrize(
    "more",
    [
        {"cache_salt": "tenant"},
        {"extra_key": "tenant"},
        {"extra_key": ["tenant"]},
        {"model": "adapter"},
        {"model": "base:adapter"},
        {"lora_path": "adapter"},
        {"lora_request": {"lora_name": "adapter", "lora_int_id": 1}},
    ],
)
def test_another_salt_or_adapter_shares_nothing(path: str, more: dict[str, Any]) -> None:
    """Tenants that salt their cache, and adapters however they are named, have no block in common with the rest."""
    body = {"model": "base", **body_of(path, ["x" * 200])}
    assert not set(blocks_of(call(path, **body))) & set(blocks_of(call(path, **{**body, **more})))


NAMES = ["model", "cache_salt", "extra_key", "lora_path"]
VALUES = st.dictionaries(st.sampled_from(NAMES), st.text(max_size=3, alphabet="ams\0\1"))


@given(VALUES, VALUES)
def test_two_salts_are_equal_only_when_their_values_are(one: dict[str, str], other: dict[str, str]) -> None:
    """No value can run into the next; a value that is empty is one that was not sent."""
    salts = [call(CHAT, **values).salt for values in (one, other)]
    meant = [{name: value for name, value in values.items() if value} for values in (one, other)]
    assert (salts[0] == salts[1]) == (meant[0] == meant[1])


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_other_tools_end_the_overlap_where_the_tools_begin(path: str) -> None:
    """The system text in front of the tools is shared; with other tools nothing behind it is."""

    def tools(name: str) -> list[dict[str, Any]]:
        function = {"name": name, "description": "d" * 100}
        if path == CHAT:
            return [{"type": "function", "function": {**function, "parameters": {"type": "object"}}}]
        if path == MESSAGES:
            return [{**function, "input_schema": {"type": "object"}}]
        return [{"type": "function", **function, "parameters": {"type": "object"}}]

    body = body_of(path, ["x" * 200])
    if path == CHAT:
        body["messages"].insert(0, {"role": "system", "content": "be brief"})
    system = len(call(path, **body).segments[0])
    one, other = (call(path, **body, tools=tools(name)) for name in ("find", "keep"))
    assert overlap(one, other, 1) == system + len('\xfct[{"type":"function","function":{"name":"')
    assert overlap(one, call(path, **body), 1) == system


def test_a_chat_of_ten_turns_overlaps_more_every_turn() -> None:
    """All messages count, not the first one only."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be brief" * 20}]
    overlaps, before = [], call(messages=messages)
    for turn in range(10):
        messages += [{"role": "user", "content": f"question {turn} " * 8}]
        now = call(messages=messages)
        overlaps.append(overlap(before, now))
        messages += [{"role": "assistant", "content": f"answer {turn} " * 8}]
        before = now
    assert overlaps == sorted(set(overlaps))
    assert overlaps[-1] > 100


def test_a_tool_call_without_content_is_a_message() -> None:
    """`content` is null beside `tool_calls`, and the calls count."""
    chats = []
    for name in ("find", "keep"):
        calls = [{"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}]
        chats.append(call(messages=[{"role": "assistant", "content": None, "tool_calls": calls}]))
    assert [request.flaw for request in chats] == ["", ""]
    assert chats[0].segments != chats[1].segments


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
MARKS = st.fixed_dictionaries({"cache_control": JSON})


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@given(marks=st.lists(MARKS, min_size=4, max_size=4), texts=TEXTS)
def test_cache_marks_never_count(path: str, marks: list[dict[str, Any]], texts: list[str]) -> None:
    """Clients move `cache_control` from turn to turn, on the body, messages, parts and tools; no engine reads it."""
    plain = body_of(path, texts)
    field = "input" if path == RESPONSES else "messages"
    for message in plain[field]:
        message["content"] = [{"type": "text", "text": message["content"]}]
    plain["tools"] = [{"type": "function", "function": {"name": "f"}}]
    if path == MESSAGES:
        plain["tools"] = [{"name": "f", "input_schema": {}}]
        plain["system"] = [{"type": "text", "text": "be brief"}]
    marked = copy.deepcopy(plain)
    marked.update(marks[0])
    marked[field][0].update(marks[1])
    marked[field][0]["content"][0].update(marks[2])
    marked["tools"][0].update(marks[3])
    one, other = (parse(path, {}, json.dumps(body).encode()) for body in (plain, marked))
    assert (one.segments, one.turn) == (other.segments, other.turn)

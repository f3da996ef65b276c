"""Canonical bytes: what changes them, what does not, and that no two prompts share them."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.message import PromptError
from extproc.request.prompt import Lead, conversation, prompts

TEXT = st.text(alphabet=st.characters(codec=None), max_size=12)
IMAGE = st.builds(
    lambda url: {"type": "image_url", "image_url": {"url": url}},
    st.one_of(TEXT, TEXT.map(lambda data: "data:image/png;base64," + data + "A" * 600)),
)
CONTENT = st.none() | TEXT | st.lists(st.one_of(TEXT.map(lambda t: {"type": "text", "text": t}), IMAGE), max_size=3)
CALL = st.builds(
    lambda name, text, number: {
        "id": "call_1",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps({"a": text, "b": number})},
    },
    TEXT,
    TEXT,
    st.integers(0, 2),
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "t"]) | TEXT, "content": CONTENT},
    optional={
        "name": TEXT,
        "tool_call_id": TEXT,
        "reasoning": TEXT,
        "tool_calls": st.lists(CALL, max_size=2),
        "audio": st.just({"id": "audio_1"}),
    },
)
CONVERSATION = st.lists(MESSAGE, max_size=4)
NO_LEAD = Lead()


def chat(lead: Lead, messages: Any) -> tuple[bytes, ...]:
    """Segments of a conversation, with no rule for volatile text."""
    return conversation(lead, messages).segments


def meaning(messages: list[dict[str, Any]]) -> object:
    """Reduce a conversation to what an engine tells apart: equal meanings must give equal bytes and only those."""
    reduced = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        calls = copy.deepcopy(message.get("tool_calls") or [])
        for call in calls:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        rest = [message.get(name) for name in ("role", "name", "tool_call_id", "audio")]
        reduced.append((rest, message.get("reasoning") or None, content or [], calls))
    return reduced


@given(CONVERSATION, CONVERSATION)
def test_two_conversations_share_their_bytes_only_when_they_mean_the_same(
    one: list[dict[str, Any]], other: list[dict[str, Any]]
) -> None:
    """Concatenated bytes are equal exactly when the engine's prompts are."""
    same = b"".join(chat(NO_LEAD, one)) == b"".join(chat(NO_LEAD, other))
    assert same == (meaning(one) == meaning(other))


@given(CONVERSATION, st.data())
def test_changing_one_value_changes_the_bytes(messages: list[dict[str, Any]], data: st.DataObject) -> None:
    """A text that moves from one field, part or message to its neighbour is another prompt."""
    changed = [*copy.deepcopy(messages), {"role": "user", "content": "x"}]
    message = data.draw(st.sampled_from(changed))
    key = data.draw(st.sampled_from(["role", "content", "name", "tool_call_id", "reasoning"]))
    message[key] = data.draw(TEXT)
    original = [*messages, {"role": "user", "content": "x"}]
    same = b"".join(chat(NO_LEAD, original)) == b"".join(chat(NO_LEAD, changed))
    assert same == (meaning(original) == meaning(changed))


def test_every_field_has_a_place_of_its_own() -> None:
    """One value in any field of a message, or in a message of its own, is a different prompt each time."""
    assistant = {"role": "assistant", "content": "x"}
    conversations: list[list[dict[str, Any]]] = [
        [assistant],
        [assistant, {"role": "x"}],
        [{**assistant, "content": "xx"}],
        [{**assistant, "content": ["x", "x"]}],
        *([{**assistant, field: "x"}] for field in ("name", "tool_call_id", "reasoning", "tool_calls")),
        *([{**assistant, field: {"id": "x"}}] for field in ("audio", "tools")),
        [{**assistant, "content": ["x", {"type": "file", "file": {"file_id": "x"}}]}],
    ]
    assert len({b"".join(chat(NO_LEAD, messages)) for messages in conversations}) == len(conversations)


@given(st.lists(MESSAGE, min_size=1, max_size=4), CONVERSATION, st.booleans(), st.booleans())
def test_a_longer_conversation_starts_with_the_segments_of_the_shorter(
    turns: list[dict[str, Any]], more: list[dict[str, Any]], tools: bool, stored: bool
) -> None:
    """Turn k's segments are a prefix of turn k + 1's, with and without tools and a stored history."""
    lead = Lead(tools=[{"type": "function"}] if tools else None, history="resp_1" if stored else None, documents=["d"])
    before, after = chat(lead, turns), chat(lead, turns + more)
    assert after[: len(before)] == before


@given(TEXT, TEXT, TEXT)
def test_a_document_keeps_its_bytes_when_its_end_changes(shared: str, one: str, other: str) -> None:
    """Two messages that begin alike have bytes that begin alike: no length stands in front of a text."""
    first, second = (b"".join(chat(NO_LEAD, [{"role": "user", "content": shared + end}])) for end in (one, other))
    start = len(b"".join(chat(NO_LEAD, [{"role": "user", "content": shared}])))
    assert first[:start] == second[:start]


@pytest.mark.parametrize(
    "field", ["chat_template", "chat_template_kwargs", "reasoning_effort", "media_kwargs", "truncation", "documents"]
)
def test_what_is_rendered_around_the_messages_comes_first(field: str) -> None:
    """Each field of the lead changes the first segment and leaves the messages' own segments as they were."""
    messages = [{"role": "user", "content": "hi"}]
    plain = chat(NO_LEAD, messages)
    values: list[Any] = ["low", "high"] if field in ("chat_template", "reasoning_effort") else [{"a": 1}, {"a": 2}]
    leads = [chat(Lead(**{field: value}), messages) for value in values]
    assert leads[0][0] != leads[1][0]
    assert all(lead[1:] == plain for lead in leads)
    assert chat(Lead(**{field: type(values[0])()}), messages) == plain


@given(st.lists(st.sampled_from([{field: value} for field in Lead.__struct_fields__ for value in (True, False)])))
def test_no_two_leads_share_their_bytes(fields: list[dict[str, Any]]) -> None:
    """The same value in another field of the lead is another prompt."""
    seen: dict[bytes, set[tuple[tuple[str, Any], ...]]] = {}
    for field in fields:
        kept = tuple(sorted((k, v) for k, v in field.items() if v is True or k == "special_tokens"))
        seen.setdefault(b"".join(chat(Lead(**field), [{"role": "user", "content": "hi"}])), set()).add(kept)
    assert all(len(kept) == 1 for kept in seen.values())


@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_stand_behind_the_system_message_that_opens_the_conversation(role: str) -> None:
    """Most templates print the tools behind the system text; without one they come before every message."""
    system, user = {"role": role, "content": "be brief"}, {"role": "user", "content": "hi"}
    tools, other = (Lead(tools=[{"type": "function", "function": {"name": name}}]) for name in "ab")
    one, two = chat(tools, [system, user, system]), chat(other, [system, user, system])
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, False, True, True]
    assert one[0] == chat(NO_LEAD, [system])[0]
    assert chat(tools, [user])[0] == one[1]


def test_stored_history_stands_between_the_opening_and_the_messages() -> None:
    """What the engine keeps itself comes behind instructions and tools, and before what the body adds."""
    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}
    with_history = chat(Lead(tools=["t"], history="resp_1"), [system, user])
    without = chat(Lead(tools=["t"]), [system, user])
    assert with_history[:2] == without[:2]
    assert with_history[3:] == without[2:]


def test_the_order_the_engine_settles_does_not_matter() -> None:
    """The defined fields of a tool, a tool call and template variables may come in any order, null or missing."""
    one = {"type": "function", "function": {"name": "f", "description": None, "parameters": {"b": 1, "a": 2}}}
    other = {"function": {"parameters": {"b": 1, "a": 2}, "name": "f"}, "type": "function"}
    assert chat(Lead(tools=[one]), []) == chat(Lead(tools=[other]), [])
    assert chat(Lead(chat_template_kwargs={"a": 1, "b": 2}), []) == chat(
        Lead(chat_template_kwargs={"b": 2, "a": 1}), []
    )


def test_the_order_the_engine_prints_does_matter() -> None:
    """A tool's schema reaches the model in the client's order, so another order is another prompt."""
    leads = [
        Lead(tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])
        for parameters in ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    ]
    assert chat(leads[0], []) != chat(leads[1], [])


def test_white_space_in_arguments_does_not_matter() -> None:
    """Engines parse the arguments of a tool call; the same object spelt with spaces, or sent as one, is equal."""
    spelt: list[Any] = ['{"a":1,"b":[2]}', '{ "a": 1,\n "b": [2] }', {"a": 1, "b": [2]}]
    seen = {
        chat(NO_LEAD, [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}])
        for arguments in spelt
    }
    assert len(seen) == 1


@pytest.mark.parametrize("arguments", ["", "not json", '{"a":NaN}', "[1]", '{"a":"\ud800"}', "[" * 5000])
def test_arguments_that_are_no_object_are_kept_as_text(arguments: str) -> None:
    """What does not parse is compared letter by letter."""
    calls = [{"function": {"name": "f", "arguments": arguments + end}} for end in ("", " ")]
    one, other = (chat(NO_LEAD, [{"role": "assistant", "tool_calls": [call]}]) for call in calls)
    assert one != other


def test_the_input_is_not_changed() -> None:
    """Canonical bytes are made from a copy: the caller's messages and tools stay as they were."""
    message = {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}", "name": "f"}}]}
    lead = Lead(tools=[{"function": {"description": "d", "name": "f"}, "type": "function"}])
    before = json.dumps([message, lead.tools])
    chat(lead, [message])
    assert json.dumps([message, lead.tools]) == before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}),
        ({"role": "user", "content": ["a"]}, {"role": "user", "content": [{"type": "input_text", "text": "a"}]}),
        ({"role": "a", "content": None}, {"role": "a"}),
        ({"role": "a", "reasoning": "r"}, {"role": "a", "reasoning_content": "r"}),
        (
            {"role": "u", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
            {"role": "u", "content": "a"},
        ),
        (
            {"role": "u", "content": [{"type": "image_url", "image_url": {"url": "u"}, "cache_control": {}}]},
            {"role": "u", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
        ),
    ],
)
def test_two_spellings_of_one_message_are_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """What an engine renders alike has the same bytes."""
    assert chat(NO_LEAD, [one]) == chat(NO_LEAD, [other])


@pytest.mark.parametrize(
    "messages",
    [
        "hi",
        {},
        [1],
        [{}],
        [{"role": 1}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": [1]}],
        [{"role": "user", "content": [{"type": "text"}]}],
    ],
)
def test_malformed_messages_are_refused(messages: object) -> None:
    """A conversation that no engine accepts raises instead of yielding part of itself."""
    with pytest.raises(PromptError):
        chat(NO_LEAD, messages)


TOKEN_IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)
PROMPT = TEXT | TOKEN_IDS


@given(st.lists(PROMPT, min_size=1, max_size=4), st.lists(PROMPT, min_size=1, max_size=4))
def test_two_batches_share_their_bytes_only_when_they_are_equal(one: list[Any], other: list[Any]) -> None:
    """Texts and token ids are kept apart, and so are the prompts of a batch."""
    assert (b"".join(prompts(one)) == b"".join(prompts(other))) == (one == other)


@given(PROMPT)
def test_one_prompt_and_a_batch_of_one_are_equal(prompt: Any) -> None:
    """The engine sees the same prompt either way."""
    assert prompts(prompt) == prompts([prompt])


def test_a_token_id_takes_four_bytes() -> None:
    """Sizes in bytes estimate tokens at four to one, so ids are packed to that."""
    assert prompts([1, 258]) == (b"\xfb\x00\x00\x00\x01\x00\x00\x01\x02",)


@pytest.mark.parametrize("value", [None, 1, {}, [], [[]], [None], ["a", 1], [1, "a"], [1.5], [-1], [2**31], [2**40]])
def test_malformed_prompts_are_refused(value: object) -> None:
    """What is neither text nor token ids raises."""
    with pytest.raises(PromptError):
        prompts(value)

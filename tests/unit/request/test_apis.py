"""Each API's own spelling of a prompt: what it becomes, what of it counts, and what is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.shapes import Flaw
from tests.unit.request.calls import CHAT, COMPLETION, EMBEDDING, MESSAGES, RERANK, RESPONSES, SCORE, call

USER = {"role": "user", "content": "hi"}
PNG = "data:image/png;base64,QUJD"
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}


def test_a_message_is_the_conversation_that_engines_make_of_it() -> None:
    """The Messages API shares its cache with chat completions: each kind of block has its place there."""
    message = call(
        MESSAGES,
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        tools=[{"name": "f", "description": "d", "input_schema": SCHEMA}],
        thinking={"type": "enabled", "budget_tokens": 2000, "signature": "x"},
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "sealed"},
                    {"type": "text", "text": "one moment"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "42", "is_error": False},
                    {"type": "text", "text": "and now?"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}},
                    {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
                    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "page"}},
                ],
            },
        ],
    )
    chat = call(
        CHAT,
        tools=[{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
        messages=[
            {"role": "system", "content": "be brief"},
            USER,
            {"role": "assistant", "reasoning": "hm", "content": "one moment", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "and now?"},
                    {"type": "image_url", "image_url": {"url": PNG}},
                    {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
                    {"type": "text", "text": "page"},
                ],
            },
        ],
    )
    assert message.segments == chat.segments
    assert (message.turn, message.follows) == (chat.turn, chat.follows)
    assert message.follows


def test_a_response_is_the_conversation_that_engines_make_of_it() -> None:
    """Items of the Responses API become messages; the parts of one answer stay messages of their own."""
    response = call(
        RESPONSES,
        instructions="be brief",
        reasoning={"effort": "low", "summary": "auto"},
        tools=[{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA}],
        input=[
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "hi"}, {"type": "input_image", "image_url": PNG}],
            },
            {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "one moment", "annotations": []}],
            },
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "42"},
        ],
    )
    chat = call(
        CHAT,
        reasoning_effort="low",
        tools=[{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": ["hi", {"type": "image_url", "image_url": {"url": PNG}}]},
            {"role": "assistant", "reasoning": "hm"},
            {"role": "assistant", "content": "one moment"},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ],
    )
    assert response.segments == chat.segments


def test_an_input_that_is_a_text_is_what_a_user_says() -> None:
    """The short form of the Responses API is the long one with a single message."""
    assert call(RESPONSES, input="hi").segments == call(CHAT, messages=[USER]).segments


@pytest.mark.parametrize("field", ["id", "status"])
def test_names_and_states_of_items_reach_no_prompt(field: str) -> None:
    """The same history sent with other ids is the same prompt; what an unknown item holds counts."""
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": "x"},
        {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "y"}]},
        {"type": "web_search_call", "action": {"query": "q"}},
        {"type": "computer_call_output", "output": {"image_url": "u"}},
    ]
    plain, named = (call(RESPONSES, input=[{**item, **more} for item in items]) for more in ({}, {field: "x"}))
    assert plain.segments == named.segments
    for at, item in enumerate(items):
        content = [{"type": "output_text", "text": "z"}]
        changed = [
            *items[:at],
            {**item, "action": 1, "output": "z", "input": "z", "content": content},
            *items[at + 1 :],
        ]
        other = call(RESPONSES, input=changed).segments
        assert [a == b for a, b in zip(plain.segments, other, strict=True)] == [n != at for n in range(len(items))]


def test_reasoning_may_be_sealed() -> None:
    """Without text, what only the provider can read tells two histories apart."""
    one, other = (
        call(RESPONSES, input=[{"type": "reasoning", "encrypted_content": text, "summary": []}]) for text in "ab"
    )
    assert one.segments != other.segments


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_continued_response_is_named_by_the_responses_api_only(path: str) -> None:
    """The id it continues and the id it gives itself are kept as they are, and are no session."""
    body: dict[str, Any] = {"input": "hi", "messages": [USER]}
    request = call(path, **body, previous_response_id="resp_1", request_id=" resp_2 ")
    expected = ("resp_1", "resp_2") if path == RESPONSES else ("", "")
    assert (request.previous_response, request.response, request.session) == (*expected, "")


@pytest.mark.parametrize("value", [None, 7, "", " ", [], {}])
def test_a_strange_id_of_a_response_counts_as_none(value: object) -> None:
    """An id that is no text, or a blank one, is as if it had not been sent."""
    request = call(RESPONSES, input="hi", previous_response_id=value, request_id=value)
    assert (request.previous_response, request.response, request.flaw) == ("", "", "")


@pytest.mark.parametrize("field", ["", "previous_response_id", "conversation"])
def test_what_opens_a_prompt_is_told_from_what_is_added(field: str) -> None:
    """Instructions and tools open it, whether a stored history follows them or not; input and history's mark do not."""
    tools = [{"type": "function", "name": "f", "parameters": {}}]
    history = {field: "r1"} if field else {}
    whole = call(RESPONSES, instructions="be brief", tools=tools, input="go on", **history)
    bare = call(RESPONSES, input="go on", **history)
    assert (whole.opening, bare.opening) == (2, 0)
    assert whole.opening_bytes == whole.prompt_bytes - bare.prompt_bytes > bare.opening_bytes == 0


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
def test_stored_histories_share_the_instructions_only(field: str) -> None:
    """Equal inputs behind two histories that the engine keeps are two prompts from the history on."""
    body = {"instructions": "be brief", "input": "go on"}
    plain, one, other = call(RESPONSES, **body), *(call(RESPONSES, **body, **{field: name}) for name in ("r1", "r2"))
    assert [a == b for a, b in zip(one.segments, other.segments, strict=True)] == [True, False, True]
    assert one.segments[::2] == plain.segments
    assert len({plain.turn, one.turn, other.turn}) == 3


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "max_tokens"), (RESPONSES, "max_output_tokens"), (MESSAGES, "max_tokens")]
)
def test_each_api_limits_its_answer_in_its_own_field(path: str, field: str) -> None:
    """A limit under another API's name is not read by the engine, and not here."""
    limits = dict.fromkeys(["max_tokens", "max_output_tokens"], 1)
    assert call(path, **{**limits, field: 7}).max_tokens == 7


def test_thinking_switched_off_changes_the_prompt() -> None:
    """A message says it in two ways, which both reach the template; a budget only limits sampling."""
    off, low, budget, plain = (
        call(MESSAGES, messages=[USER], **more).segments
        for more in (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
            {"output_config": {"effort": "low"}},
            {"thinking": {"type": "enabled", "budget_tokens": 5000}},
            {},
        )
    )
    assert off == call(CHAT, messages=[USER], reasoning_effort="none").segments
    assert low == call(CHAT, messages=[USER], reasoning_effort="low").segments
    assert budget == plain


def test_a_tool_without_a_schema_is_kept() -> None:
    """Tools that run at the provider have a type and no schema, and still tell prompts apart."""
    for path, body in ((MESSAGES, {"messages": [USER]}), (RESPONSES, {"input": "hi"})):
        one, other = (call(path, **body, tools=[{"type": kind, "name": "x"}]) for kind in ("web_search", "bash"))
        assert one.flaw == other.flaw == ""
        assert one.segments != other.segments


def test_a_tool_result_may_hold_an_image() -> None:
    """A screenshot that a tool returned is an image like any other."""
    source = {"type": "base64", "media_type": "image/png", "data": "QUJD"}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": source}]}
    chat = [{"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": {"url": PNG}}]}]
    assert call(MESSAGES, messages=[{"role": "user", "content": [result]}]).segments == call(messages=chat).segments


@pytest.mark.parametrize(
    ("path", "body", "flaw"),
    [
        (RERANK, {"query": "q"}, Flaw.NO_PROMPT),
        (RERANK, {"documents": ["a"]}, Flaw.NO_PROMPT),
        (RERANK, {"query": "q", "documents": []}, Flaw.BAD_PROMPT),
        (RERANK, {"query": 7, "documents": ["a"]}, Flaw.BAD_PROMPT),
        (RERANK, {"query": "q", "documents": [None]}, Flaw.BAD_PROMPT),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, Flaw.BAD_PROMPT),
        (SCORE, {"text_1": ["a", "b"], "text_2": "a"}, Flaw.BAD_PROMPT),
        (RESPONSES, {}, Flaw.NO_PROMPT),
        (RESPONSES, {"input": []}, Flaw.NO_PROMPT),
        (RESPONSES, {"input": 7}, Flaw.BAD_PROMPT),
        (RESPONSES, {"input": ["x"]}, Flaw.BAD_PROMPT),
        (RESPONSES, {"input": [{"content": "x"}]}, Flaw.BAD_PROMPT),
        (RESPONSES, {"input": [{"type": "message", "content": "x"}]}, Flaw.BAD_PROMPT),
        (MESSAGES, {"system": "x"}, Flaw.NO_PROMPT),
        (MESSAGES, {"messages": {}}, Flaw.BAD_PROMPT),
        (MESSAGES, {"messages": ["x"]}, Flaw.BAD_PROMPT),
        (MESSAGES, {"messages": [{"role": "user", "content": ["x"]}]}, Flaw.BAD_PROMPT),
        (MESSAGES, {"messages": [{"content": [{"type": "text", "text": "x"}]}]}, Flaw.BAD_PROMPT),
        (MESSAGES, {"messages": [USER], "system": 7}, Flaw.BAD_PROMPT),
        (f"{CHAT}/batch", {"messages": [[USER], 7]}, Flaw.BAD_PROMPT),
        (f"{CHAT}/batch", {"messages": []}, Flaw.NO_PROMPT),
    ],
)
def test_what_no_engine_accepts_is_routed_by_load(path: str, body: dict[str, Any], flaw: Flaw) -> None:
    """The request stays whole but for its prompt, and says why."""
    request = call(path, model="m", session_id="s", **body)
    assert (request.flaw, request.segments, request.model, request.session) == (flaw, (), "m", "s")


def test_a_batch_of_conversations_is_all_of_them() -> None:
    """The batch path of vLLM takes a list of conversations in one call and reads each."""
    other = {"role": "user", "content": "and you?"}
    assert call(f"{CHAT}/batch", messages=[[USER], [other]]).segments == call(CHAT, messages=[USER, other]).segments


@pytest.mark.parametrize(("path", "field"), [(COMPLETION, "prompt"), (EMBEDDING, "input")])
def test_special_tokens_and_truncation_change_a_plain_prompt(path: str, field: str) -> None:
    """Both change which tokens come first; what the API does anyway may be said or left out."""
    plain = call(path, **{field: "x"}).segments
    assert call(path, **{field: "x"}, add_special_tokens=True).segments == plain
    changed: list[dict[str, Any]] = [
        {"add_special_tokens": False},
        {"truncate_prompt_tokens": 5},
        {"truncate_prompt_tokens": 6},
    ]
    segments = [call(path, **{field: "x"}, **more).segments for more in changed]
    assert len({plain, *segments}) == 4
    assert all(found[1:] == plain for found in segments)


def test_special_tokens_change_a_chat_only_when_they_are_asked_for() -> None:
    """Chat templates write them, so the engine adds none by itself."""
    plain = call(messages=[USER]).segments
    assert call(messages=[USER], add_special_tokens=False).segments == plain
    assert call(messages=[USER], add_special_tokens=True).segments[1:] == plain


SCALAR = st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4)
VALUE = SCALAR | st.lists(SCALAR, max_size=2) | st.dictionaries(st.text(max_size=3), SCALAR, max_size=2)
BLOCK = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            [
                *("text", "image", "image_url", "input_image", "document", "tool_use", "tool_result", "thinking"),
                *("message", "function_call", "function_call_output", "custom_tool_call", "reasoning", "x_output"),
            ]
        )
        | SCALAR
    },
    optional={
        **dict.fromkeys(("text", "thinking", "id", "name", "input", "arguments", "output", "call_id", "role"), VALUE),
        "source": st.dictionaries(st.sampled_from(["type", "url", "data", "media_type"]), VALUE | st.just("text")),
        "content": VALUE | st.lists(st.fixed_dictionaries({"type": st.just("text")}, optional={"text": VALUE})),
        "summary": st.lists(st.dictionaries(st.sampled_from(["text", "type"]), VALUE, max_size=2), max_size=2),
    },
)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, RERANK, SCORE])
@given(blocks=st.lists(BLOCK, max_size=3), around=VALUE, tools=st.lists(BLOCK, max_size=2))
def test_no_block_breaks_an_api(path: str, blocks: list[Any], around: object, tools: list[Any]) -> None:
    """Blocks of every known type with fields of any other type give a prompt or a flaw, and never both."""
    messages = [{"role": "user", "content": blocks}, *blocks]
    request = call(
        path,
        messages=messages,
        input=blocks,
        system=blocks,
        instructions=around,
        tools=tools,
        thinking=around,
        reasoning=around,
        output_config=around,
        metadata=around,
        lora_request=around,
        documents=blocks,
        query=around,
        chat_template_kwargs=around,
        instruction=around,
    )
    assert request.flaw in {"", *Flaw}
    assert (request.flaw == "") == bool(request.segments)

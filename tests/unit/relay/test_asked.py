"""What a request says of the answer it wants."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.relay.asked import Api, Hindrance, read

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> bytes:
    """Body of a chat."""
    return json.dumps({"model": "m", "messages": MESSAGES, "stream": True, **fields}).encode()


def completion(**fields: Any) -> bytes:
    """Body of a completion."""
    return json.dumps({"model": "m", "prompt": "hi", "stream": True, **fields}).encode()


@pytest.mark.parametrize(
    ("fields", "hindrance"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{"name": "f"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "format"),
        ({"structured_outputs": {"regex": "a+"}}, "format"),
        ({"regex": "a+"}, "format"),
        ({"n": 2}, "choices"),
        ({"best_of": 3}, "choices"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 1}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"include_reasoning": False}, "reasoning"),
        ({"use_beam_search": True}, "beams"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "transfer"),
    ],
)
def test_what_cannot_be_continued_says_why(fields: dict[str, Any], hindrance: Hindrance) -> None:
    """Tool calls, formats, several choices, log probabilities and the like begin anew or not at all."""
    assert read("chat", chat(**fields)).hindrance == hindrance


@pytest.mark.parametrize(
    ("fields", "hindrance"),
    [
        ({"prompt": ["one", "two"]}, "prompt"),
        ({"prompt": [[1, 2], [3]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"suffix": "end"}, "prompt"),
        ({"logprobs": 0}, "logprobs"),
        ({"echo": True}, "echo"),
    ],
)
def test_completions_have_hindrances_of_their_own(fields: dict[str, Any], hindrance: Hindrance) -> None:
    """Several prompts are several answers, and `logprobs: 0` asks for those of the answer's own tokens."""
    assert read("completion", completion(**fields)).hindrance == hindrance


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": []},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"tools": None, "response_format": None, "n": 1, "logprobs": False, "echo": False},
        {"response_format": {"type": "text"}},
        {"temperature": 0, "seed": 7, "stop": ["\n\n"], "presence_penalty": 0.5, "min_tokens": 3},
        {"continue_final_message": True, "add_generation_prompt": False},
    ],
)
def test_an_ordinary_chat_can_be_continued(fields: dict[str, Any]) -> None:
    """Fields that are empty, or that a continuation keeps, are no hindrance."""
    assert read("chat", chat(**fields)).hindrance is None


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [1, 2, 3], [[1, 2, 3]]])
def test_one_prompt_is_one_prompt_in_any_form(prompt: Any) -> None:
    """A list of one text, or of one list of token ids, is the same as the one."""
    assert read("completion", completion(prompt=prompt)).hindrance is None


def test_limits_are_read_as_the_apis_define_them() -> None:
    """The newer name wins in a chat, which has no limit of its own; a completion has 16 tokens."""
    assert read("chat", chat(max_tokens=5)).limit == 5
    assert read("chat", chat(max_tokens=5, max_completion_tokens=7)).limit == 7
    assert read("chat", chat()).limit is None
    assert read("completion", completion()).limit == 16


@pytest.mark.parametrize(
    ("options", "usage", "always"),
    [
        (None, False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
    ],
)
def test_usage_is_told_as_the_client_asked(options: Any, usage: bool, always: bool) -> None:
    """The relay itself always asks for it; the client sees what it asked for."""
    asked = read("chat", chat(stream_options=options))
    assert (asked.usage, asked.usage_always) == (usage, always)


def test_usage_is_told_where_the_pool_asks_for_it() -> None:
    """`ask_usage` of a pool lets the client see usage unless it declined."""
    assert read("chat", chat(), {"m"}).usage
    assert not read("chat", chat(stream_options={"include_usage": False}), {"m"}).usage
    assert not read("chat", chat(), {"other"}).usage


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b"\xff\xfe", b'{"stream": tru', b'{"model": "\xff"}'])
@pytest.mark.parametrize("api", ["chat", "completion"])
def test_what_cannot_be_read_is_no_stream(api: Api, body: bytes) -> None:
    """The engine says what is wrong with it, and that is handed on whole."""
    assert not read(api, body).stream


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = ("model", "messages", "prompt", "stream", "stop", "n", "tools", "max_tokens", "stream_options", "logprobs")


@given(st.dictionaries(st.sampled_from(NAMES), JSON), st.sampled_from(["chat", "completion"]))
def test_any_object_is_read(fields: dict[str, Any], api: Api) -> None:
    """Fields of the wrong kind never make the relay fail: the engine answers for them."""
    read(api, json.dumps(fields).encode())

"""Bodies into what a source needs of them, and those that have no exact token ids."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config import EngineKind
from extproc.request.model import RouteKind
from extproc.tokens import asked
from extproc.tokens.values import Asked, Chat, Given, NoTokensError, Text, Whole, Why

PATHS = {
    RouteKind.CHAT: "/v1/chat/completions",
    RouteKind.COMPLETION: "/v1/completions",
    RouteKind.MESSAGES: "/v1/messages",
    RouteKind.RESPONSES: "/v1/responses",
    RouteKind.EMBEDDING: "/v1/embeddings",
}
USER = [{"role": "user", "content": "x"}]


def shown(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation of one message with these parts."""
    return [{"role": "user", "content": list(parts)}]


SEEN = shown({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}})


def read(kind: RouteKind, engine: EngineKind = "auto", **fields: Any) -> Asked:
    """What is read of a body with these fields."""
    return asked.read(kind, PATHS[kind], json.dumps({"model": "m", **fields}).encode(), engine)


def why_not(kind: RouteKind, engine: EngineKind = "auto", **fields: Any) -> Why | None:
    """Why a body with these fields has no token ids; None when it may have."""
    try:
        read(kind, engine, **fields)
    except NoTokensError as error:
        return error.why
    return None


def test_a_text_prompt_gets_special_tokens_unless_told_otherwise() -> None:
    """The completions API adds them by default."""
    assert read(RouteKind.COMPLETION, prompt="x").wanted == Text("x", special_tokens=True)
    assert read(RouteKind.COMPLETION, prompt=["x"]).wanted == Text("x", special_tokens=True)
    assert read(RouteKind.COMPLETION, prompt="x", add_special_tokens=False).wanted == Text("x", special_tokens=False)


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]]])
def test_ids_of_a_completion_are_taken_as_they_are(prompt: Any) -> None:
    """One prompt of ids, alone or in a list."""
    wanted = read(RouteKind.COMPLETION, prompt=prompt).wanted
    assert isinstance(wanted, Given)
    assert wanted.ids.tolist() == [1, 2, 3]


def test_ids_of_a_chat_are_read_where_the_engine_reads_them() -> None:
    """TensorRT-LLM skips templating for `prompt_token_ids`; vLLM and SGLang know no such field."""
    given_ids = read(RouteKind.CHAT, "tensorrt_llm", messages=USER, prompt_token_ids=[7]).wanted
    assert isinstance(given_ids, Given)
    assert given_ids.ids.tolist() == [7]
    for engine in ("vllm", "sglang"):
        assert isinstance(read(RouteKind.CHAT, engine, messages=USER, prompt_token_ids=[7]).wanted, Chat)


def test_variables_are_merged_as_vllm_merges_them() -> None:
    """Fields of the body win over `chat_template_kwargs` unless they are null or `auto`; an effort means thinking."""
    chat = read(
        RouteKind.CHAT,
        messages=USER,
        reasoning_effort="none",
        documents=None,
        chat_template_kwargs={"add_generation_prompt": False, "documents": [1], "own": 2},
    ).wanted
    assert isinstance(chat, Chat)
    assert chat.variables == {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "documents": [1],
        "own": 2,
        "reasoning_effort": "none",
        "enable_thinking": False,
    }
    told = read(
        RouteKind.CHAT, messages=USER, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}
    ).wanted
    assert isinstance(told, Chat)
    assert told.variables["enable_thinking"] is True


def test_salts_are_taken_where_the_api_has_them() -> None:
    """TensorRT-LLM refuses one on completions."""
    assert read(RouteKind.CHAT, messages=USER, cache_salt="s").salt == "s"
    assert read(RouteKind.COMPLETION, prompt="x", cache_salt="s").salt == "s"
    assert read(RouteKind.COMPLETION, "tensorrt_llm", prompt="x", cache_salt="s").salt == ""
    assert read(RouteKind.CHAT, messages=USER, cache_salt=5).salt == ""


def test_adapters_named_in_fields_of_their_own_are_read() -> None:
    """`lora_path` is SGLang's, `lora_request` TensorRT-LLM's."""
    assert read(RouteKind.CHAT, messages=USER, lora_path="a").adapter == "a"
    assert read(RouteKind.CHAT, messages=USER, lora_request={"lora_name": "b"}).adapter == "b"
    assert read(RouteKind.CHAT, messages=USER, lora_request=5).adapter == ""


def test_messages_and_responses_are_left_to_their_engine() -> None:
    """Only vLLM knows which conversation it makes of them; a stored history is in the engine alone."""
    assert isinstance(read(RouteKind.MESSAGES, messages=USER).wanted, Whole)
    assert isinstance(read(RouteKind.RESPONSES, input="x").wanted, Whole)
    assert why_not(RouteKind.RESPONSES, input="x", previous_response_id="r") is Why.UNSUPPORTED


@pytest.mark.parametrize(
    ("kind", "fields", "media", "lasting"),
    [
        (RouteKind.CHAT, {"messages": USER}, False, True),
        (RouteKind.CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, False, True),
        (RouteKind.CHAT, {"messages": SEEN}, True, True),
        (RouteKind.CHAT, {"messages": shown({"type": "image_url", "image_url": "data:image/png;base64,"})}, True, True),
        (RouteKind.CHAT, {"messages": shown({"type": "input_audio", "input_audio": {"data": "x"}})}, True, True),
        (RouteKind.CHAT, {"messages": shown({"type": "image_url", "image_url": {"url": "http://x/y"}})}, True, False),
        (RouteKind.CHAT, {"messages": shown({"type": "image_url", "uuid": "cat"})}, True, False),
        (RouteKind.CHAT, {"messages": shown({"input_audio": {}})}, True, False),
        (RouteKind.CHAT, {"messages": [*SEEN, *shown({"type": "video_url"})]}, True, False),
        (RouteKind.COMPLETION, {"prompt": "x", "messages": SEEN}, False, True),
        (RouteKind.MESSAGES, {"messages": shown({"type": "tool_use"})}, False, False),
        (RouteKind.MESSAGES, {"messages": shown({"type": "image", "source": {}})}, True, False),
        (RouteKind.RESPONSES, {"input": "x"}, False, False),
        (RouteKind.RESPONSES, {"input": shown({"type": "input_image"})}, True, False),
    ],
)
def test_media_are_seen_and_whether_they_last(
    kind: RouteKind, fields: dict[str, Any], media: bool, lasting: bool
) -> None:
    """What is no text is a medium; what a URL names may change behind it, and what is in the body may not."""
    found = read(kind, **fields)
    assert (found.media, found.lasting) == (media, lasting)


@pytest.mark.parametrize(
    ("why", "kind", "fields"),
    [
        (Why.SEVERAL, RouteKind.COMPLETION, {"prompt": ["x", "y"]}),
        (Why.SEVERAL, RouteKind.COMPLETION, {"prompt": [[1], [2]]}),
        (Why.UNREADABLE, RouteKind.COMPLETION, {}),
        (Why.UNREADABLE, RouteKind.COMPLETION, {"prompt": []}),
        (Why.UNREADABLE, RouteKind.COMPLETION, {"prompt": [-1]}),
        (Why.UNREADABLE, RouteKind.COMPLETION, {"prompt": [1 << 32]}),
        (Why.UNREADABLE, RouteKind.COMPLETION, {"prompt": [1, "x"]}),
        (Why.UNREADABLE, RouteKind.COMPLETION, {"prompt": {"a": 1}}),
        (Why.UNREADABLE, RouteKind.CHAT, {"messages": []}),
        (Why.UNREADABLE, RouteKind.CHAT, {"messages": "x"}),
        (Why.UNREADABLE, RouteKind.CHAT, {"messages": USER, "chat_template_kwargs": 5}),
        (Why.IMAGES, RouteKind.CHAT, {"messages": SEEN, "prompt_token_ids": [1]}),
        (Why.UNSUPPORTED, RouteKind.CHAT, {"messages": USER, "prompt_embeds": "x"}),
        (Why.UNSUPPORTED, RouteKind.CHAT, {"messages": USER, "extra_key": "x"}),
        (Why.UNSUPPORTED, RouteKind.CHAT, {"messages": USER, "use_beam_search": True}),
        (Why.UNSUPPORTED, RouteKind.CHAT, {"messages": USER, "kv_transfer_params": {"prompt_token_ids": [1]}}),
        (Why.UNSUPPORTED, RouteKind.EMBEDDING, {"input": "x"}),
    ],
)
def test_what_has_no_exact_ids_is_told_why(why: Why, kind: RouteKind, fields: dict[str, Any]) -> None:
    """Each with its reason."""
    assert why_not(kind, **fields) is why


def test_batches_of_conversations_are_several_prompts() -> None:
    """Their path is another, though the kind is the same."""
    with pytest.raises(NoTokensError):
        asked.read(RouteKind.CHAT, "/v1/chat/completions/batch", json.dumps({"messages": USER}).encode(), "auto")


def test_huge_bodies_are_not_read() -> None:
    """No engine has such a context."""
    with pytest.raises(NoTokensError) as caught:
        asked.read(RouteKind.CHAT, PATHS[RouteKind.CHAT], b" " * (asked.MAX_BODY_BYTES + 1), "auto")
    assert caught.value.why is Why.TOO_LONG


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = ("messages", "prompt", "tools", "chat_template_kwargs", "kv_transfer_params", "lora_request", "cache_salt")


@given(st.sampled_from(sorted(PATHS)), st.dictionaries(st.sampled_from(_FIELDS), _JSON))
def test_any_body_is_read_or_told_why(kind: RouteKind, fields: dict[str, Any]) -> None:
    """Nothing else is raised, whatever is sent."""
    assert why_not(kind, **fields) in {None, *Why}


@given(st.binary(max_size=60))
def test_any_bytes_are_told_why(body: bytes) -> None:
    """Nothing else is raised, and the error names no part of the body."""
    with pytest.raises(NoTokensError) as caught:
        asked.read(RouteKind.CHAT, PATHS[RouteKind.CHAT], body + b"{", "auto")
    assert str(caught.value) == "no token ids: unreadable"

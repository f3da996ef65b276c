"""The body that continues an answer elsewhere."""

import json
from typing import Any

import pytest

from extproc.relay.asked import Api, Asked, Hindrance, read
from extproc.relay.resuming import Hindered, Received, Sending, continued, first

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
OPTIONS = {"include_usage": True, "continuous_usage_stats": True}


def asked(api: Api, **fields: Any) -> Asked:
    """A request for a stream."""
    content: dict[str, Any] = {"messages": MESSAGES} if api == "chat" else {"prompt": "hi"}
    return read(api, json.dumps({"model": "m", "stream": True, **content, **fields}).encode())


def got(text: str = "one two", *, ids: list[int] | None = None, prompt_ids: list[int] | None = None) -> Received:
    """What was received."""
    return Received(parts=[text], tokens=len(ids) if ids else 2, ids=ids, prompt_ids=prompt_ids)


def body(sending: Sending) -> dict[str, Any]:
    """The body as an object."""
    value: dict[str, Any] = json.loads(sending.body)
    return value


def hindrance(api: Api, received: Received, **fields: Any) -> Hindrance:
    """Why an answer cannot be continued."""
    with pytest.raises(Hindered) as told:
        continued(asked(api, **fields), CHAT if api == "chat" else COMPLETIONS, received)
    return told.value.hindrance


def test_the_first_engine_is_asked_for_what_a_continuation_needs() -> None:
    """Token ids and running usage are asked for; everything else stays as the client wrote it."""
    sent = first(asked("chat", temperature=0.30000000000000004, max_tokens=9), CHAT, ids=True)
    assert (sent.path, sent.form) == (CHAT, "whole")
    expected = {"model": "m", "stream": True, "messages": MESSAGES, "temperature": 0.30000000000000004, "max_tokens": 9}
    assert body(sent) == {**expected, "stream_options": OPTIONS, "return_token_ids": True}
    assert b"0.30000000000000004" in sent.body


def test_engines_that_tell_no_ids_are_not_asked_for_them() -> None:
    """TensorRT-LLM refuses fields that it does not know."""
    assert "return_token_ids" not in body(first(asked("chat"), CHAT, ids=False))


def test_a_chat_goes_on_by_ids_as_a_completion() -> None:
    """The engine sees the very tokens of the prompt and of the answer; fields of chats alone are left out."""
    request = asked("chat", max_completion_tokens=10, min_tokens=6, seed=3, logprobs=False, top_k=5)
    sent = continued(request, CHAT, got(ids=[7, 8, 9], prompt_ids=[1, 2]))
    assert (sent.path, sent.form, sent.trimmed) == (COMPLETIONS, "ids", "")
    assert body(sent) == {
        "model": "m",
        "stream": True,
        "seed": 3,
        "top_k": 5,
        "prompt": [1, 2, 7, 8, 9],
        "max_tokens": 7,
        "min_tokens": 3,
        "stream_options": OPTIONS,
        "return_token_ids": True,
    }


@pytest.mark.parametrize("path", ["/a/v1/chat/completions", "/a/v1/chat/completions/"])
def test_prefix_and_query_of_the_path_stay(path: str) -> None:
    """The continuation goes where the client's requests go."""
    sent = continued(asked("chat", max_tokens=9), f"{path}?user=1", got(ids=[7], prompt_ids=[1]))
    assert sent.path == "/a/v1/completions?user=1"


def test_a_chat_goes_on_by_text_as_an_open_message() -> None:
    """Without ids the partial answer is the last message, which the engine continues."""
    sent = continued(asked("chat", max_tokens=10), CHAT, got("one two\n", ids=None))
    assert (sent.path, sent.form, sent.trimmed) == (CHAT, "text", "\n")
    told = body(sent)
    assert told["messages"] == [*MESSAGES, {"role": "assistant", "content": "one two\n"}]
    assert (told["continue_final_message"], told["add_generation_prompt"], told["max_tokens"]) == (True, False, 8)


def test_a_message_that_the_client_left_open_is_made_longer() -> None:
    """Two messages of the assistant in a row would be another conversation."""
    messages = [*MESSAGES, {"role": "assistant", "content": "Once "}]
    request = asked("chat", messages=messages, continue_final_message=True, add_generation_prompt=False)
    sent = continued(request, CHAT, got("upon", ids=None))
    assert body(sent)["messages"] == [*MESSAGES, {"role": "assistant", "content": "Once upon"}]


@pytest.mark.parametrize("prompt", ["hi ", ["hi "]])
def test_a_completion_goes_on_behind_its_prompt(prompt: Any) -> None:
    """Prompt and text are one text, every blank of it as it was sent."""
    sent = continued(asked("completion", prompt=prompt, max_tokens=5), COMPLETIONS, got("one ", ids=None))
    assert (sent.path, sent.form, sent.trimmed) == (COMPLETIONS, "text", "")
    assert (body(sent)["prompt"], body(sent)["max_tokens"]) == ("hi one ", 3)


def test_a_completion_of_token_ids_goes_on_by_ids() -> None:
    """Its prompt is what the engine said it was."""
    sent = continued(asked("completion", prompt=[1, 2]), COMPLETIONS, got(ids=[7], prompt_ids=[1, 2]))
    assert (body(sent)["prompt"], body(sent)["max_tokens"]) == ([1, 2, 7], 15)


def test_images_go_along_in_text_form() -> None:
    """Ids of a prompt with an image stand for pixels that a completion cannot carry."""
    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    request = asked("chat", messages=[{"role": "user", "content": parts}], max_tokens=9)
    assert continued(request, CHAT, got(ids=[7], prompt_ids=[1])).form == "text"
    text = [{"role": "user", "content": parts[:1]}]
    assert continued(asked("chat", messages=text, max_tokens=9), CHAT, got(ids=[7], prompt_ids=[1])).form == "ids"


def test_a_chat_without_a_limit_goes_on_in_text_form() -> None:
    """A completion without a limit would end after 16 tokens."""
    assert continued(asked("chat"), CHAT, got(ids=[7], prompt_ids=[1])).form == "text"
    assert "max_tokens" not in body(continued(asked("chat"), CHAT, got(ids=[7], prompt_ids=[1])))


def test_stop_texts_go_by_the_text_that_was_sent() -> None:
    """Engines hold text back that might begin a stop text: its ids came, its text did not."""
    request = asked("chat", stop=["\n\n", "END"], max_tokens=9)
    assert continued(request, CHAT, got("so far", ids=[7], prompt_ids=[1])).form == "text"


@pytest.mark.parametrize("text", ["so\n", "EN", "E"])
def test_half_a_stop_text_is_not_continued(text: str) -> None:
    """The other half would complete it on an engine that knows nothing of the first."""
    assert hindrance("chat", got(text, ids=None), stop=["\n\n", "END"]) == "stop"


@pytest.mark.parametrize("beyond", ["tools", "reasoning", "extras"])
def test_what_was_more_than_text_is_not_continued(beyond: Hindrance) -> None:
    """Reasoning and tool calls have no place in an open message."""
    received = got()
    received.beyond = beyond
    assert hindrance("chat", received) == beyond


def test_what_the_request_hinders_is_not_continued() -> None:
    """The reason is the request's own."""
    assert hindrance("chat", got(), n=2) == "choices"


def test_a_prompt_that_is_cut_to_length_goes_by_ids_or_not_at_all() -> None:
    """Cut again, a longer prompt would lose another part."""
    assert hindrance("completion", got(ids=None), truncate_prompt_tokens=5) == "prompt"
    sent = continued(
        asked("completion", truncate_prompt_tokens=5, truncation_side="left"),
        COMPLETIONS,
        got(ids=[7], prompt_ids=[1, 2]),
    )
    assert not {"truncate_prompt_tokens", "truncation_side"} & body(sent).keys()


def test_engines_without_open_messages_continue_completions_only() -> None:
    """TensorRT-LLM has no `continue_final_message`."""
    with pytest.raises(Hindered, match="engine"):
        continued(asked("chat"), CHAT, got(ids=None), open_messages=False)
    assert continued(asked("completion"), COMPLETIONS, got(ids=None), open_messages=False).form == "text"

"""How much of a prompt images, sounds, films and files may take up, whatever a body says."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.media import PADDED_BYTES
from extproc.request.shapes import parse
from tests.unit.request.calls import CHAT, EMBEDDING, MESSAGES, RERANK, RESPONSES, SCORE, call

FILM_BYTES = 32 * 196 * 4
BARE_BYTES = 2 + 32
MANY = 100_000
FILM = {"type": "video_url", "video_url": {"url": "u"}}
DOCUMENT = {"type": "document", "source": {"type": "url", "url": "u"}}


def films(count: int) -> list[dict[str, Any]]:
    """Parts for as many films, no two alike."""
    return [{"type": "video_url", "video_url": {"url": str(at)}} for at in range(count)]


def user(parts: list[Any]) -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [{"role": "user", "content": parts}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": user([FILM] * MANY)}),
        (CHAT, {"messages": user([FILM]) * MANY}),
        (f"{CHAT}/batch", {"messages": [user([FILM])] * MANY}),
        (EMBEDDING, {"messages": user([FILM] * MANY)}),
        (RESPONSES, {"input": user([FILM] * MANY)}),
        (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "c", "output": [FILM]}] * MANY}),
        (RESPONSES, {"input": [FILM] * MANY}),
        (MESSAGES, {"messages": user([DOCUMENT] * MANY)}),
        (MESSAGES, {"messages": user([{"type": "tool_result", "tool_use_id": "c", "content": [DOCUMENT]}] * MANY)}),
        (MESSAGES, {"messages": [{"role": "user", "content": "hi"}], "system": [DOCUMENT] * MANY}),
        (RERANK, {"query": "q", "documents": [{"content": [FILM]}] * MANY}),
        (RERANK, {"query": {"content": [FILM] * MANY}, "documents": ["d"]}),
        (SCORE, {"text_1": [{"content": [FILM]}] * MANY, "text_2": [{"content": [FILM]}] * MANY}),
    ],
)
def test_a_body_of_small_parts_is_no_prompt_of_gigabytes(path: str, body: dict[str, Any]) -> None:
    """All padding of a request together stays within its limit, in each API, and is used up by this many parts."""
    text = json.dumps(body).encode()
    request = parse(path, {}, text)
    assert request.flaw == ""
    assert PADDED_BYTES < request.prompt_bytes <= PADDED_BYTES + len(text)


def test_every_part_is_told_apart_behind_the_limit() -> None:
    """Parts that find no room left keep the digest that tells them apart."""
    count = PADDED_BYTES // FILM_BYTES + 9
    parts = films(count)
    full = call(messages=user(parts)).segments[0]
    assert full != call(messages=user([*parts[:-1], FILM])).segments[0]
    assert len(full) == len(call(messages=user(parts[:-1])).segments[0]) + BARE_BYTES


@given(st.lists(st.integers(0, 120), min_size=1, max_size=6), st.data())
@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (RESPONSES, "input"), (MESSAGES, "messages")])
def test_a_growing_conversation_keeps_its_beginning_across_the_limit(
    path: str, field: str, counts: list[int], data: st.DataObject
) -> None:
    """The room is used up from the beginning on, so what a conversation gains changes no byte in front of it."""
    messages = [message for count in (60, *counts) for message in user(films(count))]
    kept = data.draw(st.integers(1, len(messages)))
    whole, earlier = call(path, **{field: messages}), call(path, **{field: messages[:kept]})
    assert whole.segments[:kept] == earlier.segments
    last = messages[kept - 1]["content"]
    shorter = call(path, **{field: [*messages[: kept - 1], *user(last[: len(last) // 2])]})
    assert len(last) < 2 or whole.segments[kept - 1].startswith(shorter.segments[-1])


@pytest.mark.parametrize("kind", ["video_url", "image_url", "input_image", "input_audio", "document", "file"])
@pytest.mark.parametrize(
    "fields", [{}, {"detail": "high"}, {"source": {"type": "base64", "media_type": "x", "data": ""}}]
)
def test_a_part_without_content_takes_no_room(kind: str, fields: dict[str, Any]) -> None:
    """Nothing is padded for a part that carries no picture, sound, film or file."""
    for part in ({"type": kind, **fields}, {"type": kind, kind: fields}, {"type": kind, kind: None, **fields}):
        assert call(messages=user([part])).prompt_bytes == len(b"\xffuser") + BARE_BYTES


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": None, "uuid": "a"},
        {"type": "input_image", "file_id": "a"},
        {"type": "image", "source": {"type": "file", "file_id": "a"}},
        {"type": "image_embeds", "image_embeds": "a"},
        {"type": "input_audio", "input_audio": {"data": "a", "format": "wav"}},
        {"type": "file", "file": {"file_id": "a"}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a"}]}},
    ],
)
def test_content_by_any_name_takes_room(part: dict[str, Any]) -> None:
    """What a part carries may be data, a URL, or the name of what the engine already has."""
    assert call(messages=user([part])).prompt_bytes > 2000


@pytest.mark.parametrize("kind", ["image", "document"])
def test_two_uploaded_files_are_two_prompts(kind: str) -> None:
    """The Messages API may name a file by its id alone: another id is another prompt, with the room of its kind."""
    one, other = (
        call(MESSAGES, messages=user([{"type": kind, "source": {"type": "file", "file_id": name}}])) for name in "ab"
    )
    assert one.segments != other.segments
    assert one.prompt_bytes > 2000


@pytest.mark.parametrize("source", [{}, {"type": "base64"}, {"type": "base64", "data": ""}, {"type": "url", "url": ""}])
def test_an_image_without_data_takes_no_room(source: dict[str, Any]) -> None:
    """An image block of the Messages API that names neither data nor a URL is no picture."""
    content = [{"type": "image", "source": source}]
    assert call(MESSAGES, messages=user(content)).prompt_bytes == len(b"\xffuser") + BARE_BYTES

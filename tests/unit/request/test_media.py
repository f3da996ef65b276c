"""What stands for an image, a sound, a film or a file in canonical bytes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.blocks import chain
from extproc.request.media import Room, media_bytes
from extproc.request.prompt import Lead, conversation

IMAGE_BYTES = 576 * 4
TEXT = st.text(alphabet=st.characters(codec=None), max_size=12)
DATA = TEXT | TEXT.map(lambda text: "data:image/png;base64," + text + "A" * 600)
IMAGE = st.fixed_dictionaries(
    {"type": st.just("image_url"), "image_url": st.fixed_dictionaries({"url": DATA}, optional={"detail": TEXT})},
    optional={"uuid": TEXT},
)


def bytes_of(part: dict[str, Any]) -> bytes:
    """A part's bytes as the first of its request."""
    return media_bytes(part, Room())


def image(url: str, **more: object) -> dict[str, Any]:
    """An image of the chat completions API."""
    return {"type": "image_url", "image_url": {"url": url}, **more}


@given(IMAGE, IMAGE)
def test_two_images_share_their_bytes_only_when_they_are_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """URL or data, detail and uuid tell images apart; `auto` is the detail of an image that names none."""
    for part in (one, other):
        if part["image_url"].get("detail") == "auto":
            del part["image_url"]["detail"]
    assert (bytes_of(one) == bytes_of(other)) == (one == other)


@pytest.mark.parametrize("url", ["https://example.org/a.png", "data:image/png;base64," + "A" * 5000])
def test_one_image_in_each_spelling_is_one_image(url: str) -> None:
    """The chat completions and the responses API wrap the URL differently; marks of a client's cache say nothing."""
    spellings = [
        image(url),
        image(url, cache_control={"type": "ephemeral"}),
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url, "detail": "auto", "file_id": None},
    ]
    assert len({bytes_of(part) for part in spellings}) == 1


@pytest.mark.parametrize("data", ["A", "A" * 100_000])
def test_an_image_takes_up_the_room_of_its_tokens(data: str) -> None:
    """By URL or as data an image counts as 576 tokens, neither as the length of its URL nor of its base64 text."""
    assert len(bytes_of(image(f"data:image/png;base64,{data}"))) == IMAGE_BYTES


def test_sounds_films_and_files_take_up_room() -> None:
    """Each kind has its own size, however large the data; a kind that is not known has its identity's."""
    data = "A" * 100_000
    parts: list[dict[str, Any]] = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "video_url", "video_url": {"url": data}},
        {"type": "file", "file": {"file_data": data}},
        {"type": "hologram", "hologram": data},
    ]
    assert [len(bytes_of(part)) for part in parts] == [3000, 25_088, 6000, 32]


@given(st.dictionaries(TEXT, DATA), st.dictionaries(TEXT, DATA))
def test_two_parts_of_an_unknown_kind_are_compared_whole(one: dict[str, str], other: dict[str, str]) -> None:
    """Every field of a part that nothing is known of counts, in any order, but for the cache mark."""
    for part in (one, other):
        part.pop("cache_control", None)
        part["type"] = "input_audio"
    assert (bytes_of(one) == bytes_of(other)) == (one == other)
    assert bytes_of(dict(reversed(one.items()))) == bytes_of(one)


@pytest.mark.parametrize(
    ("one", "other"), [("https://a/1", "https://a/2"), ("data:," + "A" * 9000, "data:," + "A" * 8999 + "B")]
)
def test_another_image_is_another_prompt_from_the_image_on(one: str, other: str) -> None:
    """Blocks before the image are shared; the block it begins in and every later one are not."""
    before, behind = "b" * 1000, "x" * 3000
    chains = []
    for url in (one, other):
        content = [{"type": "text", "text": before}, image(url), {"type": "text", "text": behind}]
        chains.append(chain(conversation(Lead(), [{"role": "user", "content": content}]).segments, b"", 64))
    shared = [a == b for a, b in zip(*chains, strict=True)]
    start = len(b"\xffuser\xfet" + before.encode()) // 64
    assert shared == [True] * start + [False] * (len(shared) - start)
    assert len(shared) > start + (IMAGE_BYTES + 3000) // 64 - 1

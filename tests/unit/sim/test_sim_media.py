"""Images in prompts: all have the same tokens, and vLLM names them apart, in each version's way."""

import hashlib
import pickle
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from extproc.sim.adapters import Adapter
from extproc.sim.block_keys import keys_of
from extproc.sim.block_log import Stored
from extproc.sim.bodies import Message
from extproc.sim.encodings import batch
from extproc.sim.profiles import PROFILES, Profile
from extproc.sim.sequence import Content
from extproc.sim.tokenizing import features
from extproc.sim.tokens import IMAGE_TOKENS, PLACEHOLDER, Medium, render, render_chat, to_ids
from tests.unit.sim.test_sim_kv_events import SETTINGS, Setup, started

LORA = Adapter("lb", 3, "/adapters/lb")
MEDIA = (Medium("aa", "image", 10), Medium("b", "image", 10 + IMAGE_TOKENS))
DATA = b"text" * 10 + PLACEHOLDER * 2 * IMAGE_TOKENS + b"more" * 22


def shown(*parts: Any) -> list[dict[str, Any]]:
    """A conversation with these parts; a bare text is an image of that name."""
    return [{"role": "user", "content": [seen(part) if isinstance(part, str) else part for part in parts]}]


def seen(name: str, **more: Any) -> dict[str, Any]:
    """An image."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}, **more}


def messages(*parts: Any) -> list[Message]:
    """The same, as the simulator reads it."""
    return msgspec.convert(shown(*parts), list[Message])


def test_images_have_the_same_tokens_and_names_of_their_own() -> None:
    """A hash of what they are, or the client's own name; sounds and films are kinds of their own."""
    question = {"type": "text", "text": "what is it"}
    one, other = render(messages("x", question)), render(messages("y", question))
    assert one.data == other.data
    assert one.media != other.media
    assert one.spelled != other.spelled
    named = [seen("x", uuid="cat"), {"type": "input_audio"}, {"type": "video_url"}, question]
    media = render(messages(*named)).media
    assert media[0].identifier == "cat"
    assert [each.kind for each in media] == ["image", "audio", "video"]
    first = media[0].offset
    assert [each.offset for each in media] == [first, first + IMAGE_TOKENS, first + 2 * IMAGE_TOKENS]
    assert render_chat(messages("x", question)) == one.spelled


def test_the_spelled_prompt_differs_in_images_alone() -> None:
    """As long, and the same around them: what the demo and the replay make of images stays what it was."""
    prompt = render(messages("x", {"type": "text", "text": "what is it"}))
    (medium,) = prompt.media
    start, stop = 4 * medium.offset, 4 * (medium.offset + IMAGE_TOKENS)
    assert len(prompt.spelled) == len(prompt.data)
    assert prompt.data[start:stop] == PLACEHOLDER * IMAGE_TOKENS
    assert (prompt.spelled[:start], prompt.spelled[stop:]) == (prompt.data[:start], prompt.data[stop:])


def profile_of(minor: int) -> Profile:
    """A vLLM of that version."""
    return Profile(f"vllm-0.{minor}", "vllm", f"0.{minor}.0", minor)


@pytest.mark.parametrize(
    ("minor", "first", "second", "both"),
    [
        (17, ["lb", "aa", "salt"], ["lb", "aa"], ["lb", "aa", "b"]),
        (21, ["lb", "aa", "salt"], ["lb", "aa"], ["lb", "aa", "b"]),
        (22, ["lb", ["aa", 10], "salt"], ["lb", ["aa", -6]], ["lb", ["aa", -246], ["b", 10]]),
        (33, ["lb", ["aa", 10], "salt"], ["lb", ["aa", -6]], ["lb", ["aa", -246], ["b", 10]]),
    ],
)
def test_events_name_the_images_in_each_block(minor: int, first: Any, second: Any, both: Any) -> None:
    """Bare up to 0.21, with their places since; one that began earlier is at a negative place."""
    profile, content = profile_of(minor), Content(DATA, LORA, "salt", MEDIA)
    count = len(DATA) // 64
    whole = Stored(list(range(count)), None, DATA[: 64 * count], content)
    keys = extra_keys(profile, whole)
    assert (keys[0], keys[1], keys[16], keys[-1]) == (first, second, both, ["lb"])
    # Told a block at a time, or from the middle on, it is the same.
    assert [extra_keys(profile, one)[0] for one in whole.blocks()] == keys
    rest = Stored(whole.hashes[5:], 4, DATA[5 * 64 : 64 * count], content, 5 * 16)
    assert extra_keys(profile, rest) == keys[5:]


def extra_keys(profile: Profile, event: Stored) -> list[Any]:
    """What a profile tells of the blocks of an event beside their tokens."""
    (told,) = msgspec.msgpack.decode(batch(profile, [event], 1.0, 0))[1]
    keys: list[Any] = told["extra_keys"] if isinstance(told, dict) else told[8]
    return keys


@pytest.mark.parametrize(
    ("minor", "extra"),
    [
        (16, ("lb", "aa", "salt")),
        (21, ("lb", "aa", "salt")),
        (23, ("lb", ("aa", 10), "salt")),
        (33, (("lora", "lb", "/adapters/lb"), ("mm", "aa", 10), ("cache_salt", "salt"))),
    ],
)
def test_images_enter_a_blocks_hash(minor: int, extra: Any) -> None:
    """Computed here as vLLM computes it: SHA-256 of the pickled parent, tokens and extra keys, tagged since 0.31."""
    origin = b"r" * 32 if minor < 29 else hashlib.sha256(pickle.dumps("vllm-none-hash", 5)).digest()
    expected = hashlib.sha256(pickle.dumps((origin, tuple(to_ids(DATA[:64])), extra), 5)).digest()
    keys = keys_of(profile_of(minor), b"r" * 32)
    assert keys.key(None, DATA[:64], Content(DATA, LORA, "salt", MEDIA)) == expected


def test_what_a_render_route_tells_of_media() -> None:
    """Hashes and places by kind, as vLLM has them; contents only where they are wanted."""
    media = (*MEDIA, Medium("c", "audio", 600))
    told = features(media, tensors=False)
    assert told == {
        "mm_hashes": {"image": ["aa", "b"], "audio": ["c"]},
        "mm_placeholders": {
            "image": [{"offset": 10, "length": 256}, {"offset": 266, "length": 256}],
            "audio": [{"offset": 600, "length": 256}],
        },
        "kwargs_data": None,
        "mm_metadata": None,
    }
    assert features((), tensors=True) is None
    full = features(media, tensors=True)
    assert full is not None
    assert [len(each) for each in full["kwargs_data"].values()] == [2, 1]


async def post(setup: Setup, path: str, body: dict[str, Any]) -> Any:
    """What an engine answers with 200."""
    async with setup.client.post(path, json={"model": "sim", **body}) as response:
        assert response.status == 200
        return await response.json()


async def test_a_served_image_is_rendered_published_and_found_again() -> None:
    """Tokens of all routes agree; another image finds only what stands before it."""
    settings = replace(SETTINGS, scale_out=True)
    text = {"type": "text", "text": "x" * 200}
    async with started(settings) as setup:

        async def cached(name: str) -> int:
            answer = await post(setup, "/v1/chat/completions", {"messages": shown(text, name, text), "max_tokens": 1})
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        body = {"messages": shown(text, "one", text)}
        rendered = await post(setup, "/v1/chat/completions/render", {**body, "mm_payload": "none"})
        assert rendered["token_ids"] == (await post(setup, "/tokenize", body))["tokens"]
        assert rendered["features"]["kwargs_data"] is None
        assert (await post(setup, "/v1/chat/completions/render", body))["features"]["kwargs_data"] is not None
        assert await cached("one") == 0
        _, (stored,), _ = await setup.one.batch()
        assert stored["token_ids"] == rendered["token_ids"][: len(stored["token_ids"])]
        (name,) = rendered["features"]["mm_hashes"]["image"]
        (place,) = rendered["features"]["mm_placeholders"]["image"]
        inside = place["offset"] // 16
        assert stored["extra_keys"][: inside + 2] == [None] * inside + [
            [[name, place["offset"] - 16 * inside]],
            [[name, place["offset"] - 16 * (inside + 1)]],
        ]
        assert await cached("one") == (len(rendered["token_ids"]) - 1) // 16 * 16
        assert await cached("two") == 16 * inside
        _, (grown,), _ = await setup.one.batch()
        (other,) = render(messages(text, "two", text)).media
        assert len(grown["block_hashes"]) == len(stored["block_hashes"]) - inside
        assert grown["extra_keys"][:2] == [
            [[other.identifier, place["offset"] - 16 * inside]],
            [[other.identifier, place["offset"] - 16 * (inside + 1)]],
        ]


@pytest.mark.parametrize("name", ["sglang", "trtllm"])
def test_other_engines_have_tokens_of_an_images_own(name: str) -> None:
    """SGLang puts numbers made of an image's hash in its place; TensorRT-LLM's naming is not played."""
    assert not PROFILES[name].names_media

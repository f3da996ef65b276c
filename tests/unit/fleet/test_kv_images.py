"""Blocks with images: the chain that a keeper makes of an engine's events is the one that a request asks for."""

import struct
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from extproc.engines.kv_decode import decode
from extproc.fleet.kv_chain import Chain, Change
from extproc.state.exact_blocks import Medium, TokenPrompt, chain_of, extras_of

Form = Literal["pairs", "tagged", "bare"]
FORMS: Sequence[Form] = ("pairs", "tagged", "bare")
"""How vLLM names images in events: since 0.22, should these be tagged as hashes are since 0.31, and before 0.22."""


@st.composite
def prompts(draw: st.DrawFn) -> TokenPrompt:
    """A prompt in which texts and images take turns; images may follow each other, and have the tokens of any other."""
    ids: list[int] = []
    media = []
    for text, tokens, name in draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20), st.sampled_from(["a", "b", "c"])), max_size=5)
    ):
        ids += range(100, 100 + text)
        media.append(Medium(name, len(ids), tokens))
        ids += [7] * tokens
    ids += range(200, 200 + draw(st.integers(0, 12)))
    return TokenPrompt(ids, draw(st.sampled_from(["", "lb"])), draw(st.sampled_from(["", "tenant"])), tuple(media))


def keys_of(prompt: TokenPrompt, size: int, form: Form) -> list[list[Any] | None]:
    """Extra keys of the full blocks: what has a token in the block, by looking at each token."""
    keys: list[list[Any] | None] = []
    for start in range(0, len(prompt.ids) - size + 1, size):
        inside = [
            one
            for one in prompt.media
            if any(one.offset <= at < one.offset + one.tokens for at in range(start, start + size))
        ]
        placed = [(one.identifier, one.offset - start) for one in inside]
        forms: dict[Form, list[Any]] = {
            "pairs": placed,
            "tagged": [("mm", *each) for each in placed],
            "bare": [name for name, _ in placed],
        }
        adapter = [prompt.adapter] if prompt.adapter else []
        salt = [prompt.salt] if prompt.salt and not start else []
        keys.append([*adapter, *forms[form], *salt] or None)
    return keys


def told(prompt: TokenPrompt, size: int, keys: Sequence[list[Any] | None]) -> bytes:
    """A message of vLLM that stores the full blocks of a prompt."""
    stored = {
        "type": "BlockStored",
        "block_hashes": list(range(1, len(keys) + 1)),
        "parent_block_hash": None,
        "token_ids": list(prompt.ids[: len(keys) * size]),
        "block_size": size,
        "lora_id": 1 if prompt.adapter else None,
        "medium": "GPU",
        "lora_name": prompt.adapter or None,
        "extra_keys": keys,
    }
    return msgspec.msgpack.encode([1.0, [stored], 0])


def kept(payload: bytes) -> list[int]:
    """The blocks that a keeper has of one message."""
    chain, held = Chain(), list[int]()
    chain.begin(from_start=True)
    for event in decode(payload).events:
        for change in chain.apply(event):
            held += change.blocks if isinstance(change, Change) else []
    return held


@given(prompt=prompts(), size=st.integers(1, 17), form=st.sampled_from(FORMS))
def test_an_engines_blocks_are_those_that_a_request_asks_for(prompt: TokenPrompt, size: int, form: Form) -> None:
    """Wherever images begin and end, in whatever blocks, and whichever version tells of them."""
    keys = keys_of(prompt, size, form)
    if keys:
        assert kept(told(prompt, size, keys)) == chain_of(prompt, size)
    else:
        assert chain_of(prompt, size) == []


@given(prompt=prompts(), size=st.integers(1, 17), data=st.data())
def test_another_image_is_another_block_and_all_behind_it(prompt: TokenPrompt, size: int, data: st.DataObject) -> None:
    """The blocks before it stay the same: a hit ends where the image begins."""
    if not prompt.media:
        return
    number = data.draw(st.integers(0, len(prompt.media) - 1))
    other = list(prompt.media)
    other[number] = msgspec.structs.replace(other[number], identifier="other")
    blocks = chain_of(prompt, size)
    changed = chain_of(msgspec.structs.replace(prompt, media=tuple(other)), size)
    first = other[number].offset // size
    assert blocks[:first] == changed[:first]
    assert not set(blocks[first:]) & set(changed[first:])


def test_what_enters_a_block_is_as_vllm_has_it() -> None:
    """Computed apart: a block of 16 has the images with a token in it, one after another, then the first one's salt."""
    media = (Medium("aa", 12, 10), Medium("b", 22, 2), Medium("c", 24, 30), Medium("dd", 60, 4))
    prompt = TokenPrompt(range(90), "lb", "tenant", media)
    names = {name: b"name\0%d\0%s" % (len(name), name) for name in (b"aa", b"b", b"c", b"dd", b"tenant")}
    golden = [
        names[b"aa"] + names[b"tenant"],
        names[b"aa"] + names[b"b"] + names[b"c"],
        names[b"c"],
        names[b"c"] + names[b"dd"],
    ]
    assert extras_of(prompt, 16) == golden
    block, blocks = xxh3_64_intdigest(b"adapter\0lb"), []
    for number in range(90 // 16):
        ids = struct.pack("<16I", *range(16 * number, 16 * (number + 1)))
        block = xxh3_64_intdigest(ids + (golden[number] if number < len(golden) else b""), block)
        blocks.append(block)
    assert chain_of(prompt, 16) == blocks


@pytest.mark.parametrize(
    ("media", "names"),
    [
        # A film of 40 tokens with its sound inside: the sound is left out of blocks that the film goes on beyond.
        ([("film", 0, 40), ("sound", 4, 30)], [["film"], ["film"], ["film", "sound"]]),
        # It is over before the film is: what is last by offset ends all.
        ([("film", 0, 40), ("sound", 4, 10)], [["film"]]),
        ([("film", 0, 16), ("sound", 4, 30)], [["film", "sound"], ["sound"], ["sound"]]),
        ([("nothing", 4, 0)], [["nothing"]]),
        ([("nothing", 16, 0)], [[], []]),
        ([("nothing", 16, 0), ("image", 20, 4)], [[], ["image"]]),
    ],
)
def test_overlapping_media_enter_blocks_as_vllm_lets_them(
    media: list[tuple[str, int, int]], names: list[list[str]]
) -> None:
    """The expected names are what `generate_block_hash_extra_keys` of vLLM 0.32 gave for these places."""
    prompt = TokenPrompt(range(64), media=tuple(Medium(*each) for each in media))
    found = extras_of(prompt, 16)
    while found and not found[-1]:
        found.pop()
    expected = [b"".join(b"name\0%d\0%s" % (len(name), name.encode()) for name in each) for each in names]
    while expected and not expected[-1]:
        expected.pop()
    assert found == expected


@pytest.mark.parametrize("size", [0, -1])
def test_a_block_has_tokens(size: int) -> None:
    """Otherwise there would be no end of them."""
    with pytest.raises(ValueError, match="block_tokens must be at least 1"):
        chain_of(TokenPrompt([1, 2], media=(Medium("a", 0, 2),)), size)


def test_an_image_that_reaches_beyond_the_ids_is_left_where_they_end() -> None:
    """Whatever a server told."""
    prompt = TokenPrompt(range(20), media=(Medium("a", 10, 1 << 40),))
    assert len(extras_of(prompt, 16)) == 2
    assert len(chain_of(prompt, 16)) == 1

"""What beside tokens enters a block becomes bytes that requests can match, and that nothing else gives."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.block_extras import medium, named
from extproc.engines.kv_extras import of_block, opaque
from extproc.state import exact_blocks

_TEXT = st.text(max_size=8)
_KEYS = st.one_of(
    _TEXT.map(lambda text: text or "x"),
    st.tuples(_TEXT, st.integers(-20, 20)).map(list),
    st.binary(max_size=8),
    st.lists(st.booleans(), max_size=2),
)


def _of(keys: list[Any] | None, adapter: str) -> bytes:
    """What extra keys give, told in msgpack as events tell them."""
    told = None if keys is None else [msgspec.Raw(msgspec.msgpack.encode(key)) for key in keys]
    return of_block(told, adapter)


def test_a_salted_prompt_finds_the_block_that_an_engine_stored() -> None:
    """The chain of the event's extras and the chain of the request's salt are one."""
    prompt = exact_blocks.TokenPrompt([1, 2, 3, 4], adapter="lb", salt="tenant-a")
    stored = _of(["lb", "tenant-a"], "lb")
    chained = exact_blocks.chain([1, 2, 3, 4], 4, exact_blocks.root("lb"), (stored,))
    assert chained == exact_blocks.chain_of(prompt, 4)


@pytest.mark.parametrize(
    ("plain", "tagged"),
    [
        ("tenant-a", ["cache_salt", "tenant-a"]),
        (["img", -3], ["mm", "img", -3]),
        (b"\1" * 32, ["prompt_embeds", b"\1" * 32]),
    ],
)
def test_tagged_keys_give_what_plain_ones_give(plain: Any, tagged: Any) -> None:
    """Should events carry the tags that vLLM hashes with, nothing changes."""
    assert _of([tagged], "") == _of([plain], "") != b""


@pytest.mark.parametrize(
    ("keys", "adapter"),
    [
        (None, ""),
        ([], ""),
        (["lb"], "lb"),
        ([["lora", "lb", "/adapters/lb"]], "lb"),
        ([None, 5, 6], ""),
    ],
)
def test_adapters_and_tokens_looked_ahead_at_add_nothing(keys: list[Any] | None, adapter: str) -> None:
    """The adapter seeds the chain already; the next tokens are not known to a request."""
    assert _of(keys, adapter) == b""


def test_a_salt_that_is_called_like_the_adapter_is_kept() -> None:
    """Only the first of the two is the adapter."""
    assert _of(["lb", "lb"], "lb") == named("lb")


@given(left=st.lists(_KEYS, max_size=3), right=st.lists(_KEYS, max_size=3))
def test_different_keys_give_different_bytes(left: list[Any], right: list[Any]) -> None:
    """Names, digests and unknown things cannot be put together so that they look like others.

    Where an image begins does not count: the tokens tell.
    """
    counted = [
        [key[0] if isinstance(key, list) and len(key) == 2 and isinstance(key[0], str) else key for key in keys]
        for keys in (left, right)
    ]
    assert (_of(left, "") == _of(right, "")) is (counted[0] == counted[1])


def test_an_image_is_one_name_in_all_versions() -> None:
    """Bare in 0.17 to 0.21, with its place in the block since, and tagged should events ever be."""
    told = [_of(keys, "") for keys in (["img"], [["img", 3]], [["img", -29]], [["mm", "img", 3]])]
    assert set(told) == {named("img")}


def test_an_image_under_an_adapter_of_its_own_tower_is_the_same_image() -> None:
    """The engine puts the adapter in front of the identifier; a request has the identifier only."""
    assert _of(["lb", ["lb:img", 3]], "lb") == medium("img", "lb") == medium("lb:img", "lb") == named("img")
    assert _of([["lb:img", 3]], "") == named("lb:img")


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(b"\x91" * 4000 + b"\xc0", id="nested too deeply"),
        pytest.param(msgspec.msgpack.encode(bytes(5000)), id="too long"),
        pytest.param(b"\xa1\xff", id="no UTF-8"),
        pytest.param(msgspec.msgpack.encode({1: 2}), id="a map"),
        pytest.param(b"\xd6\xff\xff\xff\xff\xff", id="a time"),
    ],
)
def test_a_key_that_nobody_knows_stands_for_itself(told: bytes) -> None:
    """Its bytes tell its block from others, and are looked into no further than any known key needs."""
    assert of_block([told], "") == opaque(told)

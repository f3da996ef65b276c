"""What beside tokens enters a block becomes bytes that requests can match, and that nothing else gives."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.engines.kv_extras import image, of_block, opaque, salted
from extproc.state import exact_blocks

_TEXT = st.text(max_size=8)
_KEYS = st.one_of(
    _TEXT.map(lambda text: text or "x"),
    st.tuples(_TEXT, st.integers(-20, 20)).map(list),
    st.binary(max_size=8),
    st.lists(st.booleans(), max_size=2),
)


def _of(keys: list[Any] | None, adapter: str, is_first: bool) -> bytes:
    """What extra keys give, told in msgpack as events tell them."""
    told = None if keys is None else [msgspec.Raw(msgspec.msgpack.encode(key)) for key in keys]
    return of_block(told, adapter, is_first)


@given(salt=_TEXT)
def test_a_salt_gives_what_requests_give(salt: str) -> None:
    """Engines may not import the profile's hashes, so that both write the salt's bytes; they must be the same."""
    assert salted(salt) == exact_blocks.salted(salt)


def test_a_salted_prompt_finds_the_block_that_an_engine_stored() -> None:
    """The chain of the event's extras and the chain of the request's salt are one."""
    prompt = exact_blocks.TokenPrompt([1, 2, 3, 4], adapter="lb", salt="tenant-a")
    stored = _of(["lb", "tenant-a"], "lb", is_first=True)
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
    assert _of([tagged], "", is_first=True) == _of([plain], "", is_first=True) != b""


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
    assert _of(keys, adapter, is_first=True) == b""


def test_a_salt_that_is_called_like_the_adapter_is_kept() -> None:
    """Only the first of the two is the adapter."""
    assert _of(["lb", "lb"], "lb", is_first=True) == salted("lb")


@given(left=st.lists(_KEYS, max_size=3), right=st.lists(_KEYS, max_size=3))
def test_different_keys_give_different_bytes(left: list[Any], right: list[Any]) -> None:
    """Images, digests and unknown things cannot be put together so that they look like others."""
    assert (_of(left, "", is_first=False) == _of(right, "", is_first=False)) is (left == right)


def test_images_differ_by_name_and_place() -> None:
    """The same picture at another place of a block is another block, as it is to the engine."""
    given_bytes = {image("a", 0), image("a", 1), image("a", -1), image("a"), image("b", 0), opaque(b"a"), salted("a")}
    assert len(given_bytes) == 7


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
    assert of_block([told], "", is_first=True) == opaque(told)

"""Events on the wire, against literal frames of each engine and version."""

from typing import Any

import msgspec
import pytest

from extproc.sim.adapters import Adapter
from extproc.sim.block_log import Cleared, Event, Removed, Stored
from extproc.sim.encodings import batch, data_of
from extproc.sim.profiles import PROFILES, Profile
from extproc.sim.sequence import Content
from extproc.sim.tokens import from_ids

MAPS = bytes.fromhex(
    "93cb3ff000000000000093de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573910bb1706172656e745f626c6f63"
    "6b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72"
    "615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f6174"
    "74656e74696f6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173686573910ba66d656469756da3475055a967726f7570"
    "5f6964780081a474797065b0416c6c426c6f636b73436c656172656400"
)
"""Block 11 of the tokens 1 to 4 stored, removed, and all cleared: as vLLM 0.24 and later sends it."""

TOKENS = from_ids(range(1, 5))
EVENTS: list[Event] = [Stored([11], None, TOKENS, Content(TOKENS)), Removed(11), Cleared()]
LORA = Adapter("lb", 3, "/adapters/lb")


def written(name: str, *events: Event) -> list[Any]:
    """What a profile sends of these events, read by a plain msgpack decoder."""
    sent: list[Any] = msgspec.msgpack.decode(batch(PROFILES[name], events, 1.0, 0))
    return sent


def test_maps_of_vllm_are_the_very_bytes() -> None:
    """Seven fields always, the others unless they have their default, in vLLM's order."""
    sent = batch(PROFILES["vllm-0.33"], EVENTS, 1.0, 0)
    assert msgspec.msgpack.decode(sent) == msgspec.msgpack.decode(MAPS)
    # msgspec writes a map of eleven in two forms; what is in it, and the order, is the same.
    assert sent.replace(b"\x8b\xa4type", b"\xde\x00\x0b\xa4type") == MAPS


def test_arrays_of_vllm_0_23_have_twelve_members() -> None:
    """Every field by position, the last a null."""
    assert written("vllm-0.23", *EVENTS) == [
        1.0,
        [
            ["BlockStored", [11], None, [1, 2, 3, 4], 4, None, "GPU", None, [None], 0, "full_attention", None],
            ["BlockRemoved", [11], "GPU", 0],
            ["AllBlocksCleared"],
        ],
        0,
    ]


def test_arrays_of_vllm_0_11_have_seven_members() -> None:
    """Neither name of the adapter, nor extra keys, nor groups."""
    assert written("vllm-0.11", *EVENTS) == [
        1.0,
        [
            ["BlockStored", [11], None, [1, 2, 3, 4], 4, None, "GPU"],
            ["BlockRemoved", [11], "GPU"],
            ["AllBlocksCleared"],
        ],
        0,
    ]


@pytest.mark.parametrize(("version", "members"), [(13, 7), (14, 8), (16, 8), (17, 9), (21, 9), (22, 12)])
def test_an_array_grows_with_the_version(version: int, members: int) -> None:
    """`lora_name` came with 0.14, `extra_keys` with 0.17, groups with 0.22."""
    sent = msgspec.msgpack.decode(batch(Profile("", "vllm", "", version), EVENTS, 1.0, 0))
    assert len(sent[1][0]) == members


def test_vllm_tells_adapter_and_salt() -> None:
    """The adapter with every block, the salt with the first of a prompt only, both without their tags."""
    data = from_ids(range(12))
    content = Content(data, LORA, "tenantA")
    _, events, _ = written("vllm-0.33", Stored([1, 2, 3], None, data, content), Stored([4], 3, TOKENS, content))
    first, second = events
    assert (first["lora_id"], first["lora_name"]) == (3, "lb")
    assert first["extra_keys"] == [["lb", "tenantA"], ["lb"], ["lb"]]
    assert second["extra_keys"] == [["lb"]]
    assert (first["block_size"], first["token_ids"]) == (4, list(range(12)))


def test_numbers_of_64_bits_and_bytes_pass() -> None:
    """Hashes above the largest signed number, and whole digests."""
    digest = b"\xff" * 32
    for wire in ((1 << 64) - 1, digest):
        sent = written("vllm-0.33", Stored([wire], wire, TOKENS, Content(TOKENS)), Removed(wire))
        assert sent[1][0]["block_hashes"] == [wire] == sent[1][1]["block_hashes"]
        assert sent[1][0]["parent_block_hash"] == wire


def test_sglang_sends_a_map_for_each_page() -> None:
    """Chained by their parents, `lora_id` always null, salt and adapter only if there are some."""
    data = from_ids(range(8))
    plain, salted = Content(data), Content(data, LORA, "s")
    chain = (Stored([-5, 6], None, data, plain), Stored([8], 6, TOKENS, plain), Stored([7], None, TOKENS, salted))
    _, events, _ = written("sglang", *chain, *EVENTS[1:])
    page = {"type": "BlockStored", "block_size": 4, "lora_id": None, "medium": "GPU"}
    assert events == [
        page | {"block_hashes": [-5], "parent_block_hash": None, "token_ids": [0, 1, 2, 3]},
        page | {"block_hashes": [6], "parent_block_hash": -5, "token_ids": [4, 5, 6, 7]},
        page | {"block_hashes": [8], "parent_block_hash": 6, "token_ids": [1, 2, 3, 4]},
        page
        | {"block_hashes": [7], "parent_block_hash": None, "token_ids": [1, 2, 3, 4]}
        | {"cache_salt": "s", "lora_name": "lb"},
        {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU"},
        {"type": "AllBlocksCleared"},
    ]


def test_tensorrt_llm_writes_json_with_typed_tokens() -> None:
    """A stored chain of blocks, each with its tokens, level and priority."""
    data = from_ids([1, 2])
    stored = data_of(Stored([456, 789], 123, data, Content(data)))
    block = {"type": "stored_block", "cache_level": 0, "priority": 35, "mm_keys": []}
    token = {"type": "unique_token", "token_extra_id": 0}
    assert stored == {
        "type": "stored",
        "parent_hash": 123,
        "blocks": [
            block | {"block_hash": 456, "tokens": [token | {"token_id": 1}]},
            block | {"block_hash": 789, "tokens": [token | {"token_id": 2}]},
        ],
    }
    assert data_of(Removed(456)) == {"type": "removed", "block_hashes": [456]}

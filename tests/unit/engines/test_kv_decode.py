"""KV event batches of every version of vLLM and SGLang give the same values."""

from typing import Any

import msgspec
import pytest

from extproc.engines.kv_decode import decode
from extproc.engines.kv_frames import MAX_PAYLOAD_BYTES
from extproc.engines.kv_values import Cleared, EventBatch, Removed, Stored, Tier
from extproc.engines.kv_wire import MAX_EVENTS
from extproc.errors import EngineError

_VLLM_033 = bytes.fromhex(
    "93cb3ff000000000000093de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573910bb1706172656e745f626c6f63"
    "6b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72"
    "615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f6174"
    "74656e74696f6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173686573910ba66d656469756da3475055a967726f7570"
    "5f6964780081a474797065b0416c6c426c6f636b73436c656172656400"
)
"""Map form, as vLLM 0.24 and later write it."""

_VLLM_032 = bytes.fromhex(
    "93cb3ff0000000000000938ca474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920b0cb1706172656e745f626c6f63"
    "6b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f72615f696403a66d656469756da34750"
    "55a96c6f72615f6e616d65a26c62aa65787472615f6b6579739293a26c6292a3696d67fea874656e616e742d6191a26c62a967726f75705f69"
    "647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6eaa73657373696f6e5f6964a17385a474797065ac"
    "426c6f636b52656d6f766564ac626c6f636b5f68617368657391c4200000000000000000000000000000000000000000000000000000000000"
    "00000ba66d656469756da3435055a967726f75705f69647800a86c6f63616c697479a54c4f43414c81a474797065b0416c6c426c6f636b7343"
    "6c656172656401"
)
"""Encoded with the structs of vLLM 0.32's own wheel: adapter, image and salt, a digest for a removed hash, cleared."""

_SGLANG_0519 = bytes.fromhex(
    "93cb3ff00000000000009497ab426c6f636b53746f72656492f50cc098010203040506070804c0a347505598ab426c6f636b53746f7265649"
    "2f50cc098010203040506070804c0a347505581aa63616368655f73616c74a874656e616e742d6193ac426c6f636b52656d6f76656491f5aa"
    "4350555f50494e4e454491b0416c6c426c6f636b73436c656172656401"
)
"""Encoded with the structs of SGLang 0.5.19's own wheel: a prompt without and one with a salt, a removal, cleared."""

_SGLANG_0523 = bytes.fromhex(
    "93cb3ff00000000000009487a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392f50cb1706172656e745f626c6f63"
    "6b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da34750"
    "558aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392f50cb1706172656e745f626c6f636b5f68617368c0a9746f"
    "6b656e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055aa63616368655f7361"
    "6c74a874656e616e742d61aa73657373696f6e5f6964a173a96c6f72615f6e616d65a26c6283a474797065ac426c6f636b52656d6f766564ac"
    "626c6f636b5f68617368657391f5a66d656469756daa4350555f50494e4e454481a474797065b0416c6c426c6f636b73436c656172656401"
)
"""The same of SGLang 0.5.23, where the salted prompt also has an adapter and a session."""

_MINUS_11 = (1 << 64) - 11

_STORED: dict[str, Any] = {
    "block_hashes": [11],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 4,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": None,
}
"""BlockStored in vLLM's order of fields."""


def _batch(*events: Any, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([1.0, events, rank])


def _as_map(**changes: Any) -> dict[str, Any]:
    return {"type": "BlockStored", **_STORED, **changes}


def _as_array(count: int, **changes: Any) -> list[Any]:
    """BlockStored as an array with so many fields."""
    return ["BlockStored", *list({**_STORED, **changes}.values())[:count]]


def _only(payload: bytes) -> Stored:
    (event,) = decode(payload).events
    assert isinstance(event, Stored)
    return event


_EXPECTED = EventBatch(1.0, 0, (Stored((11,), None, (1, 2, 3, 4), 4), Removed((11,), Tier.GPU), Cleared()))


def test_the_map_form_is_read() -> None:
    """From vLLM 0.24 on an event is a map with its kind under `type`."""
    assert decode(_VLLM_033) == _EXPECTED


@pytest.mark.parametrize(
    ("stored", "removed"),
    [
        pytest.param(6, 2, id="vllm-0.11"),
        pytest.param(7, 2, id="vllm-0.14"),
        pytest.param(8, 2, id="vllm-0.17"),
        pytest.param(11, 3, id="vllm-0.23"),
    ],
)
def test_the_array_forms_give_the_same_values_as_the_map(stored: int, removed: int) -> None:
    """Each version adds fields at the end of its arrays; the values are those of the map form."""
    taken = ["BlockRemoved", *[[11], "GPU", 0][:removed]]
    assert decode(_batch(_as_array(stored), taken, ["AllBlocksCleared"])) == _EXPECTED


def test_what_vllms_own_structs_write_is_read() -> None:
    """Fields that nobody needs are passed over; a digest and an integer of the same block are one id."""
    extras = (b"name\x003\x00imgname\x008\x00tenant-a",)
    stored = Stored((11, 12), None, tuple(range(1, 9)), 4, adapter="lb", extras=extras)
    assert decode(_VLLM_032) == EventBatch(1.0, 1, (stored, Removed((11,), Tier.CPU), Cleared()))


@pytest.mark.parametrize("count", range(4, 12))
def test_any_number_of_array_fields_from_the_first_four_on_is_read(count: int) -> None:
    """Versions in between, and a trimmed end, lose nothing but what they do not tell."""
    assert _only(_batch(_as_array(count))) == Stored((11,), None, (1, 2, 3, 4), 4)


def test_sglang_up_to_0_5_19_writes_arrays_with_the_salt_behind_the_medium() -> None:
    """Negative hashes are taken as unsigned; a salt in the metadata counts for the prompt's first block."""
    hashes, tokens = (_MINUS_11, 12), tuple(range(1, 9))
    assert decode(_SGLANG_0519) == EventBatch(
        1.0,
        1,
        (
            Stored(hashes, None, tokens, 4),
            Stored(hashes, None, tokens, 4, extras=(b"name\x008\0tenant-a",)),
            Removed((_MINUS_11,), Tier.CPU),
            Cleared(),
        ),
    )


def test_sglang_from_0_5_20_on_writes_maps_with_salt_and_adapter() -> None:
    """The same values from maps, whose unknown `session_id` is passed over."""
    hashes, tokens = (_MINUS_11, 12), tuple(range(1, 9))
    assert decode(_SGLANG_0523) == EventBatch(
        1.0,
        1,
        (
            Stored(hashes, None, tokens, 4),
            Stored(hashes, None, tokens, 4, adapter="lb", extras=(b"name\x008\0tenant-a",)),
            Removed((_MINUS_11,), Tier.CPU),
            Cleared(),
        ),
    )


def test_a_salt_told_with_later_pages_counts_only_where_the_prompt_begins() -> None:
    """SGLang repeats the salt in every event; the chain already has it from its first block."""
    assert _only(_batch(_as_map(parent_block_hash=9, cache_salt="tenant-a"))).extras == ()


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (11, 11),
        ((1 << 64) - 1, (1 << 64) - 1),
        (-1, (1 << 64) - 1),
        (-(1 << 63), 1 << 63),
        (bytes(24) + b"\0\0\0\0\0\0\1\2", 258),
        (b"\1\2", 258),
    ],
)
def test_hashes_of_every_writing_are_unsigned_64_bit_integers(written: Any, read: int) -> None:
    """Integers of either sign, and digests, whose last eight bytes count."""
    event = _only(_batch(_as_map(block_hashes=[written], parent_block_hash=written)))
    assert (event.hashes, event.parent) == ((read,), read)
    assert decode(_batch(["BlockRemoved", [written], None])).events == (Removed((read,), None),)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.GPU),
        ("GPU", Tier.GPU),
        ("CPU", Tier.CPU),
        ("cpu", Tier.CPU),
        ("CPU_PINNED", Tier.CPU),
        ("STORAGE", Tier.DISK),
        ("DISK", Tier.DISK),
        ("EXTERNAL", Tier.DISK),
    ],
)
def test_media_are_tiers(medium: str | None, tier: Tier) -> None:
    """Every engine's name of a medium is one of three tiers; blocks without one were stored on the GPU."""
    assert _only(_batch(_as_map(medium=medium))).tier is tier
    (removed,) = decode(_batch({"type": "BlockRemoved", "block_hashes": [11], "medium": medium})).events
    assert removed == Removed((11,), tier if medium else None)


def test_blocks_that_another_machine_keeps_are_as_far_as_disk() -> None:
    """`locality` REMOTE counts more than the medium there, for removals too."""
    assert _only(_batch(_as_map(medium="CPU", locality="REMOTE"))).tier is Tier.DISK
    assert _only(_batch(_as_map(medium="CPU", locality="LOCAL"))).tier is Tier.CPU
    gone = {"type": "BlockRemoved", "block_hashes": [11], "medium": None, "locality": "REMOTE"}
    assert decode(_batch(gone)).events == (Removed((11,), Tier.DISK),)


@pytest.mark.parametrize(
    ("name", "number", "adapter"), [("lb", 3, "lb"), ("lb", None, "lb"), (None, 3, "lora:3"), (None, None, "")]
)
def test_an_adapter_goes_by_its_name_and_else_by_its_number(name: str | None, number: int | None, adapter: str) -> None:
    """Requests name adapters, so that the name wins; a bare number still keeps blocks from the base model's."""
    assert _only(_batch(_as_map(lora_name=name, lora_id=number))).adapter == adapter


def test_extra_keys_lose_the_adapter_and_keep_salt_and_images() -> None:
    """What vLLM 0.32 writes for a prompt with an adapter, an image and a salt; empty blocks at the end have none."""
    keys: list[Any] = [["lb", ["img", -2], "tenant-a"], ["lb"], ["lb", ["img", 1]], ["lb"], None]
    event = _only(
        _batch(
            _as_map(block_hashes=[1, 2, 3, 4, 5], token_ids=list(range(20)), lora_id=3, lora_name="lb", extra_keys=keys)
        )
    )
    assert event.adapter == "lb"
    assert event.extras == (b"name\x003\x00imgname\x008\x00tenant-a", b"", b"name\x003\x00img")


def test_a_bare_string_is_a_name_whatever_it_names() -> None:
    """As vLLM 0.17 to 0.21 name images, all versions name salts: in a prompt's first block it may be either."""
    for parent in (None, 9):
        assert _only(_batch(_as_map(extra_keys=[["x"]], parent_block_hash=parent))).extras == (b"name\x001\x00x",)


def test_events_of_unknown_kinds_and_media_are_counted() -> None:
    """A newer engine's events do not hide those that are known."""
    batch = decode(
        _batch(
            {"type": "BlockTouched", "block_hashes": [1]},
            ["BlockTouched"],
            _as_map(medium="TAPE"),
            {"type": "BlockRemoved", "block_hashes": [1], "medium": "TAPE"},
            {"type": "BlockRemoved", "block_hashes": [], "medium": "GPU"},
            _as_map(a_new_key={"any": ["thing"]}),
        )
    )
    assert batch == EventBatch(1.0, 0, (Stored((11,), None, (1, 2, 3, 4), 4),), skipped=5)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"token_ids": [1, 2, 3]}, id="too few tokens"),
        pytest.param({"token_ids": [], "block_size": 0}, id="offloaded without tokens"),
        pytest.param({"block_hashes": []}, id="no hashes"),
        pytest.param({"block_hashes": [], "token_ids": [], "extra_keys": None}, id="nothing at all"),
        pytest.param({"block_size": -4}, id="negative size"),
        pytest.param({"extra_keys": [None, None]}, id="more extra keys than blocks"),
        pytest.param({"token_ids": [[1, 2], [2, 3], [3, 4], [4, 5]]}, id="pairs under EAGLE"),
    ],
)
@pytest.mark.parametrize("form", ["map", "array"])
def test_blocks_whose_parts_do_not_fit_are_counted(changes: dict[str, Any], form: str) -> None:
    """An event that cannot be indexed is left out, and the others of the batch are not."""
    odd = _as_map(**changes) if form == "map" else _as_array(11, **changes)
    good = _as_map() if form == "map" else _as_array(11)
    assert decode(_batch(odd, good)) == EventBatch(1.0, 0, (Stored((11,), None, (1, 2, 3, 4), 4),), skipped=1)


def test_the_rank_and_the_time_are_told_or_not() -> None:
    """Batches without a rank are of rank 0, and a time nobody can believe is none."""
    assert decode(msgspec.msgpack.encode([1.5, []])) == EventBatch(1.5, 0, ())
    assert decode(_batch(rank=3)).rank == 3
    assert decode(msgspec.msgpack.encode([float("nan"), [], None])).at == 0.0
    assert decode(msgspec.msgpack.encode([-1, [], None])).at == 0.0


@pytest.mark.parametrize(
    ("payload", "fault"),
    [
        (b"", "a batch of KV events cannot be read"),
        (b"\xc1", "a batch of KV events cannot be read"),
        (_VLLM_033[:-1], "a batch of KV events cannot be read"),
        (_VLLM_033 + b"\0", "a batch of KV events cannot be read"),
        (msgspec.msgpack.encode({"ts": 1.0, "events": []}), "a batch of KV events cannot be read"),
        (msgspec.msgpack.encode(["soon", []]), "a batch of KV events cannot be read"),
        (_batch(7), "does not say its kind"),
        (_batch({"block_hashes": []}), "does not say its kind"),
        (_batch(["BlockRemoved"]), "a KV event BlockRemoved cannot be read"),
        (_batch(_as_map(token_ids=[1, 2, 3, "private"])), "a KV event BlockStored cannot be read"),
        (_batch(_as_map(token_ids=[1, 2, 3, 1 << 32])), "a KV event BlockStored cannot be read"),
        (_batch(_as_map(token_ids=[1, 2, 3, -1])), "a KV event BlockStored cannot be read"),
        (_batch(_as_map(block_hashes=[1.5])), "a KV event BlockStored cannot be read"),
        (_batch(_as_map(block_hashes=[True])), "a KV event BlockStored cannot be read"),
        (_batch(["BlockRemoved", ["ab" * 32]]), "a KV event BlockRemoved cannot be read"),
        (_batch(_as_map(block_hashes=[bytes(65)])), "block hash that is no 64-bit integer"),
        (_batch(_as_map(parent_block_hash=b"")), "block hash that is no 64-bit integer"),
        (_batch(rank=-1), "rank outside 0 to 4095"),
        (_batch(rank=4096), "rank outside 0 to 4095"),
        (_batch(*[{"type": "AllBlocksCleared"}] * (MAX_EVENTS + 1)), "array` of length <="),
        (_batch(_as_map(block_hashes=[0] * (MAX_EVENTS + 1))), "array` of length <="),
        (_batch(_as_map(extra_keys=[[0] * 257])), "array` of length <="),
        (b"\x93\xcb" + bytes(8) + b"\x91" * 100_000, "a batch of KV events cannot be read"),
        (bytes(MAX_PAYLOAD_BYTES + 1), "longer than"),
    ],
)
def test_a_malformed_payload_is_refused_by_name(payload: bytes, fault: str) -> None:
    """The text says what is wrong, and holds nothing of a prompt."""
    with pytest.raises(EngineError, match=fault) as error:
        decode(payload)
    assert "private" not in str(error.value)

"""The engines' own block hashes, against vectors, reference formulas, and NVIDIA's package where it is installed."""

import hashlib
import struct
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.engines.kv_hashes import (
    MmKey,
    VllmAlgorithm,
    cbor,
    none_hash,
    routed_blocks,
    salt_id,
    sglang_namespace,
    sglang_namespaced,
    sglang_pages,
    sglang_wire,
    v1_block_key,
    v1_chain,
    v2_sha256,
    v2_sha256_64,
    vllm_block,
    vllm_extra_keys,
    vllm_wire,
)

_FIRST = list(range(1, 17))
_SECOND = list(range(17, 33))
_TOKENS = st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=40)


def test_tensorrt_v1_vectors() -> None:
    """Values of the C++ hash of TensorRT-LLM, compiled from its source."""
    first = v1_block_key(range(1, 33))
    assert first == 17831341519058834317
    assert v1_block_key(range(33, 65), first) == 11197498242826443880
    assert v1_block_key(range(1, 33), lora_id=7) == 15744835200463573885
    assert v1_block_key([1, 2, 3]) == 14332563581206


def test_tensorrt_v1_salt_vectors() -> None:
    """The salt's number, and what it makes of the first block; later blocks have it through their parent alone."""
    assert salt_id("tenant-a") == 16248643848220682112
    salted = v1_block_key(range(1, 33), salt=salt_id("tenant-a"))
    assert salted == 9967532097703111829
    assert v1_block_key([5], salted, salt=1) == v1_block_key([5], salted)


def test_tensorrt_v1_images_and_extra_ids_count() -> None:
    """Everything that enters a block changes its hash, images by what they are and where they begin."""
    digest = bytes(range(32))
    hashes = {
        v1_block_key([1, 2]),
        v1_block_key([1, 2], extra_ids=[0, 0]),
        v1_block_key([1, 2], extra_ids=[0, 1]),
        v1_block_key([1, 2], images=[MmKey(digest, 0)]),
        v1_block_key([1, 2], images=[MmKey(digest, 1)]),
        v1_block_key([1, 2], images=[MmKey(digest[::-1], 0)]),
    }
    assert len(hashes) == 6


def _cpp_mix32(value: int, seed: int) -> int:
    """`hash32` and `hashCombine` of the C++, step by step in its own integer widths."""
    a = value % 2**32
    a = ((a >> 16) ^ a) * 0x45D9F3B % 2**32
    a = ((a >> 16) ^ a) * 0x45D9F3B % 2**32
    a = (a >> 16) ^ a
    return seed ^ ((((a + 0x9E3779B9) % 2**32) + (seed << 6) % 2**64 + (seed >> 2)) % 2**64)


def test_tensorrt_v1_mixes_images_word_by_word() -> None:
    """Eight little-endian words of the digest, then the offset as a number of 64 bits."""
    digest = bytes(range(100, 132))
    seed = v1_block_key([9])
    for word in range(8):
        seed = _cpp_mix32(int.from_bytes(digest[4 * word : 4 * word + 4], "little"), seed)
    expected = seed ^ ((_splitmix(3) + 0x9E3779B9 + (seed << 6) % 2**64 + (seed >> 2)) % 2**64)
    assert v1_block_key([9], images=[MmKey(digest, 3)]) == expected


def _splitmix(b: int) -> int:
    b = (b ^ (b >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    b = (b ^ (b >> 27)) * 0x94D049BB133111EB % 2**64
    return b ^ (b >> 31)


def test_tensorrt_blocks_leave_out_the_last_token_and_keep_the_partial_block() -> None:
    """The last token is computed anew in any case; the rest is cut into blocks, the last one as long as it is."""
    assert [list(block) for block in routed_blocks(range(9), 4)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [list(block) for block in routed_blocks(range(10), 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert routed_blocks([1], 4) == routed_blocks([], 4) == []
    with pytest.raises(ValueError, match="at least 1"):
        routed_blocks([1, 2], 0)


def test_tensorrt_v1_chains_its_blocks() -> None:
    """Each block is seeded with the one before it; the adapter is in each, the salt in the first."""
    first = v1_block_key([1, 2], lora_id=7, salt=9)
    assert v1_chain([1, 2, 3, 4], 2, lora_id=7, salt=9) == [first, v1_block_key([3], first, lora_id=7)]


def test_tensorrt_v2_is_sha256_over_the_parent_and_eight_bytes_a_token() -> None:
    """Digests chained from the digest of the scope; the short form is the first eight bytes."""
    root = hashlib.sha256(b"").digest()
    first = hashlib.sha256(root + struct.pack("<2Q", 1, 2)).digest()
    second = hashlib.sha256(first + struct.pack("<Q", 3)).digest()
    assert v2_sha256([1, 2, 3, 4], 2) == [first, second]
    assert v2_sha256_64(first) == int(first.hex()[:16], 16)
    assert v2_sha256([1, 2, 3], 2, b"scope")[0] != first


def _nvidia() -> Any:
    """NVIDIA's module of block hashes; its package raises an ImportError where CUDA's libraries are missing."""
    reason = "the extra tensorrt-llm is not installed"
    return pytest.importorskip("tensorrt_llm.runtime.kv_cache_hash", reason=reason, exc_type=ImportError)


@given(tokens=_TOKENS, lora=st.none() | st.integers(0, 1000), salt=st.none() | st.text(max_size=8))
def test_tensorrt_v1_agrees_with_nvidias_package(tokens: list[int], lora: int | None, salt: str | None) -> None:
    """Where the extra `tensorrt-llm` is installed, its own function gives the same."""
    theirs = _nvidia()
    number = None if salt is None else theirs.get_cache_salt_id(salt)
    assert salt is None or salt_id(salt) == number
    for parent in (0, 12345):
        expected = theirs.hash_v1_block_key(tokens, parent, lora, number)
        assert v1_block_key(tokens, parent, lora_id=lora, salt=number) == expected


@given(digest=st.binary(min_size=32, max_size=32))
def test_tensorrt_v2_agrees_with_nvidias_package(digest: bytes) -> None:
    """The short form of the second algorithm, likewise."""
    theirs = _nvidia()
    assert v2_sha256_64(digest) == theirs.truncate_sha256_hash_to_int64(digest)


@pytest.mark.parametrize(
    ("algorithm", "seed", "none", "wires"),
    [
        (
            "sha256_cbor",
            "vllm-none-hash",
            "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
            (8866452693264111234, 807986237951177663),
        ),
        (
            "sha256_cbor",
            "0",
            "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
            (3236607068019569386, 2758186210834249151),
        ),
        (
            "sha256",
            "vllm-none-hash",
            "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
            (1403909460543360175, 1643945449041937783),
        ),
        ("xxhash_cbor", "0", "1ebe36576dcb573f26b99533a20aaeca", (882618318818381833, 12890060145260523405)),
    ],
)
def test_vllm_vectors(algorithm: VllmAlgorithm, seed: str, none: str, wires: tuple[int, int]) -> None:
    """Two blocks of 16 tokens by each algorithm and seed, and the integers that events name them by."""
    assert none_hash(seed, algorithm).hex() == none
    first = vllm_block(_FIRST, none_hash(seed, algorithm), algorithm=algorithm)
    assert (vllm_wire(first), vllm_wire(vllm_block(_SECOND, first, algorithm=algorithm))) == wires


@pytest.mark.parametrize(
    ("extras", "wire"),
    [
        ({"salt": "tenant-a"}, 5068484237151326159),
        ({"lora": ("sql-lora", "/adapters/sql")}, 1541564459820501292),
        ({"salt": "tenant-a", "lora": ("sql-lora", "/adapters/sql")}, 3747681092294506277),
    ],
)
def test_vllm_vectors_with_adapter_and_salt(extras: dict[str, Any], wire: int) -> None:
    """Tagged keys of vLLM since 0.31."""
    assert vllm_wire(vllm_block(_FIRST, none_hash(), vllm_extra_keys(**extras))) == wire


def test_vllm_extra_keys_of_either_tagging() -> None:
    """The order is adapter, images, salt, embeddings; up to 0.30 nothing says what it is, and no path is there."""
    told: dict[str, Any] = {"lora": ("lb", "/lb"), "images": [("img", -2)], "salt": "s", "embeddings": b"d"}
    assert vllm_extra_keys(**told) == (
        ("lora", "lb", "/lb"),
        ("mm", "img", -2),
        ("cache_salt", "s"),
        ("prompt_embeds", b"d"),
    )
    assert vllm_extra_keys(**told, is_tagged=False) == ("lb", ("img", -2), "s", b"d")
    assert vllm_extra_keys() == vllm_extra_keys(is_tagged=False) == ()


@given(tokens=_TOKENS, salt=st.text(max_size=8), offset=st.integers(-(1 << 40), 1 << 40), tagged=st.booleans())
def test_vllm_blocks_agree_with_the_reference_encoder(tokens: list[int], salt: str, offset: int, tagged: bool) -> None:
    """The hash is SHA-256 over what cbor2 writes canonically of (parent, tokens, extra keys or none)."""
    keys = vllm_extra_keys(images=[("img", offset)], salt=salt, is_tagged=tagged) if salt else ()
    parent = none_hash()
    packed = cbor2.dumps((parent, tuple(tokens), keys or None), canonical=True)
    assert vllm_block(tokens, parent, keys) == hashlib.sha256(packed).digest()


_VALUES = st.recursive(
    st.none() | st.integers(-(1 << 64), (1 << 64) - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=30),
    max_leaves=40,
)


@given(value=_VALUES)
def test_cbor_is_what_the_reference_encoder_writes(value: Any) -> None:
    """Every value that the hashes need, in the fewest bytes."""
    assert cbor(value) == cbor2.dumps(value, canonical=True)


@pytest.mark.parametrize(
    ("value", "error"), [(1.5, TypeError), (True, TypeError), (1 << 64, OverflowError), (-(1 << 64) - 1, OverflowError)]
)
def test_cbor_refuses_what_it_cannot_write(value: Any, error: type[Exception]) -> None:
    """Other types and larger integers are errors, not other bytes."""
    with pytest.raises(error):
        cbor(value)


def test_sglang_pages_are_chained_sha256_over_four_bytes_a_token() -> None:
    """Full pages only; the id is the first eight bytes as a signed integer."""
    first = hashlib.sha256(struct.pack("<2I", 1, 2)).digest()
    second = hashlib.sha256(first + struct.pack("<2I", 3, 4)).digest()
    assert sglang_pages([1, 2, 3, 4, 5], 2) == [first, second]
    assert sglang_pages([3, 4], 2, first) == [second]
    (wire,) = struct.unpack(">q", first[:8])
    assert sglang_wire(first) == wire
    assert sglang_wire(b"\xff" * 32) == -1


def test_sglang_ids_within_a_namespace() -> None:
    """The seed tells its parts apart by presence and length; the id is hashed with it once more."""
    tag = b"sglang-kv-event-namespace-v1"
    seed = hashlib.sha256(tag + b"\1" + struct.pack("<Q", 2) + b"lb" + b"\0").digest()
    assert sglang_namespace("lb") == seed
    assert (
        sglang_namespace("lb", "s")
        == hashlib.sha256(tag + b"\1" + struct.pack("<Q", 2) + b"lb" + b"\1" + struct.pack("<Q", 1) + b"s").digest()
    )
    assert sglang_namespace("a", "bc") != sglang_namespace("ab", "c")
    assert (
        sglang_namespaced(-5, seed) == struct.unpack(">q", hashlib.sha256(seed + struct.pack(">q", -5)).digest()[:8])[0]
    )
    assert sglang_namespaced(-5, sglang_namespace(None)) == -5

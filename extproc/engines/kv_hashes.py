"""The engines' own block hashes, recomputed: to check what an engine tells, never to look anything up.

Profiles are indexed by `state.exact_blocks` and take these hashes as opaque ids, since algorithms, seeds and tags
differ by version and option. Formulas: TensorRT-LLM `cpp/tensorrt_llm/batch_manager/blockKey.cpp` and
`tensorrt_llm/runtime/kv_cache_hash.py`; vLLM `vllm/v1/core/kv_cache_utils.py` and `vllm/utils/hashing.py`; SGLang
`srt/mem_cache/utils.py` and `srt/disaggregation/kv_events.py`.
"""

import hashlib
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from xxhash import xxh3_128_digest

_M32 = (1 << 32) - 1
_M64 = (1 << 64) - 1

VllmAlgorithm = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]

VLLM_SEED = "vllm-none-hash"
"""What vLLM since 0.29 seeds `sha256` and `sha256_cbor` with when PYTHONHASHSEED is not set; before, a random one."""


class MmKey(msgspec.Struct, frozen=True, gc=False):
    """An image in a block of TensorRT-LLM.

    Attributes:
        digest: its hash, 32 bytes.
        start: its offset, in tokens.
    """

    digest: bytes
    start: int


def routed_blocks(tokens: Sequence[int], block_tokens: int) -> list[Sequence[int]]:
    """Blocks of a prompt as TensorRT-LLM stores and looks them up: without the last token, the last block partial."""
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    return [
        tokens[start : min(start + block_tokens, len(tokens) - 1)] for start in range(0, len(tokens) - 1, block_tokens)
    ]


def salt_id(salt: str) -> int:
    """TensorRT-LLM's number of a `cache_salt`; its first C++ cache manager used another, unknown outside it."""
    return int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8], "little")


def v1_block_key(
    tokens: Sequence[int],
    parent: int = 0,
    *,
    lora_id: int | None = None,
    salt: int | None = None,
    extra_ids: Sequence[int] = (),
    images: Sequence[MmKey] = (),
) -> int:
    """Hash one block as TensorRT-LLM's `v1_block_key`.

    Args:
        tokens: its token ids.
        parent: hash of the block before it; 0 for the first.
        lora_id: `lora_int_id` of the adapter.
        salt: `salt_id` of the request's salt, which only the first block counts.
        extra_ids: one beside each token, when the request has them (prompt tables).
        images: images within the block.
    """
    seed = len(tokens) ^ (parent * 0xBF58476D1CE4E5B9 & _M64)
    if not parent and salt is not None:
        seed = _mix64(salt, seed)
    for place, token in enumerate(tokens):
        seed = _mix32(token, seed)
        if extra_ids:
            seed = _mix64(extra_ids[place], seed)
    if lora_id is not None:
        seed = _mix64(lora_id, seed)
    for one in images:
        for word in struct.unpack("<8I", one.digest):
            seed = _mix32(word, seed)
        seed = _mix64(one.start, seed)
    return seed


def v1_chain(
    tokens: Sequence[int], block_tokens: int, *, lora_id: int | None = None, salt: int | None = None
) -> list[int]:
    """Hashes of a text prompt's blocks, as TensorRT-LLM's own router computes them."""
    hashes: list[int] = []
    for block in routed_blocks(tokens, block_tokens):
        hashes.append(v1_block_key(block, hashes[-1] if hashes else 0, lora_id=lora_id, salt=salt))
    return hashes


def v2_sha256(tokens: Sequence[int], block_tokens: int, scope: bytes = b"") -> list[bytes]:
    """Digests of a prompt's blocks as TensorRT-LLM's `v2_sha256`, which events write in hexadecimal.

    Args:
        tokens: token ids of the prompt.
        block_tokens: tokens in one block.
        scope: bytes of the reuse scope; those of a salt or an adapter are not known here.
    """
    digests: list[bytes] = []
    parent = hashlib.sha256(scope).digest()
    for block in routed_blocks(tokens, block_tokens):
        parent = hashlib.sha256(parent + struct.pack(f"<{len(block)}Q", *block)).digest()
        digests.append(parent)
    return digests


def v2_sha256_64(digest: bytes) -> int:
    """The integer that `v2_sha256_64` makes of a digest of `v2_sha256`."""
    return int.from_bytes(digest[:8], "big")


def _mix32(value: int, seed: int) -> int:
    value &= _M32
    value = ((value >> 16) ^ value) * 0x45D9F3B & _M32
    value = ((value >> 16) ^ value) * 0x45D9F3B & _M32
    value = (value >> 16) ^ value
    # The C++ adds the constant to a 32-bit number, so that the sum wraps before it is widened.
    return seed ^ (((value + 0x9E3779B9 & _M32) + (seed << 6) + (seed >> 2)) & _M64)


def _mix64(value: int, seed: int) -> int:
    value &= _M64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _M64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _M64
    value ^= value >> 31
    return seed ^ ((value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _M64)


def none_hash(seed: str = VLLM_SEED, algorithm: VllmAlgorithm = "sha256_cbor") -> bytes:
    """What vLLM chains a prompt's first block to: the seed, hashed like a block."""
    return _VLLM[algorithm](seed)


def vllm_block(
    tokens: Sequence[int],
    parent: bytes,
    extra_keys: Sequence[Any] = (),
    algorithm: VllmAlgorithm = "sha256_cbor",
) -> bytes:
    """Hash one full block as vLLM does.

    Args:
        tokens: its token ids.
        parent: digest of the block before it; `none_hash` for the first.
        extra_keys: as `vllm_extra_keys` gives them.
        algorithm: `--prefix-caching-hash-algo` of the engine.
    """
    return _VLLM[algorithm]((parent, tuple(tokens), tuple(extra_keys) or None))


def vllm_extra_keys(
    *,
    lora: tuple[str, str] | None = None,
    images: Sequence[tuple[str, int]] = (),
    salt: str = "",
    embeddings: bytes = b"",
    is_tagged: bool = True,
) -> tuple[Any, ...]:
    """What enters the hash of a block of vLLM beside its tokens.

    Args:
        lora: name and path of the adapter; in every block.
        images: identifiers of the images that overlap the block, with their offset from its start.
        salt: the request's, for its first block.
        embeddings: SHA-256 of the block's prompt embeddings.
        is_tagged: each key says what it is, as since vLLM 0.31.
    """
    if is_tagged:
        keys: list[Any] = [("lora", *lora)] if lora else []
        keys += [("mm", *one) for one in images]
        keys += [("cache_salt", salt)] if salt else []
        return (*keys, ("prompt_embeds", embeddings)) if embeddings else tuple(keys)
    keys = [lora[0]] if lora else []
    keys += images
    keys += [salt] if salt else []
    return (*keys, embeddings) if embeddings else tuple(keys)


def vllm_wire(digest: bytes) -> int:
    """The integer by which vLLM's events name a digest."""
    return int.from_bytes(digest[-8:], "big")


def cbor(value: Any) -> bytes:
    """Canonical CBOR (RFC 8949, 4.2.1) of None, integers of 64 bits, text, bytes and sequences of these.

    Raises:
        TypeError: the value is of another type.
        OverflowError: an integer does not fit 64 bits.
    """
    match value:
        case None:
            return b"\xf6"
        case int() if not isinstance(value, bool):
            return _head(0, value) if value >= 0 else _head(1, -1 - value)
        case bytes():
            return _head(2, len(value)) + value
        case str():
            text = value.encode()
            return _head(3, len(text)) + text
        case tuple() | list() | range():
            return _head(4, len(value)) + b"".join([cbor(one) for one in value])
    raise TypeError(f"cannot write a {type(value).__name__} as CBOR")


def _head(major: int, argument: int) -> bytes:
    """The first bytes of a CBOR item: its major type and its length or value, in as few bytes as it needs."""
    if argument < 24:
        return bytes([major << 5 | argument])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if argument < 1 << 8 * size:
            return bytes([major << 5 | code]) + argument.to_bytes(size, "big")
    raise OverflowError("an integer is too large for CBOR")


_VLLM: Final[Mapping[VllmAlgorithm, Callable[[Any], bytes]]] = {
    "sha256": lambda value: hashlib.sha256(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)).digest(),
    "sha256_cbor": lambda value: hashlib.sha256(cbor(value)).digest(),
    "xxhash": lambda value: xxh3_128_digest(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)),
    "xxhash_cbor": lambda value: xxh3_128_digest(cbor(value)),
}
"""`vllm/utils/hashing.py`. Those that pickle depend on Python's pickle protocol, which is 5 since 3.8."""


def sglang_pages(tokens: Sequence[int], page_size: int, prior: bytes = b"") -> list[bytes]:
    """Digests of the full pages of a prompt as SGLang computes them; `prior` is the digest of the page before."""
    digests: list[bytes] = []
    for end in range(page_size, len(tokens) + 1, page_size):
        prior = hashlib.sha256(prior + struct.pack(f"<{page_size}I", *tokens[end - page_size : end])).digest()
        digests.append(prior)
    return digests


def sglang_wire(digest: bytes) -> int:
    """The signed integer by which SGLang's events name a digest."""
    return int.from_bytes(digest[:8], "big", signed=True)


def sglang_namespace(extra_key: str | None, cache_salt: str | None = None) -> bytes | None:
    """What SGLang from 0.5.20 on seeds the ids of an adapter's blocks with; None when there is no namespace.

    Args:
        extra_key: the engine's own key of the adapter.
        cache_salt: the request's, in the `dynamo` format of events only.
    """
    if extra_key is None and cache_salt is None:
        return None
    parts = [b"sglang-kv-event-namespace-v1"]
    for part in (extra_key, cache_salt):
        text = None if part is None else part.encode()
        parts.append(b"\0" if text is None else b"\1" + len(text).to_bytes(8, "little") + text)
    return hashlib.sha256(b"".join(parts)).digest()


def sglang_namespaced(wire: int, seed: bytes | None) -> int:
    """The id that SGLang gives a block within a namespace, from the `sglang_wire` of its digest."""
    if seed is None:
        return wire
    return sglang_wire(hashlib.sha256(seed + wire.to_bytes(8, "big", signed=True)).digest())

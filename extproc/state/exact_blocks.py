"""Blocks of precise profiles: our own hashes over token ids, in the engine's own block size.

Engines hash with algorithms, seeds and tags that differ by version and option; their hashes are never compared with
ours. What an engine says it stored (token ids, adapter, salt) and what a request asks for give the same chain here.
"""

import sys
from array import array
from collections.abc import Sequence

import msgspec
from xxhash import xxh3_64_intdigest


class TokenPrompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt as the engine sees it.

    Attributes:
        ids: its token ids, each below 2**32.
        adapter: name of the LoRA adapter; empty for the base model.
        salt: `cache_salt` of the request; empty without.
    """

    ids: Sequence[int]
    adapter: str = ""
    salt: str = ""


def root(adapter: str) -> int:
    """What the first block of a prompt is chained to; different for each LoRA adapter."""
    return xxh3_64_intdigest(b"adapter\0" + adapter.encode("utf-8", "surrogatepass"))


def salted(salt: str) -> bytes:
    """What a `cache_salt` adds to a prompt's first block, as `chain` takes it."""
    return b"salt\0" + salt.encode("utf-8", "surrogatepass") if salt else b""


def chain(ids: Sequence[int], block_tokens: int, parent: int, extras: Sequence[bytes] = ()) -> list[int]:
    """Hash token ids block by block, each hash seeded with the one before it.

    Args:
        ids: token ids, each below 2**32.
        block_tokens: size of a block in tokens, at least 1.
        parent: hash of the block before the first one; `root` of the adapter for a prompt's beginning.
        extras: what enters the hash of each block beside its tokens (salts, images), by its place; blocks beyond its
            end have none.

    Returns:
        One unsigned 64-bit integer for each full block; the tokens after the last full block have none.

    Raises:
        ValueError: `block_tokens` is not positive.
        OverflowError: an id is negative or does not fit 32 bits.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    data, size = packed.tobytes(), 4 * block_tokens
    hashes = []
    for number, end in enumerate(range(size, len(data) + 1, size)):
        extra = extras[number] if number < len(extras) else b""
        parent = xxh3_64_intdigest(data[end - size : end] + extra, parent)
        hashes.append(parent)
    return hashes


def chain_of(prompt: TokenPrompt, block_tokens: int) -> list[int]:
    """Blocks of a request's prompt; see `chain` for the errors."""
    extras = (salted(prompt.salt),) if prompt.salt else ()
    return chain(prompt.ids, block_tokens, root(prompt.adapter), extras)

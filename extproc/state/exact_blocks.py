"""Blocks of precise profiles: our own hashes over token ids, in the engine's own block size.

Engines hash with algorithms, seeds and tags that differ by version and option; their hashes are never compared with
ours. What an engine says it stored (token ids, adapter, salt) and what a request asks for give the same chain here.
"""

import sys
from array import array
from collections.abc import Sequence

import msgspec
from xxhash import xxh3_64_intdigest

from extproc import block_extras


class Medium(msgspec.Struct, frozen=True, gc=False):
    """An image, a sound or a film in a prompt. Its tokens may be those of any other; its name tells it from them.

    Attributes:
        identifier: the engine's hash of it, or the name that the request gave it.
        offset: index of its first token in the prompt.
        tokens: how many it takes, one after another.
    """

    identifier: str
    offset: int
    tokens: int


class TokenPrompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt as the engine sees it.

    Attributes:
        ids: its token ids, each below 2**32.
        adapter: name of the LoRA adapter; empty for the base model.
        salt: `cache_salt` of the request; empty without.
        media: its images, sounds and films, by their offsets.
    """

    ids: Sequence[int]
    adapter: str = ""
    salt: str = ""
    media: Sequence[Medium] = ()


def root(adapter: str) -> int:
    """What the first block of a prompt is chained to; different for each LoRA adapter."""
    return xxh3_64_intdigest(b"adapter\0" + adapter.encode("utf-8", "surrogatepass"))


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


def extras_of(prompt: TokenPrompt, block_tokens: int) -> list[bytes]:
    """What beside tokens enters the blocks of a prompt, as `chain` takes it: its media, and in the first one its salt.

    After `generate_block_hash_extra_keys` of vLLM (`v1/core/kv_cache_utils.py`). Where media overlap, as a film and its
    sound may, it leaves out of a block what begins in it while another goes on beyond it; so does this.

    Raises:
        ValueError: `block_tokens` is not positive.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    media, next_one = prompt.media, 0
    last = media[-1].offset + media[-1].tokens if media else 0
    extras = []
    for start in range(0, min(last, len(prompt.ids)), block_tokens):
        end, added = start + block_tokens, b""
        while next_one < len(media) and media[next_one].offset < end:
            one = media[next_one]
            after = one.offset + one.tokens
            if after > start:
                added += block_extras.medium(one.identifier, prompt.adapter)
                if after > end:
                    break
            next_one += 1
        extras.append(added)
    if prompt.salt:
        extras[:1] = [(extras[0] if extras else b"") + block_extras.named(prompt.salt)]
    return extras


def chain_of(prompt: TokenPrompt, block_tokens: int) -> list[int]:
    """Blocks of a request's prompt; see `chain` for the errors."""
    return chain(prompt.ids, block_tokens, root(prompt.adapter), extras_of(prompt, block_tokens))

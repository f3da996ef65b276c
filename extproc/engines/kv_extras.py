"""What beside tokens makes a block what it is (salts, images), as bytes for `state.exact_blocks.chain`.

The same content gives the same bytes whichever version told it, as far as versions tell the same.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

_LONGEST = 4096
"""Bytes of a key that is looked into; identifiers and salts are shorter, and nothing below nests too deeply to read."""
_DECODER = msgspec.msgpack.Decoder()


def salted(salt: str) -> bytes:
    """What a `cache_salt` adds to a prompt's first block; `state.exact_blocks.salted` gives the same to requests."""
    return b"salt\0" + salt.encode("utf-8", "surrogatepass") if salt else b""


def image(identifier: str, offset: int | None = None) -> bytes:
    """What an image, or another medium, adds to a block.

    Args:
        identifier: the engine's hash of it, or the name that the request gave it.
        offset: where it begins, in tokens from the start of the block, negative when it began in an earlier one; None
            when the engine does not tell.
    """
    name = identifier.encode("utf-8", "surrogatepass")
    return b"image\0%d\0%s\0" % (len(name), b"" if offset is None else b"%d" % offset) + name


def opaque(told: bytes) -> bytes:
    """What anything else adds to a block, by the bytes it was told in; unlike all other additions."""
    return b"other\0%d\0" % len(told) + told


def of_block(keys: Sequence[bytes | msgspec.Raw] | None, adapter: str, is_first: bool) -> bytes:
    """Turn vLLM's extra keys of one block into bytes; empty when nothing counts.

    Events name keys without tags, in the order adapter, images, salt, digest of prompt embeddings; their tagged form
    (`("mm", identifier, offset)`) is read too. The adapter is left out: it stands in the event and seeds the chain. A
    bare string is the salt in a prompt's first block, and in others an image's identifier, as vLLM 0.17 tells it; an
    image taken for a salt still tells the block from others. Bare numbers are tokens that speculative decoding looked
    ahead at, which a request cannot know: they are left out.

    Args:
        keys: the block's extra keys, each in msgpack.
        adapter: LoRA adapter of the event; empty for none.
        is_first: whether the block begins a prompt.
    """
    added = []
    for place, told in enumerate(keys or ()):
        key = _read(told)
        if place or not adapter or key != adapter:
            added.append(_of_key(key, bytes(told), is_first))
    return b"".join(added)


def _read(told: bytes | msgspec.Raw) -> Any:
    """The value of a key; an empty map for one that is too long or nested to be any that is known."""
    if len(memoryview(told)) <= _LONGEST:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError):
            return _DECODER.decode(told)
    return {}


def _of_key(key: Any, told: bytes, is_first: bool) -> bytes:
    match key:
        case None | int() | ["lora", str(), str()]:
            added = b""
        case ["cache_salt", str() as salt]:
            added = salted(salt)
        case str() as name:
            added = salted(name) if is_first else image(name)
        case [str() as name, int() as offset] | ["mm", str() as name, int() as offset]:
            added = image(name, offset)
        case (bytes() as digest) | ["prompt_embeds", bytes() as digest]:
            added = b"embeddings\0%d\0" % len(digest) + digest
        case _:
            added = opaque(told)
    return added

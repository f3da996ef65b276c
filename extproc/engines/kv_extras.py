"""What engines tell that entered a block beside its tokens (salts, images), as bytes for `state.exact_blocks.chain`.

The same content gives the same bytes whichever version told it; requests have theirs from `block_extras` too.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec

from extproc.block_extras import medium, named

_LONGEST = 4096
"""Bytes of a key that is looked into; identifiers and salts are shorter, and nothing below nests too deeply to read."""
_DECODER = msgspec.msgpack.Decoder()


def opaque(told: bytes) -> bytes:
    """What anything else adds to a block, by the bytes it was told in; unlike all other additions."""
    return b"other\0%d\0" % len(told) + told


def of_block(keys: Sequence[bytes | msgspec.Raw] | None, adapter: str) -> bytes:
    """Turn vLLM's extra keys of one block into bytes; empty when nothing counts.

    Events name keys without tags, in the order adapter, images, salt, digest of prompt embeddings; their tagged form
    (`("mm", identifier, offset)`) is read too. The adapter is left out: it stands in the event and seeds the chain. A
    bare string is a salt, or an image as vLLM 0.17 to 0.21 tell it. Bare numbers are tokens that speculative decoding
    looked ahead at, which a request cannot know: they are left out.

    Args:
        keys: the block's extra keys, each in msgpack.
        adapter: LoRA adapter of the event; empty for none.
    """
    added = []
    for place, told in enumerate(keys or ()):
        key = _read(told)
        if place or not adapter or key != adapter:
            added.append(_of_key(key, bytes(told), adapter))
    return b"".join(added)


def _read(told: bytes | msgspec.Raw) -> Any:
    """The value of a key; an empty map for one that is too long or nested to be any that is known."""
    if len(memoryview(told)) <= _LONGEST:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError):
            return _DECODER.decode(told)
    return {}


def _of_key(key: Any, told: bytes, adapter: str) -> bytes:
    match key:
        case None | int() | ["lora", str(), str()]:
            added = b""
        case ["cache_salt", str() as name] | (str() as name):
            added = named(name)
        case [str() as name, int()] | ["mm", str() as name, int()]:
            added = medium(name, adapter)
        case (bytes() as digest) | ["prompt_embeds", bytes() as digest]:
            added = b"embeddings\0%d\0" % len(digest) + digest
        case _:
            added = opaque(told)
    return added

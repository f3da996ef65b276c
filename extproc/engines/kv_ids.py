"""Engines' ids of blocks as unsigned 64-bit integers, however they are written."""

import re
from collections.abc import Sequence

from extproc.errors import EngineError

_MASK = (1 << 64) - 1
_HEX = re.compile(r"(?:[0-9a-fA-F]{2}){1,64}")
_MAX_DIGEST_BYTES = 64
_TAIL = 8
"""Bytes of a digest that stand for it: the last ones, big-endian, as vLLM shortens its own."""


def block_id(written: int | bytes | str) -> int:
    """One id: an integer (of SGLang a signed one), the bytes of a digest, or these in hexadecimal.

    Raises:
        EngineError: it is neither, or longer than any engine's.
    """
    match written:
        case int() if -(1 << 63) <= written <= _MASK:
            return written & _MASK
        case bytes() if 0 < len(written) <= _MAX_DIGEST_BYTES:
            return int.from_bytes(written[-_TAIL:], "big")
        case str() if _HEX.fullmatch(written):
            return int(written[-2 * _TAIL :], 16)
    raise EngineError("a KV event has a block hash that is no 64-bit integer, and no digest in bytes or hexadecimal")


def block_ids(written: Sequence[int | bytes | str]) -> tuple[int, ...]:
    """Several ids; see `block_id` for the errors."""
    return tuple([one if type(one) is int and 0 <= one <= _MASK else block_id(one) for one in written])

"""The blocks of several prompts in one piece, each beginning that prompts share once.

Blocks are chained, so that what two prompts share is a beginning. A place says whose beginning it is and how long, and
how many blocks follow. Nothing outside the piece is referred to: who missed another one reads this all the same.
"""

import struct

_PLACE = struct.Struct("<III")
_WORD = 8
_TRIED = 4
"""Earlier prompts with the same first block that are compared with a new one."""


class ChainWriter:
    """Puts prompts into a piece.

    Attributes:
        blocks: the piece.
    """

    def __init__(self) -> None:
        self.blocks = bytearray()
        self._put: list[bytes] = []
        self._alike: dict[bytes, list[int]] = {}

    def put(self, blocks: bytes) -> bytes:
        """Add a prompt's packed blocks; returns their place, empty for none. Bytes that fill no block are left out."""
        blocks = blocks[: len(blocks) // _WORD * _WORD]
        if not blocks:
            return b""
        alike = self._alike.setdefault(blocks[:_WORD], [])
        shared, like = max(((_shared(self._put[each], blocks), each) for each in alike[-_TRIED:]), default=(0, 0))
        alike.append(len(self._put))
        self._put.append(blocks)
        self.blocks += blocks[shared * _WORD :]
        return _PLACE.pack(like, shared, len(blocks) // _WORD - shared)


class ChainReader:
    """Takes prompts out of a piece, in the order in which they were put.

    Args:
        blocks: the piece.
        most_bytes: bytes of all prompts together; places can ask for one beginning again and again.
    """

    def __init__(self, blocks: bytes, most_bytes: int) -> None:
        self._blocks = blocks
        self._left = most_bytes
        self._at = 0
        self._got: list[bytes] = []

    def get(self, place: bytes) -> bytes:
        """The packed blocks at a place that `ChainWriter.put` returned. Raises ValueError for any other."""
        if not place:
            return b""
        if len(place) != _PLACE.size:
            raise ValueError("blocks have no place")
        like, shared, own = _PLACE.unpack(place)
        end = self._at + own * _WORD
        self._left -= (shared + own) * _WORD
        if end > len(self._blocks) or self._left < 0 or (shared and like >= len(self._got)):
            raise ValueError("blocks lie outside their piece")
        beginning = self._got[like][: shared * _WORD] if shared else b""
        if len(beginning) != shared * _WORD:
            raise ValueError("blocks begin like a prompt that is shorter")
        blocks = beginning + self._blocks[self._at : end]
        self._at = end
        self._got.append(blocks)
        return blocks


def _shared(one: bytes, other: bytes) -> int:
    """How many blocks at the beginning are the same: a binary search, since they are chained."""
    low, high = 1, min(len(one), len(other)) // _WORD
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * _WORD] == other[: middle * _WORD]:
            low = middle
        else:
            high = middle - 1
    return low

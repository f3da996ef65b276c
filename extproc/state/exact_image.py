"""An endpoint's exact profile as plain arrays, for who joins."""

from collections.abc import Sequence

import msgspec
import numpy as np

from extproc.state.blocktable import Words
from extproc.state.exact_table import Codes
from extproc.state.image import MOST_BLOCKS

_CODES = 7
_MOST_RANKS = 4096
_MOST_BLOCK_TOKENS = 1 << 20


class ExactRank(msgspec.Struct, frozen=True):
    """What one data-parallel rank held.

    Attributes:
        rank: its number.
        block_tokens: tokens in a block.
        counts: how many of the blocks are in the first tier alone, the second alone, both, the third alone, the first
            and third, the second and third, all three: in this order in `blocks`.
        blocks: the blocks, in no particular order otherwise.
    """

    rank: int
    block_tokens: int
    counts: list[int]
    blocks: Words


class ExactImage(msgspec.Struct, frozen=True):
    """What one endpoint held, as its KV events told.

    Attributes:
        owner: origin of the batches that told it.
        number: of the last of these batches that was taken in; 0 when it is not known.
        ranks: what its ranks held.
    """

    owner: str
    number: int
    ranks: list[ExactRank]


def rank_of(rank: int, block_tokens: int, copied: Sequence[tuple[Words, Codes]]) -> ExactRank:
    """Put the copied blocks of a rank in order, those of tier code 0 left out. Plain numpy: a million take 0.1 s."""
    kept = [(blocks[codes > 0], codes[codes > 0]) for blocks, codes in copied]
    blocks = np.concatenate([each[0] for each in kept] or [np.empty(0, np.uint64)])
    codes = np.concatenate([each[1] for each in kept] or [np.empty(0, np.uint8)])
    counts = np.bincount(codes, minlength=_CODES + 1)[1:].tolist()
    return ExactRank(rank, block_tokens, counts, blocks[np.argsort(codes, kind="stable")])


def is_sound(image: ExactImage) -> bool:
    """Whether an image can be one of a profile: with one cache or more, each of another rank."""
    ranks = {each.rank for each in image.ranks}
    return (
        image.number >= 0
        and 0 < len(ranks) == len(image.ranks)
        and all(
            0 <= each.rank < _MOST_RANKS
            and 0 < each.block_tokens <= _MOST_BLOCK_TOKENS
            and len(each.counts) == _CODES
            and min(each.counts) >= 0
            and sum(each.counts) == len(each.blocks) <= MOST_BLOCKS
            for each in image.ranks
        )
    )

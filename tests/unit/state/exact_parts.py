"""Whole exact profiles, copied and taken over in one go."""

from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from extproc.state.exact import ExactIndex
from extproc.state.exact_image import ExactImage, rank_of

Held = Mapping[int, AbstractSet[int]]
"""By block, the tiers that a rank has it in."""


def image_of(index: ExactIndex, endpoint: str, number: int = 1) -> ExactImage | None:
    """An endpoint's exact profile; None when it is not on."""
    lives = index.lives(endpoint)
    copied = list(index.copy(lives))
    ranks = [
        rank_of(life.rank, life.block_tokens, [(blocks, codes[place]) for blocks, codes in copied])
        for place, life in enumerate(lives)
    ]
    return ExactImage(index.owner(endpoint), number, ranks) if ranks else None


def taken_over(index: ExactIndex, endpoint: str, image: ExactImage) -> None:
    """Let an endpoint hold what an image holds."""
    deque(index.replace(endpoint, image), 0)


def contents(index: ExactIndex, endpoint: str) -> Mapping[int, Held] | None:
    """By rank, what an endpoint holds; None when its profile is not on."""
    image = image_of(index, endpoint)
    if image is None:
        return None
    held: dict[int, Held] = {}
    for rank in image.ranks:
        tiers = [frozenset(t for t in range(3) if code >> t & 1) for code in range(1, 8)]
        codes = [tiers[place] for place, count in enumerate(rank.counts) for _ in range(count)]
        held[rank.rank] = dict(zip(rank.blocks.tolist(), codes, strict=True))
    return held

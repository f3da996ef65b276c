"""The exact index: which endpoint holds which token blocks, in which tiers, as the engines themselves tell.

Nothing is assumed of the order in which engines evict: a match ends at the first block that is missing, whatever is
held behind it. A data-parallel rank has a cache of its own, and is a holder of its own; one whose cache was emptied
goes on as another holder.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from extproc.state.blocktable import Words
from extproc.state.exact_image import ExactImage, ExactRank
from extproc.state.exact_table import Codes, HolderTable
from extproc.state.holder_sets import TIERS
from extproc.state.image import MOST_BLOCKS

ALL_TIERS = -1
_CHUNK = 256
"""Blocks of an image that are taken over in one step: 0.1 ms."""


class Match(msgspec.Struct, frozen=True, gc=False):
    """What an endpoint holds of a prompt's beginning, by its best rank.

    Attributes:
        blocks: leading blocks that it holds.
        block_tokens: tokens in each.
        worth: tokens that these are worth: less than they have where they are not in the GPU.
    """

    blocks: int
    block_tokens: int
    worth: float


class Life(msgspec.Struct, frozen=True, eq=False):
    """A rank's cache from one emptying to the next; equal to no other.

    Attributes:
        endpoint: endpoint id.
        rank: data-parallel rank.
        block_tokens: tokens in a block.
        holder: its number in the table, while the life lasts.
    """

    endpoint: str
    rank: int
    block_tokens: int
    holder: int


class ExactIndex:
    """Exact profiles of the endpoints of one pool. Not shared between threads.

    An endpoint's profile is on while all of its known ranks have one. Blocks are unsigned 64-bit integers, of
    `exact_blocks`.
    """

    def __init__(self) -> None:
        self._table = HolderTable()
        self._ranks: dict[str, dict[int, Life | None]] = {}  # None: its profile ended
        self._owners: dict[str, str] = {}
        self._lives: dict[int, Life] = {}  # by holder
        self._tiered: set[int] = set()  # holders that had blocks elsewhere than in the GPU
        self._of_size: dict[int, int] | None = {}  # by block size, holders of endpoints that are on; None when unknown

    def __repr__(self) -> str:
        return f"<ExactIndex {', '.join(f'{name}: {self.held(name)}' for name in self._ranks)}>"

    def __len__(self) -> int:
        """Number of (block, endpoint, rank) entries."""
        return len(self._table)

    @property
    def table(self) -> HolderTable:
        """The entries, for measuring."""
        return self._table

    @property
    def block_sizes(self) -> Collection[int]:
        """Tokens in a block of the endpoints that are on; empty when none is."""
        return self._sizes().keys()

    def is_on(self, endpoint: str) -> bool:
        """Whether the endpoint's exact profile is what counts."""
        ranks = self._ranks.get(endpoint, {})
        return len(ranks) > 0 and None not in ranks.values()

    def lives(self, endpoint: str) -> Sequence[Life]:
        """The lives that its ranks' caches are in; empty when it is not on."""
        return [each for each in self._ranks[endpoint].values() if each] if self.is_on(endpoint) else ()

    def owner(self, endpoint: str) -> str:
        """Who tells of the endpoint: the origin of its batches."""
        return self._owners.get(endpoint, "")

    def held(self, endpoint: str) -> int:
        """Blocks that the endpoint holds, those of all ranks added up."""
        return sum(self._table.held(each.holder) for each in self._ranks.get(endpoint, {}).values() if each)

    def is_tiered(self, endpoint: str) -> bool:
        """Whether the endpoint has told of blocks in host memory or on disk, in this life of its caches."""
        return bool(self._tiered) and any(each.holder in self._tiered for each in self.lives(endpoint))

    def begin(self, endpoint: str, rank: int, block_tokens: int, owner: str = "") -> None:
        """A rank's profile begins, empty. Where another than before tells that, those of its other ranks end."""
        if self._owners.get(endpoint, owner) != owner:
            self.suspend(endpoint)
        self._owners[endpoint] = owner
        self._leave(self._ranks.setdefault(endpoint, {}).get(rank))
        self._ranks[endpoint][rank] = self._enter(endpoint, rank, block_tokens)
        self._of_size = None

    def end(self, endpoint: str, rank: int) -> None:
        """A rank's profile ends, and with it that of the endpoint, until it begins again."""
        ranks = self._ranks.setdefault(endpoint, {})
        self._leave(ranks.get(rank))
        ranks[rank] = None
        self._of_size = None

    def suspend(self, endpoint: str) -> None:
        """The profiles of all its ranks end: something may have been missed of them."""
        for rank in tuple(self._ranks.get(endpoint, ())):
            self.end(endpoint, rank)

    def missed(self, owner: str) -> None:
        """Something that an owner told was missed: the profiles of which it tells end."""
        for endpoint in [endpoint for endpoint, each in self._owners.items() if each == owner]:
            self.suspend(endpoint)

    def clear(self, endpoint: str) -> None:
        """The endpoint restarted, or its cache was emptied: what it tells from now on counts.

        Ranks whose profiles had ended are forgotten: it may have fewer of them now.
        """
        ranks = self._ranks.get(endpoint, {})
        for rank, life in tuple(ranks.items()):
            if life:
                self.begin(endpoint, rank, life.block_tokens, self.owner(endpoint))
            else:
                del ranks[rank]
        self._of_size = None

    def drop(self, endpoint: str) -> None:
        """The endpoint left."""
        for life in self._ranks.pop(endpoint, {}).values():
            self._leave(life)
        self._owners.pop(endpoint, None)
        self._of_size = None

    def stored(self, endpoint: str, rank: int, tier: int, blocks: Sequence[int], owner: str = "") -> None:
        """A rank has these blocks in a tier, whatever it has in others.

        Passed over while its profile has ended. When somebody else tells than who began it, something was missed, and
        it ends. What a rank has beyond `MOST_BLOCKS` is left out.
        """
        life = self._told(endpoint, rank, owner)
        if life:
            self._add(life, tier, blocks)

    def evicted(self, endpoint: str, rank: int, tier: int, blocks: Iterable[int], owner: str = "") -> None:
        """A rank has these blocks no longer in a tier, or in none (`ALL_TIERS`); see `stored`."""
        life = self._told(endpoint, rank, owner)
        if life:
            self._table.remove(life.holder, range(TIERS) if tier == ALL_TIERS else (tier,), blocks)

    def match(
        self, chains: Mapping[int, Sequence[int]], prompt_tokens: int, far: tuple[float, float] = (1.0, 1.0)
    ) -> Mapping[str, Match]:
        """What each endpoint that is on holds of a prompt; those whose block size has no chain are absent.

        An engine reuses whole blocks and computes the last token always: floor((prompt - 1) / block) of them at most.

        Args:
            chains: the prompt's blocks, by block size.
            prompt_tokens: its length.
            far: what a block in host memory, and one on disk, is worth of one in the GPU; the best tier counts.
        """
        found: dict[str, Match] = {}
        for size, holders in self._sizes().items():
            if size not in chains:
                continue
            most = max(0, prompt_tokens - 1) // size
            blocks = chains[size] if len(chains[size]) <= most else chains[size][:most]
            for holder, depth, lack in self._table.walk(blocks, holders, far):
                endpoint = self._lives[holder].endpoint
                match = Match(depth, size, (depth - lack) * size)
                other = found.get(endpoint)
                if other is None or (match.worth, match.blocks) > (other.worth, other.blocks):
                    found[endpoint] = match
        return found

    def depth(self, endpoint: str, blocks: Sequence[int]) -> int:
        """How many leading blocks the endpoint's best rank holds, in whatever tier; 0 when it is not on."""
        holders = sum(1 << each.holder for each in self.lives(endpoint))
        return max((depth for _, depth, _ in self._table.walk(blocks, holders, (1.0, 1.0))), default=0)

    def tidy(self) -> None:
        """Clean up after lives that are over, for 0.1 ms. To be called several times a second."""
        self._table.tidy()

    def copy(self, lives: Sequence[Life]) -> Iterator[tuple[Words, Sequence[Codes]]]:
        """See `HolderTable.copy`. What comes after one of these lives is over is of no use."""
        return self._table.copy([each.holder for each in lives])

    def replace(self, endpoint: str, image: ExactImage) -> Iterator[None]:
        """Let an endpoint hold what an image holds, in steps of some 0.1 ms; until the last it holds what it held."""
        entered: list[Life] = []
        try:
            for rank in image.ranks:
                entered.append(self._enter(endpoint, rank.rank, rank.block_tokens))
                yield from self._taken_over(entered[-1], rank)
            self.drop(endpoint)
            self._ranks[endpoint] = {each.rank: each for each in entered}
            self._owners[endpoint] = image.owner
            entered = []
        finally:
            for life in entered:
                self._leave(life)
            self._of_size = None

    def _taken_over(self, life: Life, rank: ExactRank) -> Iterator[None]:
        end = 0
        for code, count in enumerate(rank.counts, 1):
            blocks = rank.blocks[end : end + count]
            end += count
            for at in range(0, count, _CHUNK):
                for tier in range(TIERS):
                    if code >> tier & 1:
                        self._add(life, tier, blocks[at : at + _CHUNK].tolist())
                yield

    def _add(self, life: Life, tier: int, blocks: Sequence[int]) -> None:
        if tier:
            self._tiered.add(life.holder)
        left = MOST_BLOCKS - self._table.held(life.holder)
        self._table.add(life.holder, tier, blocks if len(blocks) <= left else blocks[:left])

    def _told(self, endpoint: str, rank: int, owner: str) -> Life | None:
        if self._owners.get(endpoint, owner) != owner:
            self.suspend(endpoint)
        return self._ranks.get(endpoint, {}).get(rank)

    def _enter(self, endpoint: str, rank: int, block_tokens: int) -> Life:
        life = Life(endpoint, rank, block_tokens, self._table.enter())
        self._lives[life.holder] = life
        return life

    def _leave(self, life: Life | None) -> None:
        if life is not None:
            del self._lives[life.holder]
            self._tiered.discard(life.holder)
            self._table.leave(life.holder)

    def _sizes(self) -> Mapping[int, int]:
        """Made when it is asked for: a keeper that tells of a thousand endpoints anew changes it a thousand times."""
        sizes = self._of_size
        if sizes is None:
            sizes = self._of_size = {}
            for endpoint in self._ranks:
                for life in self.lives(endpoint):
                    sizes[life.block_tokens] = sizes.get(life.block_tokens, 0) | 1 << life.holder
        return sizes

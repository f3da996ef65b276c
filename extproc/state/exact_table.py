"""Which blocks which holders have, in which tiers: one table for all holders of a pool.

The table has for each block the id of the set of its holders (`holder_sets`), so that a prompt is matched against all
of them in one pass over its blocks. Holders are numbers. That one is gone is noted at once and the sets are cleaned of
it later; its number is given to another one then. Entries that nobody holds any more are left out when their part of
the table is built again.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from extproc.state.blocktable import BlockTable, Words
from extproc.state.holder_sets import NOBODY, TIERS, HolderSets, Members

Codes = npt.NDArray[np.uint8]
"""In which tiers blocks are: a bit for each."""


class HolderTable:
    """Blocks with their holders. Blocks are unsigned 64-bit integers, tiers 0, 1 and 2."""

    def __init__(self) -> None:
        self._sets = HolderSets()
        self._table = _Table(self._sets)
        self._held: dict[int, int] = {}
        self._taken = 0  # numbers in use, and those that the sets are not cleaned of yet, as a mask
        self._gone = 0  # the latter
        self._sweep: Iterator[None] | None = None

    def __len__(self) -> int:
        """Number of (block, holder) entries."""
        return sum(self._held.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the table, without the sets."""
        return self._table.nbytes

    @property
    def sets(self) -> int:
        """Number of sets, some 250 bytes each."""
        return len(self._sets)

    def held(self, holder: int) -> int:
        """How many blocks a holder has, in whatever tiers."""
        return self._held[holder]

    def enter(self) -> int:
        """A holder that has nothing: the lowest number that is free."""
        holder = (~self._taken & (self._taken + 1)).bit_length() - 1
        self._taken |= 1 << holder
        self._held[holder] = 0
        return holder

    def leave(self, holder: int) -> None:
        """A holder is gone."""
        if self._held.pop(holder):
            self._gone |= 1 << holder
        else:
            self._taken &= ~(1 << holder)

    def add(self, holder: int, tier: int, blocks: Sequence[int]) -> None:
        """A holder has these blocks in a tier, whatever it has in others."""
        bit, sets = 1 << holder, self._sets
        alone = sets.of(_with(NOBODY, tier, bit))
        at = 0
        unions: dict[int, int] = {}
        for old, count in self._table.put(blocks, alone):
            first, at = at, at + count
            if old == alone:
                continue
            before = self._clean(sets.members[old])
            if not _among(before, bit):
                self._held[holder] += count
            union = unions.get(old)
            if union is None:
                union = unions[old] = sets.of(_with(before, tier, bit))
            if union != alone:
                self._table.put(blocks[first:at], union)
            sets.count(union, count)
            sets.count(old, -count)
        sets.count(alone, 0)

    def remove(self, holder: int, tiers: Sequence[int], blocks: Iterable[int]) -> None:
        """A holder has these blocks no longer in these tiers."""
        bit = 1 << holder
        cut = [~bit if tier in tiers else -1 for tier in range(TIERS)]
        table, sets = self._table, self._sets
        changes: dict[int, int] = {}  # what becomes of each set
        counts: dict[int, int] = {}
        for block in blocks:
            old = table.get(block)
            if not old:
                continue
            new = changes.get(old)
            if new is None:
                gpu, cpu, disk = sets.members[old]
                new = changes[old] = sets.of(self._clean((gpu & cut[0], cpu & cut[1], disk & cut[2])))
            if new != old:
                table.change(block, new)
                counts[old] = counts.get(old, 0) + 1
        for old, count in counts.items():
            new = changes[old]
            if _among(sets.members[old], bit) and not _among(sets.members[new], bit):
                self._held[holder] -= count
            sets.count(new, count)
        for old, count in counts.items():
            sets.count(old, -count)

    def walk(self, blocks: Sequence[int], alive: int, far: tuple[float, float]) -> Iterator[tuple[int, int, float]]:
        """Match a prompt against holders: for each, its number, the leading blocks it has, and what they lack in worth.

        A block that is worth three quarters of one in the GPU lacks a quarter. Its best tier counts.

        Args:
            blocks: the prompt.
            alive: the holders, as a mask.
            far: what a block in the second and in the third tier is worth of one in the first.
        """
        ended: list[tuple[int, int]] = []
        on_cpu, on_disk = [(0, 0)], [(0, 0)]  # who has no better from which place on
        for place, number in self._table.changes(blocks):
            gpu, cpu, disk = self._sets.members[number]
            left = alive & (gpu | cpu | disk)
            if left != alive:
                ended.append((alive & ~left, place))
                alive = left
                if not alive:
                    break
            lower = alive & ~gpu
            if lower & cpu != on_cpu[-1][0]:
                on_cpu.append((lower & cpu, place))
            if lower & ~cpu != on_disk[-1][0]:
                on_disk.append((lower & ~cpu, place))
        else:
            place = len(blocks)
            ended.append((alive, place))
        counted = [
            (1.0 - worth, _counts([*stretches, (0, place)]))
            for worth, stretches in zip(far, (on_cpu, on_disk), strict=True)
            if len(stretches) > 1
        ]
        for mask, depth in ended:
            for holder in _bits(mask):
                lack = sum([less * counts[holder] for less, counts in counted if holder < len(counts)])
                yield holder, depth, lack

    def tidy(self) -> None:
        """Clean some sets of the holders that are gone: 0.1 ms. To be called several times a second."""
        if self._sweep is None:
            if not self._gone:
                return
            self._sweep = self._swept(self._gone)
        for _ in self._sweep:
            return
        self._sweep = None

    def copy(self, holders: Sequence[int]) -> Iterator[tuple[Words, Sequence[Codes]]]:
        """What these holders have, in steps of some 0.1 ms: blocks, and for each holder the tiers it has them in.

        The table may change between two steps: see `BlockTable.entries`.
        """
        self._sets.readers += 1
        try:
            for blocks, values in self._table.entries():
                numbers, places = np.unique(values, return_inverse=True)
                members = [self._sets.members[number] for number in numbers.tolist()]
                codes = [np.array([_code(each, who) for each in members], np.uint8)[places] for who in holders]
                kept = np.any(codes, axis=0)
                yield blocks[kept], [each[kept] for each in codes]
        finally:
            self._sets.readers -= 1

    def _swept(self, gone: int) -> Iterator[None]:
        yield from self._sets.without(gone)
        self._gone &= ~gone
        self._taken &= ~gone

    def _clean(self, members: Members) -> Members:
        gone = self._gone
        return (members[0] & ~gone, members[1] & ~gone, members[2] & ~gone) if gone else members


class _Table(BlockTable):
    """Blocks with the ids of their sets."""

    def __init__(self, sets: HolderSets) -> None:
        super().__init__()
        self._sets = sets

    def _living(self, blocks: Words, values: Words) -> npt.NDArray[np.bool_]:  # noqa: ARG002 - as it is overridden
        living = self._sets.alive[values.astype(np.int64)]
        dead, counts = np.unique(values[~living], return_counts=True)
        for number, count in zip(dead.tolist(), counts.tolist(), strict=True):
            self._sets.count(number, -count)
        return living


def _with(members: Members, tier: int, bit: int) -> Members:
    gpu, cpu, disk = members
    return (gpu | bit, cpu, disk) if tier == 0 else (gpu, cpu | bit, disk) if tier == 1 else (gpu, cpu, disk | bit)


def _code(members: Members, holder: int) -> int:
    return members[0] >> holder & 1 | (members[1] >> holder & 1) << 1 | (members[2] >> holder & 1) << 2


def _among(members: Members, bit: int) -> bool:
    return bool((members[0] | members[1] | members[2]) & bit)


def _counts(stretches: Sequence[tuple[int, int]]) -> Sequence[int]:
    """Of holders that were in a mask from one place to the next, in how many places each was."""
    masks = [mask for mask, _ in stretches[:-1]]
    places = np.array([place for _, place in stretches], np.int64)
    width = (max(masks).bit_length() + 7) // 8
    data = np.frombuffer(b"".join([mask.to_bytes(width, "little") for mask in masks]), np.uint8).reshape(-1, width)
    counts: list[int] = ((places[1:] - places[:-1]) @ np.unpackbits(data, axis=1, bitorder="little")).tolist()
    return counts


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low

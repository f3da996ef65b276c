"""What one rank of an engine has cached, by its KV events: the engine's ids of blocks turned into our own hashes.

Rules:
- The engine's ids are opaque. A block's own hash (`state.exact_blocks`) goes on from that of the block before it, which
  is looked up by the engine's id; only a block that begins a prompt needs no parent.
- A chain whose parent is unknown cannot be placed: it is left out and counted. That happens when the stream of events
  is not known from its start, because what was stored before is missing. Nothing better can be had by asking again:
  events that are lost show in their numbers, and the engine tells of a block only once.
- vLLM keeps a copy of a block for each request that computed it at the same time, and tells of each copy that it stored
  and removed (`v1/core/block_pool.py`): the block is gone with its last copy. Copies are counted for it; without that,
  a shared beginning that two requests brought at once would be lost with the first copy, and every chain on it after.
  A request may ask it to tell of reused blocks too (`kv_cache_report_mode`), which looks the same: more copies than its
  cache has room for show that, and they are not counted any more in that life. Other engines have one copy of a block.
- Blocks of fewer tokens than the profile's size end a prompt, and no longer one can go on from them: they are left out.
  A larger block shows that the size was wrong, and so do several smaller ones in a row where nothing but the engine's
  metrics spoke for a larger one; the profile begins anew with theirs.
- What is known is complete when the stream is known from its start, or since the cache was emptied. A stream joined
  later is called complete once as many blocks were stored in a row as the engine's cache has, every one of them placed:
  by then the least recently used blocks, of which nobody told us, have made room, and no chain went on from an unknown
  one. Up to then the profile knows too little, which costs hits and promises none that are not there.
- Beyond `most` blocks nothing is taken in. Far fewer show that removals are not told: no GPU holds `_BEYOND` times the
  blocks that its engine says it has room for. A few times it may: models whose layers share the room in groups.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from extproc.engines.kv_values import Cleared, KvEvent, Moved, Removed, Stored, Tier
from extproc.state.blocktable import BlockTable
from extproc.state.exact_blocks import chain, root

MOST_BLOCKS: Final = 2_000_000
"""Blocks of one rank, all tiers together: 32 million tokens in blocks of 16, in 50 to 100 MB."""
_BEYOND: Final = 8
_AT_A_TIME: Final = 512
"""Blocks between two steps, which take about 1 ms."""


class Change(msgspec.Struct, frozen=True, gc=False):
    """Blocks that a tier has now, or has no longer.

    Attributes:
        tier: which one.
        held: whether it has them.
        blocks: our hashes.
    """

    tier: Tier
    held: bool
    blocks: list[int]


class Emptied(msgspec.Struct, frozen=True, gc=False):
    """Nothing is cached any more."""


class LeftOut(msgspec.Struct, gc=False):
    """Blocks that were not taken in, by the reason.

    Attributes:
        unplaced: the block before them is unknown.
        partial: fewer tokens than a block has.
        malformed: their number of tokens does not fit, or a token id is none.
        full: there were too many.
        unknown: removed or moved, but never seen.
    """

    unplaced: int = 0
    partial: int = 0
    malformed: int = 0
    full: int = 0
    unknown: int = 0


class Chain:
    """Blocks of one rank by the engine's ids: a table a tier, 24 to 48 bytes a block.

    Attributes:
        block_tokens: tokens in one block; 0 when not known yet.
        count: blocks held, those of two tiers twice.
        left_out: what was counted.
    """

    def __init__(self, left_out: LeftOut | None = None, most: int = MOST_BLOCKS) -> None:
        """Hold nothing.

        Args:
            left_out: counted here; several chains may share it.
            most: highest number of blocks taken in.
        """
        self.block_tokens = 0
        self.count = 0
        self._gpu = 0
        self.left_out = left_out or LeftOut()
        self._most = most
        self._tables = {tier: BlockTable() for tier in Tier}
        self._complete = False
        self._placed = 0
        self._size_seen = False
        self._counts_copies = False
        self._copies: dict[int, int] = {}  # of blocks on the GPU, beside the first one
        self._further = 0  # the sum of these

    def begin(self, *, from_start: bool, block_tokens: int = 0, copies: bool = False) -> None:
        """Forget everything.

        Args:
            from_start: nothing is cached that the coming events do not tell of.
            block_tokens: size of a block as the engine's metrics have it; 0 to learn it from the events.
            copies: the engine tells of each copy of a block.
        """
        self._counts_copies = copies
        self.block_tokens = block_tokens
        self._size_seen = False
        self._empty()
        self._complete = from_start

    def is_complete(self, cache_blocks: int) -> bool:
        """Whether all that is cached is known, but for blocks that never can be; see the rules of this module.

        Args:
            cache_blocks: blocks in the engine's GPU cache; 0 when unknown.
        """
        self._complete = self._complete or 0 < cache_blocks <= self._placed
        return self._complete

    def tells_too_much(self, cache_blocks: int) -> bool:
        """Whether more copies were stored than the engine's cache can have: it tells of reused blocks too.

        Args:
            cache_blocks: as in `is_complete`.
        """
        return self._further > 0 and 0 < cache_blocks < self._further + self._gpu

    def lacks_removals(self, cache_blocks: int) -> bool:
        """Whether more blocks are held than can be.

        Args:
            cache_blocks: as in `is_complete`.
        """
        return 0 < _BEYOND * cache_blocks < self._gpu

    def apply(self, event: KvEvent) -> Iterator[Change | Emptied]:
        """Take in one event, in steps of about 1 ms; what it changed is to be told before the next step."""
        match event:
            case Stored():
                yield from self._store(event)
            case Removed():
                for start in range(0, len(event.hashes), _AT_A_TIME):
                    yield from self._removed(event, event.hashes[start : start + _AT_A_TIME])
            case Moved():
                yield from self._move(event)
            case Cleared():
                self._empty()
                self._complete = True
                yield Emptied()

    def held(self) -> Iterator[Change]:
        """All that is held, some two thousand blocks at a time, as it is when each step is taken.

        The chain may change between two steps. A block that is stored meanwhile may be missing.
        """
        for tier, table in self._tables.items():
            for ids, values in table.entries():
                blocks = [
                    value for key, value in zip(ids.tolist(), values.tolist(), strict=True) if table.get(key) == value
                ]
                if blocks:
                    yield Change(tier, True, blocks)

    def _empty(self) -> None:
        for table in self._tables.values():
            table.clear()
        self._copies.clear()
        self.count = self._placed = self._further = self._gpu = 0

    def _store(self, event: Stored) -> Iterator[Change | Emptied]:
        count = len(event.hashes)
        if event.block_tokens < self.block_tokens and (self._size_seen or count < 2):
            self.left_out.partial += count
            return
        if event.block_tokens != self.block_tokens:
            from_start = self._complete and not self.count
            self.begin(from_start=from_start, block_tokens=event.block_tokens, copies=self._counts_copies)
            yield Emptied()
        self._size_seen = True
        parent = root(event.adapter) if event.parent is None else self._find(event.parent)
        if event.parent is not None and not parent:
            self.left_out.unplaced += count
            self._placed = 0
            return
        if self.count + count > self._most:
            self.left_out.full += count
            return
        for start in range(0, count, _AT_A_TIME):
            ids = event.hashes[start : start + _AT_A_TIME]
            blocks = self._hash(event, start, len(ids), parent)
            if len(blocks) < len(ids):
                self.left_out.malformed += count - start
                return
            parent = blocks[-1]
            self._placed += len(ids)
            yield from self._put(event.tier, ids, blocks)

    def _hash(self, event: Stored, start: int, count: int, parent: int) -> list[int]:
        size = event.block_tokens
        try:
            tokens = event.tokens[start * size : (start + count) * size]
            return chain(tokens, size, parent, event.extras[start : start + count])
        except (ValueError, OverflowError):
            return []

    def _put(self, tier: Tier, ids: Sequence[int], blocks: Sequence[int]) -> Iterator[Change]:
        table, new, replaced = self._tables[tier], list[int](), list[int]()
        for key, block in zip(ids, blocks, strict=True):
            ((before, _),) = table.put((key,), block)
            if before != block:
                new.append(block)
                if before:
                    replaced.append(before)
            elif self._counts_copies and tier is Tier.GPU:
                self._copies[key] = self._copies.get(key, 0) + 1
                self._further += 1
        self._counted(tier, len(new) - len(replaced))
        if replaced:
            yield Change(tier, False, replaced)
        if new:
            yield Change(tier, True, new)

    def _removed(self, event: Removed, ids: Sequence[int]) -> Iterator[Change]:
        unknown = sum(1 for key in ids if not self._find(key))
        self.left_out.unknown += unknown
        for tier in Tier if event.tier is None else (event.tier,):
            yield from self._remove(tier, ids)
        if unknown == len(ids) == _AT_A_TIME:
            yield Change(Tier.GPU, False, [])  # nothing changed, but it took a step's time

    def _remove(self, tier: Tier, ids: Sequence[int]) -> Iterator[Change]:
        table, gone = self._tables[tier], list[int]()
        for key in ids:
            block = table.get(key)
            if not block:
                continue
            if self._copies and tier is Tier.GPU and key in self._copies:
                self._further -= 1
                self._copies[key] -= 1
                if not self._copies[key]:
                    del self._copies[key]
                continue
            table.change(key, 0)
            gone.append(block)
        self._counted(tier, -len(gone))
        if gone:
            yield Change(tier, False, gone)

    def _move(self, event: Moved) -> Iterator[Change]:
        block = self._find(event.hash)
        if not block:
            self.left_out.unknown += 1
            return
        yield from self._put(event.tier, (event.hash,), (block,))
        for tier in Tier:
            if tier is not event.tier:
                yield from self._remove(tier, (event.hash,))

    def _counted(self, tier: Tier, more: int) -> None:
        self.count += more
        if tier is Tier.GPU:
            self._gpu += more

    def _find(self, key: int) -> int:
        """Our hash of a block by the engine's id, 0 for none; most are on the GPU."""
        for table in self._tables.values():
            if block := table.get(key):
                return block
        return 0

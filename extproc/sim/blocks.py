"""The KV cache as vLLM keeps it: a pool of numbered blocks, a reference count each, an LRU list of free ones."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from extproc.sim.watches import PoolWatch


class BlockPool:
    """Blocks of one engine; no tokens are stored, only which hash each block holds.

    The rules are those of vLLM 0.33's block pool:

    - Block 0 is reserved and never handed out.
    - A block whose count falls to 0 is free. If it carries a hash it joins the tail of the free list and can
      still be found; if not, it joins the head, to be used next.
    - New blocks come from the head. A hash a taken block still carried is forgotten: that is the eviction.
    - Two blocks may carry one hash (two sequences computed the same tokens at once); the older is found.

    A replay asks for some 30 blocks a request, so the loops below keep to local names and one dictionary access a
    block: the dictionary of later holders is empty unless hashes are held twice.

    Attributes:
        usable: blocks that can be handed out.
        watch: who hears of evictions and resets, if anybody does.
        registered: hears under which hashes blocks become findable, if anybody does.
    """

    def __init__(self, blocks: int, *, caching: bool = True) -> None:
        self.usable = blocks - 1
        self.watch: PoolWatch | None = None
        self.registered: Callable[[Sequence[int]], None] | None = None
        self._caching = caching
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._references = [0] * blocks
        self._hash_of: list[int | None] = [None] * blocks
        self._holder: dict[int, int] = {}
        self._later_holders: dict[int, list[int]] = {}

    @property
    def free(self) -> int:
        """Blocks no sequence holds, cached ones included."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Distinct hashes that can be found."""
        return len(self._holder)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that sequences hold, 0 to 1."""
        return 1.0 - len(self._free) / self.usable

    def free_order(self) -> list[int]:
        """Return the free blocks in the order in which they will be taken."""
        return list(self._free)

    def references(self, block: int) -> int:
        """Return how many sequences hold `block`."""
        return self._references[block]

    def lookup(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Return the blocks of the longest cached prefix of `hashes`, at most `limit` of them."""
        found: list[int] = []
        for block in map(self._holder.get, islice(hashes, max(limit, 0))):
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` are free at present; touching those uses up free blocks."""
        references = self._references
        return [references[block] for block in blocks].count(0)

    def touch(self, blocks: Iterable[int]) -> None:
        """Take one more reference on each of `blocks` (found by `lookup`)."""
        references, free = self._references, self._free
        for block in blocks:
            count = references[block]
            if not count:
                del free[block]
            references[block] = count + 1

    def take(self, count: int) -> list[int]:
        """Take `count` blocks from the head of the free list, evicting what they held.

        Raises:
            RuntimeError: there are fewer free blocks; callers check first.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks were asked for and {len(self._free)} are free")
        references, hashes, free = self._references, self._hash_of, self._free
        taken = list(islice(free, count))
        for block in taken:
            del free[block]
            references[block] = 1
            if hashes[block] is not None:
                self._forget(block)
        return taken

    def register(self, block: int, block_hash: int) -> None:
        """Make `block`, which a sequence holds and has filled, findable under `block_hash`."""
        self.register_all((block,), (block_hash,))

    def register_all(self, blocks: Iterable[int], hashes: Sequence[int]) -> None:
        """Make each of `blocks`, which a sequence holds and has filled, findable under its hash, in that order."""
        if not self._caching:
            return
        holder, hash_of = self._holder, self._hash_of
        for block, block_hash in zip(blocks, hashes, strict=True):
            hash_of[block] = block_hash
            if holder.setdefault(block_hash, block) != block:
                self._later_holders.setdefault(block_hash, []).append(block)
        if self.registered is not None:
            self.registered(hashes)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back a sequence's blocks, passed in the order of its tokens.

        They are freed from the last to the first, so that the end of a prefix is evicted before its start.
        """
        hashes, references, free = self._hash_of, self._references, self._free
        unhashed: list[int] = []
        for block in reversed(blocks):
            count = references[block] - 1
            references[block] = count
            if count:
                continue
            if hashes[block] is None:
                unhashed.append(block)
            else:
                free[block] = None
        for block in reversed(unhashed):
            free[block] = None
            free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget every hash; False, and nothing done, while any block is held."""
        if len(self._free) != self.usable:
            return False
        self._hash_of = [None] * len(self._hash_of)
        self._holder.clear()
        self._later_holders.clear()
        if self.watch is not None:
            self.watch.cleared()
        return True

    def _forget(self, block: int) -> None:
        """Take its hash from `block`; the next oldest block with that hash is found from then on."""
        block_hash = self._hash_of[block]
        if block_hash is None:
            return
        self._hash_of[block] = None
        if self.watch is not None:
            self.watch.removed(block_hash)
        later = self._later_holders.get(block_hash)
        if later is None:
            del self._holder[block_hash]
            return
        if self._holder[block_hash] == block:
            self._holder[block_hash] = later.pop(0)
        else:
            later.remove(block)
        if not later:
            del self._later_holders[block_hash]

"""The block pool: vLLM's free list, reference counts and eviction."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.sim.blocks import BlockPool


def filled(pool: BlockPool, hashes: Sequence[int]) -> list[int]:
    """Take a block for each hash and make it findable."""
    blocks = pool.take(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.register(block, block_hash)
    return blocks


def test_a_sequence_is_evicted_from_its_end() -> None:
    """Freed cached blocks join the tail of the LRU list in reverse order, after the blocks never used."""
    pool = BlockPool(6)
    blocks = filled(pool, [11, 12, 13])
    assert blocks == [1, 2, 3]
    pool.release(blocks)
    assert pool.free_order() == [4, 5, 3, 2, 1]
    pool.take(3)
    assert pool.lookup([11, 12, 13], 3) == [1, 2]


def test_a_block_without_a_hash_is_used_next() -> None:
    """Blocks that were never filled go to the head: taking them again evicts nothing."""
    pool = BlockPool(6)
    cached = filled(pool, [11])
    partial = pool.take(2)
    pool.release(cached + partial)
    assert pool.free_order() == [3, 2, 4, 5, 1]


def test_a_found_block_leaves_the_free_list_and_its_age_starts_anew() -> None:
    """Touching takes a block out of the free list wherever it is; releasing puts it at the tail."""
    pool = BlockPool(4)
    first, second = filled(pool, [11]), filled(pool, [21])
    pool.release(first)
    pool.release(second)
    found = pool.lookup([11], 1)
    pool.touch(found)
    assert pool.free_order() == [3, 2]
    pool.release(found)
    assert pool.free_order() == [3, 2, 1]


def test_a_shared_block_is_free_only_when_its_last_sequence_ends() -> None:
    """A reference is counted for each sequence."""
    pool = BlockPool(3)
    blocks = filled(pool, [11])
    pool.touch(blocks)
    pool.release(blocks)
    assert pool.references(1) == 1
    assert pool.free == 1
    pool.release(blocks)
    assert pool.free == 2


def test_two_blocks_may_hold_one_hash() -> None:
    """Of two blocks with the same content the older is found, and after its eviction the other."""
    pool = BlockPool(3)
    one, two = filled(pool, [11]), filled(pool, [11])
    assert pool.lookup([11], 1) == one
    pool.release(one)
    pool.take(1)
    assert pool.lookup([11], 1) == two


def test_lookup_stops_at_the_first_gap() -> None:
    """Only a prefix counts: what is cached behind a missing block is not found."""
    pool = BlockPool(5)
    filled(pool, [11, 13])
    assert pool.lookup([11, 12, 13], 3) == [1]


def test_more_blocks_than_are_free_is_an_error() -> None:
    """The scheduler checks first; a pool that lent a block twice would corrupt every count."""
    with pytest.raises(RuntimeError, match="2 are free"):
        BlockPool(3).take(3)


def test_reset_is_refused_while_a_block_is_held() -> None:
    """As vLLM's reset_prefix_cache."""
    pool = BlockPool(3)
    blocks = filled(pool, [11])
    assert not pool.reset()
    pool.release(blocks)
    assert pool.reset()
    assert pool.lookup([11], 1) == []


def test_without_caching_nothing_is_found() -> None:
    """--no-prefix-caching."""
    pool = BlockPool(4, caching=False)
    pool.release(filled(pool, [11]))
    assert pool.lookup([11], 1) == []


class NaivePool:
    """The same rules on plain lists, slow and obvious."""

    def __init__(self, blocks: int) -> None:
        self.free = list(range(1, blocks))
        self.count = [0] * blocks
        self.hash_of: dict[int, int] = {}
        self.age: list[int] = []  # blocks in the order in which they got their hash

    def find(self, block_hash: int) -> int | None:
        """The oldest block with that hash."""
        return next((block for block in self.age if self.hash_of[block] == block_hash), None)

    def take(self) -> int:
        """Take the head of the free list."""
        block = self.free.pop(0)
        if block in self.hash_of:
            del self.hash_of[block]
            self.age.remove(block)
        self.count[block] = 1
        return block

    def register(self, block: int, block_hash: int) -> None:
        """Give a block its hash."""
        self.hash_of[block] = block_hash
        self.age.append(block)

    def touch(self, block: int) -> None:
        """Take a reference."""
        if not self.count[block]:
            self.free.remove(block)
        self.count[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Give references back, from the last block to the first."""
        idle = []
        for block in reversed(blocks):
            self.count[block] -= 1
            if not self.count[block]:
                idle.append(block)
        self.free = [b for b in idle if b not in self.hash_of] + self.free + [b for b in idle if b in self.hash_of]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.booleans()), max_size=60))
def test_the_pool_does_what_a_naive_one_does(operations: list[tuple[int, int, bool]]) -> None:
    """Any mixture of admissions (with prefix hits, the last block partial or not) and releases: same free order."""
    pool, naive = BlockPool(9), NaivePool(9)
    held: list[list[int]] = []
    for family, length, full in operations:
        hashes = [10 * family + n for n in range(length)]
        hits = pool.lookup(hashes, length)
        expected = []
        for block_hash in hashes:
            found = naive.find(block_hash)
            if found is None:
                break
            expected.append(found)
        assert hits == expected
        if length - len(hits) + pool.idle(hits) > pool.free:
            if held:
                gone = held.pop(0)
                pool.release(gone)
                naive.release(gone)
            continue
        pool.touch(hits)
        for block in hits:
            naive.touch(block)
        new = pool.take(length - len(hits))
        assert new == [naive.take() for _ in range(length - len(hits))]
        for offset, block in enumerate(new if full else new[:-1]):
            pool.register(block, hashes[len(hits) + offset])
            naive.register(block, hashes[len(hits) + offset])
        held.append(hits + new)
        assert pool.free_order() == naive.free
        assert [pool.references(block) for block in range(9)] == naive.count
        assert min(naive.count) >= 0

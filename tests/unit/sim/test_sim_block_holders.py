"""The block pool when many blocks hold one hash: the oldest of them is found."""

from itertools import permutations

import pytest

from extproc.sim.blocks import BlockPool


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_whichever_holder_is_evicted_the_oldest_left_is_found(order: tuple[int, ...]) -> None:
    """Four blocks hold one hash and lose it in any order; when the last has, the hash is unknown."""
    pool = BlockPool(5)
    blocks = pool.take(4)
    pool.register_all(blocks, [11] * 4)
    for index in order:
        pool.release([blocks[index]])
    assert pool.cached == 1
    left = list(blocks)
    for index in order:
        assert pool.lookup([11], 1) == left[:1]
        assert pool.take(1) == [blocks[index]]
        left.remove(blocks[index])
    assert pool.lookup([11], 1) == []
    assert pool.cached == 0

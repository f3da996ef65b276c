"""Engine ids of blocks become our own hashes: placed by their chains, by tier, and forgotten as the engine says."""

from collections.abc import Iterable

import pytest

from extproc.block_extras import named
from extproc.engines.kv_values import Cleared, KvEvent, Moved, Removed, Stored, Tier
from extproc.fleet.kv_chain import Chain, Change, Emptied
from extproc.state.exact_blocks import TokenPrompt, chain_of

SIZE = 4
TOKENS = tuple(range(1, 41))
"""Ten blocks."""


def stored(*ids: int, at: int = 0, parent: int | None = None, size: int = SIZE, **more: object) -> Stored:
    """Blocks of `TOKENS` from the block `at` on, under these engine ids."""
    tokens = TOKENS[at * size : (at + len(ids)) * size]
    return Stored(hashes=ids, parent=parent, tokens=tokens, block_tokens=size, **more)  # type: ignore[arg-type]


def ours(count: int, adapter: str = "", salt: str = "") -> list[int]:
    """Our hashes of the first blocks of `TOKENS`, as a request for them has."""
    return chain_of(TokenPrompt(TOKENS[: count * SIZE], adapter, salt), SIZE)


def begun(*, from_start: bool = True, block_tokens: int = 0, most: int = 1000) -> Chain:
    """A chain with nothing in it."""
    made = Chain(most=most)
    made.begin(from_start=from_start, block_tokens=block_tokens)
    return made


def apply(made: Chain, *events: KvEvent) -> list[Change | Emptied]:
    """Take in events; returns what they changed."""
    return [change for event in events for change in made.apply(event)]


def held(made: Chain, tier: Tier = Tier.GPU) -> set[int]:
    """All that a tier has."""
    return {block for change in made.held() if change.tier is tier for block in change.blocks}


def learnt(changes: Iterable[Change | Emptied]) -> dict[Tier, set[int]]:
    """What a worker believes after these changes."""
    known: dict[Tier, set[int]] = {tier: set() for tier in Tier}
    for change in changes:
        if isinstance(change, Emptied):
            known = {tier: set() for tier in Tier}
        elif change.held:
            known[change.tier].update(change.blocks)
        else:
            known[change.tier].difference_update(change.blocks)
    return known


def test_a_chain_told_in_parts_has_the_hashes_of_a_request() -> None:
    """Whatever the engine calls its blocks, and however it cuts the chain: 0 is an id like any other."""
    made = begun()
    changes = apply(made, stored(0, 2**64 - 1), stored(7, at=2, parent=2**64 - 1), stored(8, 9, at=3, parent=7))
    assert held(made) == set(ours(5)) == learnt(changes)[Tier.GPU]
    assert made.block_tokens == SIZE
    assert made.count == 5


def test_adapter_and_salt_make_other_blocks() -> None:
    """They stand in the first block of a chain, and so in all of it."""
    made = begun()
    apply(
        made,
        stored(1, 2, adapter="sql"),
        stored(3, 4, extras=(named("tenant"),)),
    )
    assert held(made) == {*ours(2, adapter="sql"), *ours(2, salt="tenant")}


def test_a_long_chain_is_placed_in_steps() -> None:
    """One of many thousand blocks does not hold the event loop up, and comes out the same."""
    tokens = tuple(range(4 * 3000))
    made = begun(most=5000)
    event = Stored(hashes=tuple(range(3000)), parent=None, tokens=tokens, block_tokens=4, extras=(b"x",) * 2000)
    assert len(list(made.apply(event))) == 6 + 1
    whole = Chain()
    whole.begin(from_start=True, block_tokens=4)
    for number in range(3000):
        parent = number - 1 if number else None
        extras = (b"x",) if number < 2000 else ()
        one = Stored((number,), parent, tokens[4 * number : 4 * number + 4], 4, extras=extras)
        apply(whole, one)
    assert held(made) == held(whole)
    assert made.count == 3000


def test_a_chain_on_an_unknown_parent_is_left_out() -> None:
    """It cannot be hashed; it is counted, and what is known stays."""
    made = begun()
    assert apply(made, stored(1), stored(3, 4, at=2, parent=2))[1:] == [Change(Tier.GPU, True, ours(1))]
    assert made.left_out.unplaced == 2
    assert made.count == 1


def test_a_removed_block_is_gone_and_no_parent_any_more() -> None:
    """An id that comes again is placed anew."""
    made = begun()
    changes = apply(made, stored(1, 2), Removed((1, 99), Tier.GPU), stored(3, at=2, parent=1))
    assert learnt(changes)[Tier.GPU] == held(made) == set(ours(2)[1:])
    assert made.left_out.unknown == 1
    assert made.left_out.unplaced == 1
    assert made.count == 1


def test_a_block_told_twice_is_gone_with_the_first_removal() -> None:
    """Engines that have one copy of a block may repeat themselves; no profile says too much."""
    made = begun()
    apply(made, stored(1, 2))
    assert apply(made, stored(1, 2)) == []
    assert apply(made, Removed((2,), Tier.GPU)) == [Change(Tier.GPU, False, [ours(2)[1]])]
    assert made.count == 1


def test_a_block_is_gone_with_its_last_copy() -> None:
    """Of engines that tell of each copy: two requests computed the same beginning, and one copy is dropped."""
    made = Chain()
    made.begin(from_start=True, copies=True)
    apply(made, stored(1, 2), stored(1, 2), stored(1))
    assert made.count == 2
    assert apply(made, Removed((1, 2), Tier.GPU)) == []
    assert apply(made, Removed((2,), Tier.GPU)) == [Change(Tier.GPU, False, [ours(2)[1]])]
    assert apply(made, Removed((1,), Tier.GPU), stored(3, at=1, parent=1)) == [Change(Tier.GPU, True, [ours(2)[1]])]
    assert apply(made, Removed((1,), Tier.GPU)) == [Change(Tier.GPU, False, ours(1))]
    assert made.left_out.unknown == 0
    apply(made, stored(1), stored(1), Cleared(), stored(1))
    assert apply(made, Removed((1,), Tier.GPU)) == [Change(Tier.GPU, False, ours(1))]


def test_copies_are_those_of_the_gpu() -> None:
    """An offloaded block that is told twice is one."""
    made = Chain()
    made.begin(from_start=True, copies=True)
    apply(made, stored(1, tier=Tier.CPU), stored(1, tier=Tier.CPU))
    assert apply(made, Removed((1,), Tier.CPU)) == [Change(Tier.CPU, False, ours(1))]


def test_more_copies_than_the_cache_has_room_for_tell_of_reused_blocks() -> None:
    """Such copies never go; a cache of unknown size, and one that is full of single blocks, prove nothing."""
    made = Chain()
    made.begin(from_start=True, copies=True)
    apply(made, stored(1, 2))
    assert not made.tells_too_much(1)
    apply(made, stored(1, 2))
    assert not made.tells_too_much(0)
    assert not made.tells_too_much(4)
    assert made.tells_too_much(3)
    apply(made, Removed((1,), Tier.GPU))
    assert not made.tells_too_much(3)


def test_tiers_are_kept_apart() -> None:
    """A block offloaded to host memory goes on there after the GPU dropped it, and is a parent from there."""
    made = begun()
    changes = apply(
        made,
        stored(1, 2),
        stored(1, 2, tier=Tier.CPU),
        Removed((1, 2), Tier.GPU),
        stored(3, at=2, parent=2),
    )
    assert held(made, Tier.CPU) == set(ours(2)) == learnt(changes)[Tier.CPU]
    assert held(made) == {ours(3)[2]} == learnt(changes)[Tier.GPU]


def test_a_removal_from_nowhere_in_particular_is_one_from_all_tiers() -> None:
    """TensorRT-LLM does not say from where."""
    made = begun()
    apply(made, stored(1, 2), stored(1, tier=Tier.CPU))
    changes = apply(made, Removed((1,)))
    assert changes == [Change(Tier.GPU, False, ours(1)), Change(Tier.CPU, False, ours(1))]
    assert made.count == 1


def test_a_moved_block_is_in_its_new_tier_alone() -> None:
    """One that was never seen is counted."""
    made = begun()
    apply(made, stored(1, 2))
    changes = apply(made, Moved(1, Tier.CPU), Moved(9, Tier.CPU))
    assert changes == [Change(Tier.CPU, True, ours(1)), Change(Tier.GPU, False, ours(1))]
    assert held(made, Tier.CPU) == set(ours(1))
    assert made.left_out.unknown == 1
    assert made.count == 2


def test_an_emptied_cache_is_empty_and_known() -> None:
    """From then on the stream is known from its start."""
    made = begun(from_start=False)
    assert not made.is_complete(0)
    assert apply(made, stored(1, 2), Cleared())[-1] == Emptied()
    assert held(made) == set()
    assert made.count == 0
    assert made.is_complete(0)
    assert made.block_tokens == SIZE


def test_a_stream_joined_late_is_complete_after_a_cache_full_of_placed_blocks() -> None:
    """One chain that cannot be placed shows that something old is still there, and the count begins anew."""
    made = begun(from_start=False)
    apply(made, stored(1, 2, 3), stored(8, at=5, parent=7), stored(4, at=3, parent=3))
    assert not made.is_complete(4)
    apply(made, stored(5, 6, 7, at=4, parent=4))
    assert not made.is_complete(0)
    assert not made.is_complete(5)
    assert made.is_complete(4)
    apply(made, stored(80, at=9, parent=70))
    assert made.is_complete(4), "once complete it stays so"


def test_partial_blocks_are_left_out() -> None:
    """A block with fewer tokens ends a prompt; nothing goes on from it."""
    made = begun(block_tokens=SIZE)
    assert apply(made, stored(1, size=3)) == []
    apply(made, stored(2, 3), stored(4, at=2, parent=3, size=2))
    assert held(made) == set(ours(2))
    assert made.left_out.partial == 2


def test_a_larger_block_shows_that_the_size_was_wrong() -> None:
    """The profile begins anew with it; so it does with several smaller ones in a row that no event spoke against."""
    made = begun()
    apply(made, stored(1, size=3))
    assert apply(made, stored(2, 3)) == [Emptied(), Change(Tier.GPU, True, ours(2))]
    assert not made.is_complete(0), "what was known of the smaller blocks is lost"
    made = begun(block_tokens=32)
    assert apply(made, stored(2, 3))[-1] == Change(Tier.GPU, True, ours(2))
    assert made.is_complete(0), "nothing was known, so nothing is lost"
    assert made.block_tokens == SIZE


@pytest.mark.parametrize(
    ("tokens", "size"),
    [((1, 2, 3), SIZE), ((1, 2, 3, -4), SIZE), ((1, 2, 3, 2**32), SIZE), ((), 0)],
)
def test_blocks_without_proper_tokens_are_left_out(tokens: tuple[int, ...], size: int) -> None:
    """Too few of them, ids that are none, blocks of no tokens: counted, and nothing crashes."""
    made = begun()
    changes = apply(made, Stored((1,), None, tokens, size))
    assert learnt(changes)[Tier.GPU] == set()
    assert made.left_out.malformed == 1
    assert made.count == 0


def test_an_id_that_stands_for_another_block_now_replaces_it() -> None:
    """Should an engine give an id twice, the profile does not keep the block that it stood for before."""
    made = begun()
    changes = apply(made, stored(1, 2), stored(1, at=3))
    assert learnt(changes)[Tier.GPU] == held(made)
    assert len(held(made)) == made.count == 2


def test_no_more_than_so_many_blocks_are_taken_in() -> None:
    """What comes beyond them is left out and counted; room is made by removals alone."""
    made = begun(most=3)
    apply(made, stored(1, 2), stored(3, 4, at=2, parent=2))
    assert made.count == 2
    assert made.left_out.full == 2
    apply(made, Removed((2,)), stored(2, 3, at=1, parent=1))
    assert held(made) == set(ours(3))


def test_what_is_held_is_told_as_it_is_when_each_step_is_taken() -> None:
    """A block that went while others were told is not told any more."""
    made = begun(most=20_000)
    tokens = tuple(range(4 * 9000))
    apply(made, Stored(tuple(range(6000)), None, tokens[: 4 * 6000], 4))
    steps = made.held()
    told = set(next(steps).blocks)
    # The table is built again meanwhile, and the steps still go through its old parts.
    apply(made, Stored(tuple(range(10_000, 19_000)), None, tokens, 4, adapter="other"))
    apply(made, Removed(tuple(range(6000)), Tier.GPU))
    assert told
    assert {block for change in steps for block in change.blocks} <= held(made)

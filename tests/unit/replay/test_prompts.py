"""Prompts without text share and part as texts do."""

from hypothesis import given
from hypothesis import strategies as st

from extproc.replay.prompts import Prompt, grown, turn_id

PIECES = st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(1, 40)), max_size=6)
SIZE = 8


def built(pieces: list[tuple[bytes, int]]) -> Prompt:
    """Prompt of several texts in a row."""
    prompt = Prompt()
    for key, tokens in pieces:
        prompt = grown(prompt, tokens, key, SIZE)
    return prompt


@given(pieces=PIECES, more=PIECES)
def test_a_longer_prompt_begins_with_the_blocks_of_the_shorter_one(
    pieces: list[tuple[bytes, int]], more: list[tuple[bytes, int]]
) -> None:
    """Blocks are prefix-monotone, full blocks only, and growing leaves the shorter prompt as it was."""
    short = built(pieces)
    kept = list(short.blocks)
    long = built([*pieces, *more])
    assert list(long.blocks[: len(kept)]) == kept == list(short.blocks)
    assert long.tokens == sum(tokens for _, tokens in [*pieces, *more])
    assert len(long.blocks) == long.tokens // SIZE


@given(pieces=PIECES, other=st.integers(0, 5), more=st.integers(64, 100))
def test_prompts_share_nothing_behind_the_place_where_they_part(
    pieces: list[tuple[bytes, int]], other: int, more: int
) -> None:
    """Once a text differs, no later block is equal, even if what follows is the same."""
    at = min(other, len(pieces))
    parted = [*pieces[:at], (b"x", 5), *pieces[at:]]
    left, right = built([*pieces, (b"tail", more)]), built([*parted, (b"tail", more)])
    shared = sum(tokens for _, tokens in pieces[:at]) // SIZE
    assert left.blocks[:shared] == right.blocks[:shared]
    assert not set(left.blocks[shared:]) & set(right.blocks[shared:])


def test_a_key_stands_for_an_endless_text() -> None:
    """Two lengths of the same text agree as far as the shorter one reaches."""
    short, long = grown(Prompt(), 20, b"k", SIZE), grown(Prompt(), 50, b"k", SIZE)
    assert list(short.blocks) == list(long.blocks[:2])


@given(pieces=PIECES, cut=st.integers(1, SIZE - 1))
def test_what_stands_behind_the_last_full_block_counts(pieces: list[tuple[bytes, int]], cut: int) -> None:
    """Prompts that differ only in a block that is not full yet part in that block once it is."""
    start = built(pieces)
    pad = -start.tokens % SIZE
    start = grown(start, pad, b"pad", SIZE) if pad else start
    left, right = (grown(grown(start, cut, key, SIZE), 30, b"same", SIZE) for key in (b"l", b"r"))
    assert not set(left.blocks[len(start.blocks) :]) & set(right.blocks[len(start.blocks) :])


def test_turns_are_told_apart() -> None:
    """Each turn of each conversation has an identity of 16 bytes of its own, always the same."""
    ids = {turn_id(talk, turn) for talk in ("a", "b") for turn in range(3)}
    assert len(ids) == 6
    assert {len(one) for one in ids} == {16}
    assert turn_id("a", 1) == turn_id("a", 1)

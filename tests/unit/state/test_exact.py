"""What an exact profile says of a prompt, and when it says nothing."""

import pytest

from extproc.state import exact
from extproc.state.exact import ALL_TIERS, ExactIndex, Match
from extproc.state.exact_blocks import TokenPrompt, chain_of

PROMPT = TokenPrompt(range(1, 101))
"""100 tokens."""
BLOCKS = chain_of(PROMPT, 10)
CHAINS = {10: BLOCKS}


def index_of(*endpoints: str, block_tokens: int = 10) -> ExactIndex:
    """Empty profiles of these."""
    index = ExactIndex()
    for name in endpoints:
        index.begin(name, 0, block_tokens)
    return index


def depths(index: ExactIndex, tokens: int = 101) -> dict[str, int]:
    """Leading blocks by endpoint, of the prompt with one token more, so that all of its blocks can be reused."""
    return {name: each.blocks for name, each in index.match(CHAINS, tokens).items()}


def test_a_match_ends_at_the_first_block_that_is_missing() -> None:
    """What is held behind a gap does not count, and counts again once the gap is closed."""
    index = index_of("a", "b")
    index.stored("a", 0, 0, BLOCKS)
    index.stored("b", 0, 0, BLOCKS[:7])
    assert depths(index) == {"a": 10, "b": 7}
    index.evicted("a", 0, 0, [BLOCKS[3]])
    assert depths(index) == {"a": 3, "b": 7}
    index.evicted("b", 0, ALL_TIERS, [BLOCKS[0]])
    assert depths(index) == {"a": 3, "b": 0}
    index.stored("a", 0, 0, [BLOCKS[3]])
    assert depths(index) == {"a": 10, "b": 0}


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (10, 0), (11, 1), (99, 9), (100, 9), (101, 10)])
def test_the_last_token_is_computed_always(tokens: int, blocks: int) -> None:
    """At most floor((n - 1) / B) blocks are reused: a prompt that ends with a block computes it again."""
    index = index_of("a")
    index.stored("a", 0, 0, BLOCKS)
    assert depths(index, tokens) == {"a": blocks}


def test_a_block_is_worth_what_its_best_tier_is() -> None:
    """6 blocks in the GPU, 2 in host memory of which one is on disk too, 2 on disk: 60 + 0.8 x 20 + 0.5 x 20 tokens."""
    index = index_of("a")
    index.stored("a", 0, 0, BLOCKS[:6])
    index.stored("a", 0, 1, BLOCKS[4:8])
    index.stored("a", 0, 2, BLOCKS[7:])
    assert index.match(CHAINS, 101, (0.8, 0.5))["a"] == Match(10, 10, 86.0)
    index.evicted("a", 0, 0, BLOCKS[4:6])
    assert index.match(CHAINS, 101, (0.8, 0.5))["a"] == Match(10, 10, 82.0)
    index.evicted("a", 0, 1, BLOCKS[4:7])
    assert index.match(CHAINS, 101, (0.8, 0.5))["a"] == Match(4, 10, 40.0)


def test_the_best_rank_counts() -> None:
    """Ranks have caches of their own: blocks of one do not continue those of another."""
    index = index_of("a")
    index.begin("a", 1, 10)
    index.stored("a", 0, 0, BLOCKS[:4])
    index.stored("a", 1, 0, BLOCKS[2:])
    assert depths(index) == {"a": 4}
    index.stored("a", 1, 2, BLOCKS[:2])
    assert index.match(CHAINS, 101, (1.0, 0.0))["a"] == Match(10, 10, 80.0)
    assert index.match(CHAINS, 101, (1.0, 0.0))["a"].worth > 40.0
    assert index.depth("a", BLOCKS) == 10


def test_block_sizes_may_differ() -> None:
    """Each endpoint is matched by the chain of its own size; one whose size has none is absent."""
    index = index_of("a")
    index.begin("b", 0, 25)
    index.stored("a", 0, 0, BLOCKS)
    index.stored("b", 0, 0, chain_of(PROMPT, 25)[:3])
    assert set(index.block_sizes) == {10, 25}
    both = index.match({10: BLOCKS, 25: chain_of(PROMPT, 25)}, 101)
    assert {name: each.blocks * each.block_tokens for name, each in both.items()} == {"a": 100, "b": 75}
    assert depths(index) == {"a": 10}


@pytest.mark.parametrize("other", [TokenPrompt(PROMPT.ids, adapter="x"), TokenPrompt(PROMPT.ids, salt="y")])
def test_adapters_and_salts_share_nothing(other: TokenPrompt) -> None:
    """The same tokens under another adapter or salt are other blocks."""
    index = index_of("a")
    index.stored("a", 0, 0, chain_of(other, 10))
    assert depths(index) == {"a": 0}


def test_a_profile_that_ended_says_nothing() -> None:
    """Not even when one rank of two goes on, and whatever is told meanwhile; it begins again empty."""
    index = index_of("a", "b")
    index.begin("a", 1, 10)
    index.stored("a", 0, 0, BLOCKS)
    index.end("a", 1)
    index.stored("a", 1, 0, BLOCKS)
    assert (depths(index), index.is_on("a"), index.lives("a")) == ({"b": 0}, False, ())
    index.begin("a", 1, 10)
    assert depths(index) == {"a": 10, "b": 0}
    index.begin("a", 0, 10)
    assert depths(index) == {"a": 0, "b": 0}


def test_an_endpoint_that_nobody_told_of_is_absent() -> None:
    """Stored or evicted blocks do not begin a profile, and a rank that was not begun has none."""
    index = index_of("a")
    index.stored("b", 0, 0, BLOCKS)
    index.evicted("b", 0, 0, BLOCKS)
    index.stored("a", 3, 0, BLOCKS)
    assert depths(index) == {"a": 0}
    assert list(ExactIndex().block_sizes) == []


def test_what_another_tells_ends_a_profile() -> None:
    """Whoever passes on events without having begun the profile did begin it, and that was missed."""
    for told in (ExactIndex.stored, ExactIndex.evicted):
        index = ExactIndex()
        index.begin("a", 0, 10, "one")
        index.stored("a", 0, 0, BLOCKS, "one")
        told(index, "a", 0, 0, [99], "two")
        assert not index.is_on("a")
        index.begin("a", 0, 10, "two")
        assert depths(index) == {"a": 0}


def test_a_new_owner_begins_all_ranks() -> None:
    """The ranks that the last one told of say nothing until the new one has begun them."""
    index = ExactIndex()
    for rank in (0, 1):
        index.begin("a", rank, 10, "one")
    index.begin("a", 0, 10, "two")
    assert not index.is_on("a")
    index.begin("a", 1, 10, "two")
    assert index.is_on("a")


def test_missed_batches_end_what_their_sender_told() -> None:
    """Others' profiles stay."""
    index = ExactIndex()
    for name, owner in (("a", "one"), ("b", "two"), ("c", "one")):
        index.begin(name, 0, 10, owner)
    index.missed("one")
    assert [index.is_on(name) for name in "abc"] == [False, True, False]


def test_a_cleared_cache_is_empty_and_known() -> None:
    """After a restart the profile goes on with what is told from then on; ranks that had ended are forgotten."""
    index = index_of("a", "b")
    index.begin("a", 1, 10)
    for name in ("a", "b"):
        index.stored(name, 0, 0, BLOCKS)
    index.end("a", 1)
    index.clear("a")
    assert depths(index) == {"a": 0, "b": 10}
    index.stored("a", 0, 0, BLOCKS[:2])
    assert depths(index) == {"a": 2, "b": 10}
    index.drop("b")
    assert depths(index) == {"a": 2}
    assert index.held("b") == 0


def test_a_rank_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it tells beyond is left out: the beginnings, told first, are what counts."""
    monkeypatch.setattr(exact, "MOST_BLOCKS", 7)
    index = index_of("a")
    index.stored("a", 0, 0, BLOCKS[:5])
    index.stored("a", 0, 0, BLOCKS[5:])
    index.stored("a", 0, 1, BLOCKS)
    assert (index.held("a"), depths(index)) == (7, {"a": 7})
    index.evicted("a", 0, ALL_TIERS, BLOCKS[6:7])
    index.stored("a", 0, 0, BLOCKS[6:])
    assert depths(index) == {"a": 7}

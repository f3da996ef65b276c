"""A profile that another worker takes over answers and evicts as the one it is a copy of."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.state.blocktable import Words
from extproc.state.holder import PIECES, entries_of
from extproc.state.image import ProfileImage, image_of, is_sound
from extproc.state.profile import PrefixIndex

_PROMPTS = [[1000 * family + depth for depth in range(1, 41)] for family in range(1, 7)]

_use = st.tuples(st.sampled_from(_PROMPTS), st.integers(1, 40)).map(lambda pick: pick[0][: pick[1]])
_uses = st.lists(_use, max_size=40)


def image(index: PrefixIndex, endpoint: str) -> ProfileImage:
    """Copy a profile."""
    entries: list[tuple[Words, Words]] = []
    heads: list[Words] = []
    for blocks, stamps, beginnings in index.copy(endpoint):
        entries.append((blocks, stamps))
        heads.append(beginnings)
    return image_of(entries, heads, index.clock(endpoint), PIECES)[0]


def take_over(index: PrefixIndex, endpoint: str, copied: ProfileImage) -> None:
    """Let an endpoint hold what was copied."""
    clock = index.clock(endpoint)
    for _ in index.replace(endpoint, copied, entries_of(copied, clock), clock):
        pass


def depths(index: PrefixIndex, endpoint: str) -> Sequence[int]:
    """How much of every prompt an endpoint holds."""
    return [index.match(prompt).get(endpoint, 0) for prompt in _PROMPTS]


@given(_uses, _uses, _uses, st.integers(1, 120))
@settings(max_examples=200)
def test_a_copy_answers_alike_and_evicts_in_the_same_order(
    before: Sequence[Sequence[int]], elsewhere: Sequence[Sequence[int]], after: Sequence[Sequence[int]], capacity: int
) -> None:
    """Whatever was used before, matches agree; whatever is used later, both evict the same blocks at the same time.

    The other worker had knowledge of its own, of this endpoint and of others; only what it is told counts.
    """
    one, other = PrefixIndex(), PrefixIndex()
    for prompt in before:
        one.add("a", prompt, capacity)
    for prompt in elsewhere:
        one.add("c", prompt, 50)
        other.add("a", prompt, 50)
        other.add("b", prompt, 50)
    kept = depths(other, "b")
    clock = other.clock("a")
    take_over(other, "a", image(one, "a"))
    assert depths(other, "a") == depths(one, "a")
    assert other.held("a") == one.held("a")
    assert other.clock("a") >= clock
    assert depths(other, "b") == kept
    for prompt in after:
        assert one.add("a", prompt, capacity) == other.add("a", prompt, capacity)
        assert depths(one, "a") == depths(other, "a")


@given(_uses, st.integers(1, 120))
def test_an_image_is_sound(uses: Sequence[Sequence[int]], capacity: int) -> None:
    """Each block once, in runs that ascend; what is copied is never taken for damage."""
    index = PrefixIndex()
    for prompt in uses:
        index.add("a", prompt, capacity)
    copied = image(index, "a")
    assert is_sound(copied, PIECES)
    assert len(copied.blocks) == len(set(copied.blocks.tolist())) == index.held("a")
    assert len(copied.stamps) == 0 or copied.stamps[0] < PIECES


def test_damaged_images_are_told() -> None:
    """Runs that descend, that do not add up, or that lie in the future cannot be a profile's."""
    blocks, heads = np.arange(1, 4, dtype=np.uint64), np.array([1], np.uint64)

    def sound(stamps: Sequence[int], counts: Sequence[int], clock: int) -> bool:
        made = ProfileImage(blocks, np.array(stamps, np.uint64), np.array(counts, np.uint32), heads, clock)
        return is_sound(made, PIECES)

    assert sound([3, 70], [1, 2], 1)
    assert not sound([70, 3], [1, 2], 1)
    assert not sound([3, 3], [1, 2], 1)
    assert not sound([3, 70], [1, 1], 1)
    assert not sound([3, 70], [3, 0], 1)
    assert not sound([3, 70], [3], 1)
    assert not sound([3, 200], [1, 2], 1)
    assert not sound([], [], 1)
    assert not sound([3, 70], [1, 2], -1)


def test_decisions_go_on_while_a_profile_is_copied() -> None:
    """Blocks that nothing touched meanwhile come once each, whatever else grows, splits or is evicted."""
    index = PrefixIndex()
    still = list(range(1, 20_001))
    index.add("a", still, 10**6)
    fresh = iter(range(100_000, 10**6, 1000))
    entries: list[tuple[Words, Words]] = []
    for blocks, stamps, _ in index.copy("a"):
        entries.append((blocks, stamps))
        start = next(fresh)
        index.add("a", range(start, start + 1000), 10**6)
    copied = image_of(entries, [], index.clock("a"), PIECES)[0]
    assert is_sound(copied, PIECES)
    found = copied.blocks.tolist()
    assert len(found) == len(set(found))
    assert set(still) <= set(found)


def test_decisions_go_on_while_a_profile_is_taken_over() -> None:
    """Charges remember readings of the use counter: it goes on from the higher one, whatever was decided meanwhile."""
    one, other = PrefixIndex(), PrefixIndex()
    one.add("a", [1, 2], 100)
    copied = image(one, "a")
    steps = other.replace("a", copied, entries_of(copied, other.clock("a")), other.clock("a"))
    next(steps)
    for number in range(10, 60):
        other.add("a", [number], 100)
    clock = other.clock("a")
    for _ in steps:
        pass
    assert other.clock("a") >= clock
    assert other.match([1, 2]) == {"a": 2}


def test_a_profile_that_was_emptied_meanwhile_stays_empty_of_heads() -> None:
    """An engine restarts while its profile is taken over: what is left of the steps changes nothing of the new life."""
    one, other = PrefixIndex(), PrefixIndex()
    for number in range(1, 1000):
        one.add("a", [number], 10**6)
    copied = image(one, "a")
    steps = other.replace("a", copied, entries_of(copied, other.clock("a")), other.clock("a"))
    while not other.held("a"):
        next(steps)
    other.forget("a")
    other.add("a", [5000], 100)
    for _ in steps:
        pass
    assert other.held("a") == 1
    assert all(not other.match([number]) for number in range(1, 1000))

"""The prefix index: matching, recency, capacity, leaving, and last uses."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request.blocks import chain
from extproc.state.profile import PrefixIndex


def _blocks(prompt: str) -> list[int]:
    """One block for each letter: equal up to the letter where two prompts part."""
    return chain([prompt.encode()], b"", 1)


class TestMatch:
    """How many leading blocks each endpoint holds."""

    def test_depths_differ_by_endpoint(self) -> None:
        """A prompt that two endpoints share the beginning of matches each as far as it goes."""
        index = PrefixIndex()
        index.add("a", [1, 2, 3, 4], 100)
        index.add("b", [1, 2, 9], 100)
        assert index.match([1, 2, 3, 4, 5]) == {"a": 4, "b": 2}
        assert index.match([7]) == {}
        assert index.match([]) == {}

    def test_removing_a_tail_ends_the_match_before_it(self) -> None:
        """Blocks that the engine turned out not to hold no longer count."""
        index = PrefixIndex()
        index.add("a", [1, 2, 3], 100)
        index.remove("a", [2, 3])
        assert index.match([1, 2, 3]) == {"a": 1}
        assert index.depth("a", [1, 2, 3]) == 1
        assert index.held("a") == 1

    def test_a_hole_ends_the_match_or_does_not_but_never_breaks_the_counts(self) -> None:
        """With a block missing in the midst the match ends there or later; what is held is counted exactly."""
        index = PrefixIndex()
        index.add("a", [1, 2, 3], 100)
        index.remove("a", [2])
        assert index.match([1, 2, 3])["a"] in {1, 3}
        assert index.held("a") == len(index) == 2
        index.add("a", [1, 2, 3], 100)
        assert index.held("a") == 3

    def test_blocks_in_an_array_and_the_block_0_match_like_any_other(self) -> None:
        """Whoever hands over packed blocks need not unpack them, and no value is special."""
        index = PrefixIndex()
        blocks = array("Q", [0, 2**64 - 1, 7])
        index.add("a", blocks, 100)
        assert index.match(list(blocks)) == index.match(blocks) == {"a": 3}
        index.remove("a", blocks[2:])
        assert list(index.stamps("a", blocks)) == [1, 1]

    def test_a_head_that_all_share_finds_them_all(self) -> None:
        """A thousand endpoints with one system prompt are all found, and those that lost it no more."""
        index = PrefixIndex()
        for at in range(1000):
            index.add(f"e{at}", _blocks(f"same{at}"), 100)
        assert index.match(_blocks("same7!")) == {f"e{at}": 5 if str(at)[0] == "7" else 4 for at in range(1000)}
        for at in range(500):
            index.remove(f"e{at}", _blocks(f"same{at}"))
        for _ in range(2):
            assert set(index.match(_blocks("same"))) == {f"e{at}" for at in range(500, 1000)}
        index.retain(["e3", "e999"])
        assert index.match(_blocks("same")) == {"e999": 4}
        index.retain(["e3"])
        assert index.match(_blocks("same")) == {}
        index.add("e3", _blocks("same3"), 100)
        assert index.match(_blocks("same3")) == {"e3": 5}


class TestCapacity:
    """An endpoint's profile is bounded by its engine's KV cache."""

    def test_the_least_recently_used_prompt_goes_first_and_from_its_tail(self) -> None:
        """Of an old prompt the tail is evicted before the head, as engines free sequences from the end."""
        index = PrefixIndex()
        index.add("a", [1, 2, 3], 5)
        assert index.add("a", [7, 8, 9], 5) == 1
        assert index.match([1, 2, 3]) == {"a": 2}
        assert index.match([7, 8, 9]) == {"a": 3}

    def test_touching_a_prompt_keeps_it(self) -> None:
        """A prompt used again outlives one that was added later."""
        index = PrefixIndex()
        index.add("a", [1, 2], 4)
        index.add("a", [3, 4], 4)
        index.add("a", [1, 2], 4)
        index.add("a", [5, 6], 4)
        assert index.match([1, 2]) == {"a": 2}
        assert index.match([3, 4]) == {}

    @pytest.mark.parametrize("capacity", [1, 4, 100, 3000])
    def test_a_prompt_longer_than_the_cache_keeps_its_head(self, capacity: int) -> None:
        """As many blocks are held as the cache has, and they are the first of the prompt."""
        index = PrefixIndex()
        prompt = list(range(1, 4001))
        index.add("a", prompt, capacity)
        assert index.match(prompt) == {"a": capacity}
        assert index.held("a") == capacity

    @pytest.mark.parametrize("capacity", [40, 640, 5000])
    def test_the_cut_is_a_small_one(self, capacity: int) -> None:
        """A full profile never holds more than its capacity and never less than 15/16 of it."""
        index = PrefixIndex()
        held = []
        evicted = 0
        for at in range(600):
            evicted += index.add("a", _blocks(f"{at:05} a prompt of 30 blocks, so to say"[:30]), capacity)
            held.append(index.held("a"))
        assert max(held) <= capacity
        assert min(held[capacity // 20 :]) >= capacity * 15 // 16
        assert evicted > capacity


class TestForget:
    """Endpoints that restart or leave."""

    def test_forgetting_one_endpoint_leaves_the_others(self) -> None:
        """A restart empties one profile; blocks shared with others stay with the others."""
        index = PrefixIndex()
        index.add("a", [1, 2], 10)
        index.add("b", [1], 10)
        index.forget("a")
        assert index.match([1, 2]) == {"b": 1}

    def test_a_newcomer_does_not_inherit_a_leaver_s_blocks(self) -> None:
        """What is left of an endpoint that left is used again, its blocks are not."""
        index = PrefixIndex()
        index.add("b", [3], 10)
        index.add("a", [1, 2], 10)
        index.retain(["b"])
        index.add("c", [5], 10)
        assert index.match([1, 2]) == {}
        assert index.match([5]) == {"c": 1}
        index.add("b", [1, 2], 10)
        index.add("c", [1], 10)
        assert index.match([1, 2]) == {"b": 2, "c": 1}

    def test_a_stale_head_of_a_leaver_costs_no_other_s_head(self) -> None:
        """Two endpoints that share a head keep it, whatever heads the leavers before them had to themselves."""
        index = PrefixIndex()
        for name in ("a", "b", "c"):
            index.add(name, _blocks(f"{name} alone"), 100)
        index.forget("a")
        for name in ("b", "c", "d"):
            index.add(name, _blocks("shared"), 100)
        for prompt in ("a alone", "b alone", "c alone", "x"):
            index.match(_blocks(prompt))
        assert index.match(_blocks("shared")) == {"b": 6, "c": 6, "d": 6}
        assert index.match(_blocks("a alone")) == {}

    def test_the_clock_outlives_the_profile(self) -> None:
        """A stamp taken before a restart is older than all that was used after it."""
        index = PrefixIndex()
        for _ in range(3):
            index.add("a", [1, 2], 10)
        before = index.clock("a")
        index.forget("a")
        index.add("a", [1, 2], 10)
        assert index.clock("a") == before + 1
        assert index.drop_older("a", before) == 0
        assert index.newer("a", before) == 2

    def test_heads_that_are_gone_take_no_memory_and_the_others_are_found(self) -> None:
        """A table of heads holds those of the profiles, not of all prompts that there ever were."""
        index = PrefixIndex()
        sizes = []
        for at in range(6000):
            index.add("ab"[at % 2], [at + 1, -at % 2**64], 50)
            index.add("ab"[at % 3 % 2], [7, 8], 50)
            sizes.append(index.nbytes)
            if at % 500 == 499:
                assert all(index.match([old + 1])["ab"[old % 2]] == 1 for old in range(at - 40, at + 1))
        assert max(sizes[3000:]) <= 2 * max(sizes[:1000])

    @pytest.mark.parametrize("matched", [True, False])
    def test_a_head_that_was_evicted_and_comes_back_is_found(self, matched: bool) -> None:
        """An endpoint that loses a shared head and gets it again is found again, as often as that happens."""
        index = PrefixIndex()
        index.add("b", [1, 2], 4)
        sizes = []
        for at in range(500):
            index.add("a", [1, 2], 4)
            assert index.match([1, 2]) == {"a": 2, "b": 2}
            index.add("a", [100 + at % 3 * 4, 101, 102, 103], 4)
            if matched:
                assert index.match([1, 2]) == {"b": 2}
            sizes.append(index.nbytes)
        assert max(sizes[250:]) <= max(sizes[:250])


class TestLastUses:
    """The use counter of an endpoint, and what can be asked with it."""

    def test_stamps_tell_the_uses_before_this_one(self) -> None:
        """The blocks of a prompt have the counter of the last prompt that began with them."""
        index = PrefixIndex()
        index.add("a", _blocks("system one"), 100)
        index.add("a", _blocks("system two"), 100)
        index.add("b", _blocks("system one"), 100)
        assert list(index.stamps("a", _blocks("system one more"))) == [2] * 7 + [1] * 3
        assert index.clock("a") == 2
        assert list(index.stamps("a", _blocks("another"))) == []
        assert list(index.stamps("nobody", _blocks("system"))) == []

    def test_an_unknown_endpoint_has_used_nothing(self) -> None:
        """Asking about an endpoint without a profile is no error and makes none."""
        index = PrefixIndex()
        assert (index.clock("x"), index.newer("x", 0), index.drop_older("x", 5), index.held("x")) == (0, 0, 0, 0)
        index.remove("x", [1])
        index.forget("x")
        assert repr(index) == "<PrefixIndex >"

    def test_dropping_what_is_older_than_the_future_leaves_a_working_profile(self) -> None:
        """A stamp beyond the clock empties the profile, and the next prompt is held."""
        index = PrefixIndex()
        index.add("a", [1, 2], 10)
        assert index.drop_older("a", 1000) == 2
        index.add("a", [1, 2], 10)
        assert index.match([1, 2]) == {"a": 2}
        assert index.newer("a", index.clock("a")) == 2


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=5), max_size=20))
def test_any_blocks_are_counted_right_and_nothing_is_left_when_everybody_left(prompts: list[list[int]]) -> None:
    """Blocks that are no chain are counted like others; after all endpoints left, the index matches nothing."""
    index = PrefixIndex()
    empty = index.nbytes
    for number, blocks in enumerate(prompts):
        index.add(f"e{number % 3}", blocks, 4)
        assert index.held(f"e{number % 3}") <= 4
    index.retain([])
    assert len(index) == 0
    assert index.nbytes == empty
    assert all(not index.match(blocks) for blocks in prompts)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.text("xyz", max_size=40), st.integers(1, 200)), max_size=60))
def test_the_same_prompts_make_the_same_index(prompts: list[tuple[str, str, int]]) -> None:
    """Two indexes that were told the same answer the same: nothing hangs on addresses or time."""
    first, second = PrefixIndex(), PrefixIndex()
    for name, prompt, capacity in prompts:
        blocks = _blocks(prompt)
        assert list(first.match(blocks).items()) == list(second.match(blocks).items())
        assert first.add(name, blocks, capacity) == second.add(name, blocks, capacity)
        assert first.nbytes == second.nbytes

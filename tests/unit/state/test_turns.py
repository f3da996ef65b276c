"""Turns of conversations: what their answers leave in a cache, and what is remembered of them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.state.feed import Answered, Delta, Turned
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.turns import AnswerReuse, Turn, Turns, cached

ONE, TWO = b"1" * 16, b"2" * 16
BLOCKS = [1, 2, 3, 4]


def answered_turn(known: PoolKnowledge, cached_tokens: float = 0.0) -> list[Delta]:
    """Turn ONE, four blocks (256 tokens), is decided for `a` and answered with 101 tokens; what the others are told."""
    told = list(known.decided("c1", "a", BLOCKS, turn=ONE))
    return told + list(known.apply(Answered("c1", "a", -1, -1, 1024, 256, 0, cached_tokens, 101)))


class TestFollowUp:
    """The next turn finds prompt and answer cached where the turn was answered."""

    def test_the_answer_counts_where_it_was_generated(self) -> None:
        """256 tokens of prompt and 100 of the answer (the last was never computed); elsewhere the blocks alone."""
        known = PoolKnowledge(Priors())
        answered_turn(known)
        known.decided("c2", "b", BLOCKS)
        assert known.matched_tokens([*BLOCKS, 5, 6, 7], ONE) == {"a": 356.0, "b": 256.0}
        assert known.matched_tokens([*BLOCKS, 5, 6, 7]) == {"a": 256.0, "b": 256.0}

    def test_never_more_than_the_new_prompt(self) -> None:
        """A prompt of four blocks and a part of one has less than five blocks cached."""
        known = PoolKnowledge(Priors())
        answered_turn(known)
        assert known.matched_tokens(BLOCKS, ONE) == {"a": 5 * 64.0}

    def test_other_replicas_learn_it_from_the_owner_of_the_charge(self) -> None:
        """The digest travels, and the follow-up is predicted alike by who never saw the prompt."""
        known, other = PoolKnowledge(Priors()), PoolKnowledge(Priors())
        told = answered_turn(known)
        assert Turned(ONE, "a", 256, 101) in told
        for delta in told:
            other.apply(delta)
        assert other.matched_tokens([*BLOCKS, 5, 6, 7], ONE) == {"a": 356.0}
        assert other.continued(ONE) == ("a", 357.0)

    def test_an_answer_that_names_its_turn_needs_no_second_delta(self) -> None:
        """Everyone reads it, so nobody has to tell it again."""
        known, other = PoolKnowledge(Priors()), PoolKnowledge(Priors())
        known.decided("c1", "a", BLOCKS, turn=ONE)
        answer = Answered("c1", "a", -1, -1, 1024, 256, 0, 0, 101, ONE)
        assert not any(isinstance(delta, Turned) for delta in known.apply(answer))
        other.apply(answer)
        assert known.continued(ONE) == other.continued(ONE) == ("a", 357.0)

    def test_an_endpoint_that_evicted_the_prompt_has_no_answer(self) -> None:
        """Engines evict from the tail: without the turn's own blocks its answer is gone too."""
        known = PoolKnowledge(Priors(kv_tokens=256))
        answered_turn(known)
        known.decided("c2", "a", [10, 11, 12])
        assert known.matched_tokens([*BLOCKS, 5, 6, 7], ONE).get("a", 0.0) <= 64.0

    def test_a_restart_takes_its_turns(self) -> None:
        """The conversation is cached nowhere after it."""
        known = PoolKnowledge(Priors())
        known.engine_seen("a", 0, 100.0)
        answered_turn(known)
        known.engine_seen("a", 0, 200.0)
        assert known.matched_tokens([*BLOCKS, 5], ONE) == {}
        assert known.continued(ONE) is None

    def test_a_stored_response_is_continued_without_any_block(self) -> None:
        """The request's own input is shorter than a block; the conversation before it is known by its digest."""
        known = PoolKnowledge(Priors())
        known.decided("c1", "a", [], turn=ONE)
        known.apply(Answered("c1", "a", -1, -1, -1, 1000, 0, 0, 50))
        assert known.continued(ONE) == ("a", 1050.0)
        assert known.continued(TWO) is None
        assert known.continued(b"") is None

    @pytest.mark.parametrize("answer", [(-1.0, 5.0), (100.0, -1.0), (math.nan, 5.0), (100.0, math.inf)])
    def test_unknown_lengths_teach_nothing(self, answer: tuple[float, float]) -> None:
        """Without usage, or with one that is no number, the turn stays unknown."""
        turns = Turns()
        turns.learn(ONE, Turn("a", *answer))
        assert turns.find(ONE) is None


class TestReuse:
    """How much of an answer the next prompt carries back as it was generated."""

    def test_a_template_that_leaves_the_reasoning_out_is_learnt(self) -> None:
        """Twenty follow-ups that found the earlier prompt alone: the answer counts for next to nothing."""
        known = PoolKnowledge(Priors())
        for number in range(20):
            answered_turn(known, cached_tokens=240.0)
            known.decided(f"f{number}", "a", [*BLOCKS, 5, 6], matched_tokens=356.0, turn=TWO, follows=ONE)
            known.apply(Answered(f"f{number}", "a", -1, -1, 1600, 400, 0, 256, 10))
        assert known.matched_tokens([*BLOCKS, 7, 8], ONE)["a"] < 256.0 + 10.0

    def test_follow_ups_that_find_the_answer_keep_it(self) -> None:
        """An engine of blocks of 16 reports 352 of the 356 tokens."""
        reuse = AnswerReuse()
        for _ in range(20):
            reuse.observe(Turn("a", 256.0, 101.0), 352.0, 16)
        assert reuse.share > 0.97

    def test_an_evicted_turn_says_nothing_of_answers(self) -> None:
        """Fewer tokens than the earlier prompt were cached: it was the cache that lost them."""
        reuse = AnswerReuse()
        reuse.observe(Turn("a", 256.0, 101.0), 64.0, 16)
        assert reuse.share == 1.0


class TestTable:
    """Bounded, least recently used first out."""

    def test_a_turn_that_is_asked_for_stays(self) -> None:
        """The third turn pushes out the one that nobody continued."""
        turns = Turns(limit=2)
        for digest in (ONE, TWO):
            turns.learn(digest, Turn("a", 1.0, 1.0))
        turns.use(ONE)
        turns.learn(b"3" * 16, Turn("a", 1.0, 1.0))
        assert turns.find(ONE)
        assert turns.find(TWO) is None
        assert len(turns) == 2

    @given(st.lists(st.tuples(st.binary(max_size=2), st.sampled_from("ab")), max_size=60), st.integers(1, 8))
    def test_any_turns_stay_bounded_and_forgetting_is_complete(
        self, turns: list[tuple[bytes, str]], limit: int
    ) -> None:
        """Whatever comes, the bound holds, and a forgotten endpoint's turns are found no more."""
        table = Turns(limit)
        for digest, endpoint in turns:
            table.learn(digest, Turn(endpoint, 1.0, 1.0))
            assert len(table) <= limit
        table.forget({"a"})
        assert all(found is None or found.endpoint == "b" for found in (table.find(digest) for digest, _ in turns))


_tokens = st.floats(0.0, 1e6)


@given(_tokens, _tokens, _tokens, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_prediction_lies_between_the_profile_and_the_prompt(
    earlier: float, output: float, prompt: float, part: float, share: float
) -> None:
    """An answer only ever adds to what the profile holds, and nothing is cached that is not asked for."""
    base = part * prompt
    assert base <= cached(Turn("a", earlier, output), base, prompt, 64.0, share) <= max(prompt, base)

"""Profiles corrected by reported cached tokens, against engines that hold less than they claim."""

import random
from collections import deque
from collections.abc import Iterator
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.sim.blocks import BlockPool
from extproc.state.capacity import LEAST_SHARE, CapacityShare, Prefills
from extproc.state.correction import Finding, compare
from extproc.state.feed import Answered, Delta, Dropped, Held, Sized, pack
from extproc.state.knowledge import PoolKnowledge, Priors

BLOCK = 64
"""Tokens of a block, ours and in these tests the engine's."""


def prompt(number: int, blocks: int = 10) -> range:
    """Blocks of a prompt that shares none with those of other numbers."""
    return range(100 * number + 1, 100 * number + 1 + blocks)


def answer(known: PoolKnowledge, charge_id: str, blocks: int, cached: float, endpoint: str = "a") -> list[Delta]:
    """The endpoint answers with so many tokens cached of a prompt of so many blocks; the corrections told."""
    tokens = float(blocks * BLOCK)
    told = known.apply(Answered(charge_id, endpoint, -1, -1, 4 * tokens, tokens, cached_tokens=cached))
    return [delta for delta in told if isinstance(delta, Sized | Dropped | Held)]


def asked(known: PoolKnowledge, charge_id: str, blocks: range, cached: int | None = None) -> list[Delta]:
    """Decide for `a` by its prediction, which the engine confirms unless `cached` blocks are given."""
    matched = known.matched_tokens(blocks).get("a", 0.0)
    known.decided(charge_id, "a", blocks, matched_tokens=matched)
    return answer(known, charge_id, len(blocks), matched if cached is None else cached * BLOCK)


def full(known: PoolKnowledge) -> PoolKnowledge:
    """Ten prompts of ten blocks each, the first one oldest; the engine had the last one cached when asked again."""
    for number in range(10):
        asked(known, f"c{number}", prompt(number))
    asked(known, "again", prompt(9))
    return known


def pool(capacity: int = 200) -> PoolKnowledge:
    """Knowledge of engine `a`, which claims to hold so many blocks."""
    known = PoolKnowledge(Priors())
    known.engine_seen("a", capacity * BLOCK, 1.0, BLOCK)
    return known


class TestCut:
    """The engine had less than was predicted."""

    def test_a_block_that_next_to_nothing_came_after_was_never_there(self) -> None:
        """A template with tools in front holds another prompt than was hashed: that says nothing of other prompts."""
        known = full(pool(capacity=5000))
        asked(known, "tools", prompt(9), cached=1)
        assert known.matched_tokens(prompt(0)) == {"a": 10 * BLOCK}

    def test_a_missing_block_takes_all_that_was_used_before_it(self) -> None:
        """Prompt 4 was evicted: prompts 0 to 3 are older and gone too; 5 to 9 and the prompt itself stay."""
        known = full(pool())
        asked(known, "x", prompt(4), cached=0)
        asked(known, "y", prompt(3), cached=0)
        for number in range(10):
            held = known.matched_tokens(prompt(number)).get("a", 0.0)
            assert held == (0.0 if number < 3 else 640.0), number

    def test_the_believed_size_falls_and_other_replicas_agree(self) -> None:
        """Half of the way to the 60 blocks used since; who only reads the feed comes to the same profile."""
        known, other = pool(), pool()
        for number in range(10):
            for delta in known.decided(f"c{number}", "a", prompt(number)):
                other.apply(delta)
            answer(known, f"c{number}", 10, 0.0)
        for name in ("again", "x"):
            blocks = prompt(9 if name == "again" else 3)
            known.decided(name, "a", blocks, matched_tokens=640.0)
            other.apply(Held("a", pack(blocks), name, 1.0))
            told = answer(known, name, 10, 640.0 if name == "again" else 128.0)
        assert [(delta.endpoint, delta.left) for delta in told if isinstance(delta, Sized)] == [("a", 70)]
        other.apply(told[0])
        assert known.capacity("a") == other.capacity("a") == pytest.approx(130, abs=4)
        for number in (3, *range(5, 10)):
            assert known.matched_tokens(prompt(number)) == other.matched_tokens(prompt(number)) == {"a": 640.0}
        assert known.held("a") - 10 < other.held("a") <= known.held("a")  # profiles evict in pieces

    def test_an_engine_that_never_reports_keeps_its_profile(self) -> None:
        """Without `--enable-prompt-tokens-details` vLLM reports 0 for every prompt: that is no news of its cache."""
        known = pool()
        for number in range(40):
            assert not asked(known, f"c{number}", prompt(1), cached=0)
        assert known.held("a") == 10
        assert known.capacity("a") == 200

    def test_one_report_of_nothing_is_not_believed(self) -> None:
        """A request for the log-probabilities of its prompt skips the cache; between others it takes nothing out."""
        known = full(pool())
        for number in range(5):
            assert not asked(known, f"x{number}", prompt(3), cached=0)
            assert not asked(known, f"y{number}", prompt(9))
        assert known.held("a") == 100

    def test_a_request_known_to_skip_the_cache_proves_nothing(self) -> None:
        """It was predicted 0 and had 0, whatever the profile holds; twice in a row changes nothing either."""
        known = full(pool())
        for number in range(3):
            known.decided(f"x{number}", "a", prompt(3), matched_tokens=0.0)
            assert not answer(known, f"x{number}", 10, 0.0)
        assert known.held("a") == 100

    def test_a_prompt_still_in_prefill_is_no_eviction(self) -> None:
        """The second of two equal prompts found little because the first was not computed yet."""
        known = full(pool())
        known.decided("first", "a", prompt(20, 20))
        known.decided("second", "a", prompt(20, 20), matched_tokens=1280.0)
        assert not answer(known, "second", 20, 128.0)
        assert not answer(known, "first", 20, 0.0)
        assert known.held("a") == 120

    def test_an_error_within_the_tolerance_is_none(self) -> None:
        """A block of the engine, one of ours and 5 %: the length of a token is a guess."""
        known = pool()
        asked(known, "c", prompt(1, 100))
        assert not asked(known, "d", prompt(1, 100), cached=94)
        assert known.held("a") == 100

    def test_an_answer_without_usage_corrects_nothing(self) -> None:
        """-1 cached tokens are unknown, not none."""
        known = full(pool())
        for number in range(3):
            known.decided(f"x{number}", "a", prompt(3), matched_tokens=640.0)
            assert not answer(known, f"x{number}", 10, -1.0)
        assert known.held("a") == 100


class TestRaise:
    """The engine had more than was predicted."""

    def test_the_believed_size_rises_towards_the_claim_and_no_further(self) -> None:
        """Each report of a prompt that the profile had evicted adds a twentieth; the claim is the end of it."""
        known = pool()
        known.apply(Sized("a", 0.5))
        told = [asked(known, f"c{number}", prompt(number, 20), cached=19) for number in range(20)]
        assert told[0] == [Sized("a", 0.525, -1, 1.0)]
        assert told[-1] == []
        assert known.capacity("a") == 200


class TestShare:
    """The believed share of the claim."""

    @given(st.lists(st.one_of(st.floats(-2, 2).map(lambda x: ("at_most", x)), st.just(("more", 0.0)))))
    def test_any_evidence_keeps_it_between_a_twentieth_and_all(self, evidence: list[tuple[str, float]]) -> None:
        """Whatever was seen, a profile is never empty by principle and never larger than the claim."""
        share = CapacityShare()
        for kind, value in evidence:
            if kind == "more":
                share.more()
            else:
                share.at_most(value)
            assert LEAST_SHARE <= share.share <= 1.0

    @pytest.mark.parametrize(
        ("told", "taken"), [(0.5, 0.5), (7.0, 1.0), (0.001, 0.05), (0.0, 1.0), (float("nan"), 1.0)]
    )
    def test_what_others_tell_is_kept_in_its_bounds(self, told: float, taken: float) -> None:
        """A number that no replica of ours can have come to does no harm."""
        share = CapacityShare()
        share.told(told)
        assert share.share == taken


class TestPrefills:
    """Which requests were over when."""

    def test_a_request_is_over_once_it_ended_before_the_clock_stood_there(self) -> None:
        """It touched blocks at 5 and ended when the clock stood at 8."""
        prefills = Prefills()
        prefills.began("c", 4, 5)
        assert not prefills.over(5, 9)
        prefills.ended("c", 8)
        assert not prefills.over(5, 7)
        assert prefills.over(5, 8)

    def test_the_forgotten_are_over_and_their_number_is_bounded(self) -> None:
        """Requests whose answers were lost must not keep evidence from being believed for ever."""
        prefills = Prefills()
        for number in range(5000):
            prefills.began(f"c{number}", number, number + 1)
        assert len(prefills) == 1024
        assert prefills.over(1, 5000)
        assert not prefills.over(5000, 5000)


@given(st.integers(0, 500), st.floats(0, 40_000), st.floats(0, 40_000), st.floats(8, 1024), st.sampled_from([16, 128]))
def test_a_finding_names_a_block_that_was_held(
    held: int, predicted: float, cached: float, tokens_a_block: float, engine_block: int
) -> None:
    """A block is missing only beyond what was reported and within the profile, and never together with more."""
    found = compare(held, predicted, cached, tokens_a_block, engine_block)
    if found.missing >= 0:
        assert not found.more
        assert 0 <= found.missing < held
        assert cached < predicted
    if found.more:
        assert cached > predicted
    assert compare(held, held * tokens_a_block, held * tokens_a_block, tokens_a_block, engine_block) == Finding()


class LruEngine:
    """An engine's block pool that holds `share` of what the engine claims; some requests run at the same time."""

    def __init__(self, claimed: int, share: float, running: int) -> None:
        self._pool = BlockPool(int(claimed * share) + 1)
        self._most = running
        self._running: deque[tuple[str, list[int], list[int], int]] = deque()

    def prefill(self, charge_id: str, blocks: list[int]) -> tuple[int, Iterator[tuple[str, list[int], int]]]:
        """Blocks found cached; and what is finished for it: charge, blocks, blocks that were found cached."""
        found = self._pool.lookup(blocks, len(blocks))
        self._pool.touch(found)
        taken = found + self._pool.take(len(blocks) - len(found))
        for number in range(len(found), len(blocks)):
            self._pool.register(taken[number], blocks[number])
        self._running.append((charge_id, blocks, taken, len(found)))
        return len(found), self._finished()

    def _finished(self) -> Iterator[tuple[str, list[int], int]]:
        while len(self._running) > self._most:
            charge_id, blocks, taken, cached = self._running.popleft()
            self._pool.release(taken)
            yield charge_id, blocks, cached


def errors(share: float, running: int, seed: int, *, reported: bool = True) -> list[float]:
    """Errors of the predicted cached tokens as parts of the prompt, in the order of 3,000 requests.

    120 documents behind 12 shared beginnings, asked for at random: together 0.9 of what the engine claims to hold.
    """
    rng, claimed = random.Random(seed), 4000
    known, engine = pool(claimed), LruEngine(claimed, share, running)
    documents = [[*prompt(n % 12, 6), *prompt(1000 + n, rng.randrange(20, 34))] for n in range(120)]
    seen = []
    for number in range(3000):
        blocks = rng.choice(documents)
        matched = known.matched_tokens(blocks).get("a", 0.0)
        known.decided(f"c{number}", "a", blocks, matched_tokens=matched)
        assert known.held("a") <= known.capacity("a") <= claimed
        cached, finished = engine.prefill(f"c{number}", blocks)
        seen.append(abs(matched - cached * BLOCK) / (len(blocks) * BLOCK))
        for charge_id, done, found in finished:
            answer(known, charge_id, len(done), found * BLOCK if reported else -1.0)
    return seen


@pytest.mark.parametrize("running", [0, 8])
@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_predictions_come_to_agree_with_an_engine_that_holds_less_than_it_claims(share: float, running: int) -> None:
    """In steady state the median error is at most 5 % of the prompt and the mean 10 %, whatever is really held."""
    settled = errors(share, running, seed=11)[1000:]
    assert median(settled) <= 0.05
    assert sum(settled) / len(settled) <= 0.1


def test_without_reports_the_claim_is_all_there_is() -> None:
    """The same engine that reports nothing is mispredicted by half of the prompt: the reports make the difference."""
    settled = errors(0.3, 0, seed=11, reported=False)[1000:]
    assert sum(settled) / len(settled) > 0.4


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.2, 1.0), st.integers(0, 10))
def test_the_believed_size_is_never_far_from_the_true_one(seed: int, share: float, running: int) -> None:
    """Any true size from a fifth of the claim on, any order of requests: the profile stays within its capacity."""
    settled = errors(share, running, seed)[1500:]
    assert median(settled) <= 0.05

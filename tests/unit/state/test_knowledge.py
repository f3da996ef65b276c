"""What a worker knows of a pool, changed by deltas alone."""

import pytest

from extproc.state import feed
from extproc.state.feed import Answered, Dropped, Held, Measured, Sized, Turned
from extproc.state.knowledge import PoolKnowledge, Priors


def knowledge(kv_tokens: int = 6400) -> PoolKnowledge:
    """Blocks of 64 tokens at 4 bytes a token."""
    return PoolKnowledge(Priors(kv_tokens=kv_tokens))


class TestEngineSeen:
    """What the engine's own page changes."""

    def test_a_new_start_time_empties_the_profile(self) -> None:
        """A restarted engine has an empty cache (case A5): the next match there is nothing."""
        known = knowledge()
        known.engine_seen("a", 0, started_at=100.0)
        known.apply(Held("a", feed.pack([1, 2])))
        known.engine_seen("a", 0, started_at=100.0)
        assert known.matched_tokens([1, 2]) == {"a": 128.0}
        known.engine_seen("a", 0, started_at=200.0)
        assert known.matched_tokens([1, 2]) == {}

    def test_an_engine_that_never_told_its_start_restarts_too(self) -> None:
        """Its counters go back, by which the keeper dates a start: that is its second life, not its first."""
        known = knowledge()
        known.engine_seen("a", 0, started_at=0.0)
        known.apply(Held("a", feed.pack([1, 2])))
        known.engine_seen("a", 0, started_at=200.0)
        assert known.matched_tokens([1, 2]) == {}

    def test_the_first_start_that_is_told_of_an_engine_nobody_had_read_keeps_its_profile(self) -> None:
        """What was decided before the keeper's first scrape is in the cache of that life."""
        known = knowledge()
        known.apply(Held("a", feed.pack([1, 2])))
        known.engine_seen("a", 0, started_at=200.0)
        assert known.matched_tokens([1, 2]) == {"a": 128.0}

    def test_capacity_follows_the_engine(self) -> None:
        """128 tokens of KV cache hold two blocks of 64."""
        known = knowledge()
        known.engine_seen("a", 128, started_at=1.0)
        known.apply(Held("a", feed.pack([1, 2, 3, 4])))
        assert known.held("a") == 2

    def test_an_absurd_cache_size_is_not_believed(self) -> None:
        """A profile stays within a worker's memory whatever an engine says it can hold."""
        known = PoolKnowledge(Priors())
        known.engine_seen("a", 10**15, 0.0)
        known.apply(Held("a", feed.pack(range(1_100_000))))
        assert known.held("a") <= 1_020_000


class TestCorrections:
    """What the owner of a decision learns when it was not followed."""

    def test_only_blocks_that_were_new_are_dropped(self) -> None:
        """A request that failed on a warm endpoint takes back what it would have added, not what was there."""
        known = knowledge()
        known.apply(Held("a", feed.pack([1, 2])))
        known.decided("c", "a", [1, 2, 3])
        told = known.apply(Answered("c", "", -1, -1, -1, -1))
        assert told == [Dropped("a", feed.pack([3]))]
        assert known.matched_tokens([1, 2, 3]) == {"a": 128.0}

    def test_who_serves_may_be_told_before_the_answer_is_over(self) -> None:
        """A gateway that names the endpoint before its log entry comes must not use up what that is compared with."""
        known = knowledge()
        known.decided("c", "a", [1, 2], turn=b"t" * 16)
        assert not known.apply(Answered("c", "a", -1, -1, -1, -1))
        told = known.apply(Answered("c", "a", 100, 0.1, 512, 128, output_tokens=10))
        assert Turned(b"t" * 16, "a", 128, 10) in told

    def test_an_answer_from_the_picked_endpoint_corrects_nothing(self) -> None:
        """The usual case publishes nothing of the profile."""
        known = knowledge()
        known.decided("c", "a", [1, 2])
        assert not known.apply(Answered("c", "a", 100, 0.1, -1, -1))
        assert known.held("a") == 2

    def test_decisions_kept_for_correction_are_bounded(self) -> None:
        """Ten thousand decisions without an answer keep no more than the newest 4,096."""
        known = knowledge()
        for number in range(10_000):
            known.decided(f"c{number}", "a", [number])
        assert len(known._charges) == 4096

    def test_their_blocks_are_bounded_too(self) -> None:
        """A few decisions over very long prompts must not fill the memory, and the newest can still be corrected."""
        known = knowledge()
        for number in range(30):
            known.decided(f"c{number}", "a", range(number * 50_000, (number + 1) * 50_000))
        assert len(known._charges) == 20
        assert known.apply(Answered("c29", "b", -1, -1, -1, -1))
        assert not known.apply(Answered("c9", "b", -1, -1, -1, -1))


class TestRetain:
    """Endpoints that leave."""

    def test_a_leaver_takes_everything_along(self) -> None:
        """Profile, rate and start time go; the others stay, and their speed stands in for what is not known."""
        known = knowledge()
        for name, ttft_s in (("a", 1.0), ("b", 2.0)):
            known.apply(Held(name, feed.pack([1])))
            for _ in range(20):
                known.apply(Answered("", name, 4000, ttft_s, -1, -1))
        assert known.rate("a") == 4000.0
        known.retain(["b"])
        assert known.rate("a") == known.rate("b") == 2000.0
        known.retain([])
        assert known.rate("a") == 8000.0
        known.apply(Held("b", feed.pack([1])))
        assert known.matched_tokens([1]) == {"b": 64.0}

    def test_its_turns_go_with_it(self) -> None:
        """A conversation that it answered is cached nowhere now."""
        known = knowledge()
        known.apply(Turned(b"t", "a", 100.0, 10.0))
        known.engine_seen("a", 0, 1.0)
        known.retain([])
        assert known.continued(b"t") is None


class TestLives:
    """A restarted engine has an empty cache, in every worker and whatever order the news comes in."""

    def test_deltas_of_an_earlier_life_are_passed_over(self) -> None:
        """Who joins after a restart reads what was decided before it; none of that is cached any more."""
        known = knowledge()
        known.engine_seen("a", 0, started_at=200.0)
        known.apply(Held("a", feed.pack([1]), "c", 100.0))
        known.apply(Sized("a", 0.2, -1, 100.0))
        known.apply(Turned(b"t", "a", 64.0, 9.0, 100.0))
        assert known.held("a") == 0
        assert known.capacity("a") == 100
        assert known.continued(b"t") is None

    def test_a_delta_of_a_later_life_empties_the_profile(self) -> None:
        """Another replica saw the restart first: its decision tells it."""
        known = knowledge()
        known.apply(Held("a", feed.pack([1, 2]), "c", 100.0))
        known.apply(Turned(b"t", "a", 64.0, 9.0, 100.0))
        known.apply(Held("a", feed.pack([3]), "d", 200.0))
        assert (known.held("a"), known.continued(b"t")) == (1, None)
        known.engine_seen("a", 0, started_at=200.0)
        assert known.matched_tokens([3]) == {"a": 64.0}

    def test_an_answer_to_an_earlier_life_corrects_nothing(self) -> None:
        """What was missing before the restart says nothing of the cache after it."""
        known = knowledge()
        known.engine_seen("a", 6400, started_at=100.0)
        for number in (1, 2, 3):
            known.decided(f"c{number}", "a", [1, 2, 3, 4, 5, 6], matched_tokens=384.0)
        known.engine_seen("a", 6400, started_at=200.0)
        known.apply(Held("a", feed.pack([7, 8]), "d", 200.0))
        known.apply(Answered("c1", "a", -1, -1, 1536, 384, cached_tokens=64))
        assert all(isinstance(delta, Measured) for delta in known.apply(Answered("c3", "a", -1, -1, 1536, 384, 0, 1)))
        assert (known.held("a"), known.capacity("a")) == (2, 100)

    def test_a_new_life_is_believed_its_claim_again(self) -> None:
        """What the old process kept free for other things says nothing of the new one."""
        known = knowledge()
        known.engine_seen("a", 6400, started_at=100.0)
        known.apply(Sized("a", 0.2, -1, 100.0))
        assert known.capacity("a") == 20
        known.engine_seen("a", 6400, started_at=200.0)
        assert known.capacity("a") == 100

    def test_an_engine_that_caches_nothing_has_no_profile(self) -> None:
        """Prefix caching switched off, or asleep: 0 is predicted, and decisions add nothing until it caches again."""
        known = knowledge()
        known.apply(Held("a", feed.pack([1, 2])))
        known.apply(Turned(b"t", "a", 128.0, 9.0))
        known.engine_seen("a", 0, 0.0, caching=False)
        assert known.decided("c", "a", [1, 2], turn=b"u") == ()
        known.apply(Answered("c", "a", -1, -1, 512, 128, cached_tokens=0, output_tokens=5))
        assert known.matched_tokens([1, 2], b"u") == known.matched_tokens([1, 2], b"t") == {}
        known.engine_seen("a", 0, 0.0, caching=True)
        assert known.decided("d", "a", [1, 2])
        assert known.matched_tokens([1, 2]) == {"a": 128.0}


class TestAge:
    """What time makes untrue."""

    def test_what_nothing_used_for_its_time_to_live_is_forgotten(self) -> None:
        """With a life of 80 s, blocks go 80 to 90 s after their last use; those used meanwhile stay."""
        known = knowledge()
        held = {}
        for now in range(0, 100, 10):
            if now == 0:
                known.apply(Held("a", feed.pack([1, 2])))
                known.apply(Held("b", feed.pack([9])))
            if now == 40:
                known.apply(Held("a", feed.pack([1])))
            known.age(float(now), ttl_s=80.0)
            held[now] = (known.held("a"), known.held("b"))
        assert held[70] == (2, 1)
        assert held[90] == (1, 0)

    def test_an_endpoint_out_of_reach_for_a_minute_loses_its_profile(self) -> None:
        """Nobody knows what happened to it meanwhile; a shorter gap is a network's."""
        known = knowledge()
        for name in "ab":
            known.apply(Held(name, feed.pack([1])))
        for now in range(0, 120, 10):
            known.age(float(now), unreachable=["a"] if now < 50 or now >= 60 else [])
            assert known.held("a") == 1, now
        known.age(120.0, unreachable=["a"])
        assert (known.held("a"), known.held("b")) == (0, 1)

    def test_an_endpoint_that_was_slow_and_is_silent_is_tried_again(self) -> None:
        """Ten seconds without an answer: the rate goes half way back to what a whole window of answers agreed on."""
        known = knowledge()
        for rate, answers in ((16_000.0, 64), (1_000.0, 12)):
            for number in range(answers):
                work = 300.0 + 100.0 * (number % 40)
                known.apply(Answered("c", "a", work, work / rate, -1, -1))
        assert known.rate("a") == pytest.approx(1_000.0, rel=0.01)
        for now in range(0, 14, 2):
            known.age(float(now))
            assert known.rate("a") == pytest.approx(4_000.0 if now >= 10 else 1_000.0, rel=0.01)


class TestQueue:
    """What the engine's own queue stands for."""

    def test_waiting_requests_count_as_the_mean_of_what_was_answered(self) -> None:
        """Uncached tokens by the engine's report, and by the decision where it reports none."""
        known = knowledge()
        assert known.queue_tokens("a", 5) == 0.0
        for number in range(100):
            known.apply(Answered(f"c{number}", "a", -1, -1, 4000, 1000, cached_tokens=400))
            known.apply(Answered(f"d{number}", "b", 900, 0.1, 4000, -1, backlog_tokens=500))
        assert known.queue_tokens("a", 5) == pytest.approx(3000.0)
        assert known.queue_tokens("b", 2) == pytest.approx(800.0)
        assert known.queue_tokens("a", -1) == 0.0


def test_an_engine_whose_cache_shrank_holds_no_more_than_that() -> None:
    """It came back with a tenth of its cache: the profile is cut at once, not with the next prompt."""
    known = PoolKnowledge(Priors())
    known.engine_seen("a", 64_000, 0.0, 16)
    for number in range(100):
        known.apply(Held("a", feed.pack(range(100 * number + 1, 100 * number + 11))))
    known.engine_seen("a", 6_400, 0.0, 16)
    assert known.held("a") <= known.capacity("a") == 100

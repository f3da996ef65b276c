"""Prefill speed and overhead: under noise, against simulated engines, and when an endpoint changes."""

import itertools
import math
import random
from collections.abc import Iterator
from statistics import median

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.sim.engine import Engine
from extproc.sim.sequence import Sequence
from extproc.sim.settings import EngineSettings
from extproc.state.rate import RateEstimator, predict_ttft_ms


def fed(samples: list[tuple[float, float]], prior: float = 8000.0) -> RateEstimator:
    """An estimator that saw these (work, TTFT) pairs."""
    estimator = RateEstimator(prior)
    for work, ttft in samples:
        estimator.observe(work, ttft)
    return estimator


class TestRate:
    """TTFT = overhead + work / rate."""

    def test_the_prior_holds_until_eight_answers_were_seen(self) -> None:
        """Seven samples change nothing."""
        assert fed([(1000.0 * i, 0.1 * i) for i in range(1, 8)]).rate == 8000.0

    @pytest.mark.parametrize("true", [2_000.0, 20_000.0, 60_000.0])
    def test_the_rate_is_found_under_noise_and_a_constant_overhead(self, true: float) -> None:
        """Within 15 % of the truth with 40 ms overhead, 10 % noise and every tenth answer three times late."""
        rng = random.Random(5)
        samples = []
        for number in range(64):
            work = rng.uniform(500, 16_000)
            late = 3.0 if number % 10 == 0 else 1.0
            samples.append((work, (0.04 + work / true) * rng.uniform(0.95, 1.05) * late))
        estimator = fed(samples)
        assert estimator.rate == pytest.approx(true, rel=0.15)

    def test_the_overhead_is_what_short_prompts_take(self) -> None:
        """30 ms besides 20,000 tokens a second: the bound takes a part of it for prefill, the prediction is right."""
        estimator = fed([(work, 0.03 + work / 20_000) for work in range(100, 4900, 100)])
        assert 16_000.0 < estimator.rate < 20_000.0
        assert 0.01 < estimator.overhead_s < 0.03
        assert predict_ttft_ms(estimator.rate, estimator.overhead_s, 1000.0, 1000.0) == pytest.approx(130.0, rel=0.05)

    def test_what_short_prompts_take_counts_for_more_than_the_spread_of_long_ones(self) -> None:
        """Long ones come up to 200 ms late by chance; a prompt of 200 tokens is predicted within a tenth."""
        rng = random.Random(9)
        samples = []
        for number in range(96):
            work = 200.0 if number % 3 == 0 else rng.uniform(2_000, 20_000)
            samples.append((work, 0.005 + work / 20_000 + (rng.uniform(0, 0.2) if number % 3 else 0.0)))
        estimator = fed(samples)
        predicted = predict_ttft_ms(estimator.rate, estimator.overhead_s, 0.0, 200.0)
        assert predicted == pytest.approx(15.0, rel=0.1)

    def test_equal_work_gives_a_lower_bound(self) -> None:
        """Without spread the ratio stands in, which never exceeds the truth."""
        rate = fed([(2000.0, 0.04 + 2000 / 20_000)] * 10).rate
        assert 2000 / 0.15 < rate < 20_000

    @pytest.mark.parametrize("before", [8, 64, 256])
    def test_one_wrong_report_is_not_believed(self, before: int) -> None:
        """Honest answers at 8,000 tokens a second, then 60,000 tokens that seem to have taken a tenth of a second."""
        honest = [(1000.0 + 10 * number, (1000.0 + 10 * number) / 8000) for number in range(before)]
        assert fed([*honest, (60_000.0, 0.1), *honest[:7]]).rate == pytest.approx(8000.0, rel=0.01)

    def test_short_prompts_say_nothing_of_the_rate(self) -> None:
        """Work under 256 tokens is all overhead."""
        estimator = fed([(100.0, 5.0)] * 50)
        assert estimator.rate == 8000.0
        assert estimator.overhead_s == pytest.approx(5.0, rel=0.01)

    def test_the_estimate_stays_within_twenty_times_the_prior(self) -> None:
        """A broken clock cannot make an endpoint look infinitely fast or slow."""
        assert fed([(2000.0, 1e-6)] * 20).rate == 8000.0 * 20
        assert fed([(2000.0, 1e6)] * 20).rate == 8000.0 / 20

    def test_a_backlog_guessed_too_long_is_not_taken_for_speed(self) -> None:
        """Half of the answers had three times the backlog in front that the ledger's guess says was there."""
        estimator = RateEstimator(8000.0)
        for number in range(96):
            own = 500.0 + 100.0 * (number % 17)
            backlog = 6.0 * own if number % 2 else 0.0
            estimator.observe(own + backlog, (own + backlog / 3) / 20_000, backlog)
        assert estimator.rate == pytest.approx(20_000.0, rel=0.05)


class TestChange:
    """An endpoint that is not what it was."""

    @staticmethod
    def answers(rate: float, count: int, seed: int = 3) -> Iterator[tuple[float, float]]:
        """Answers of an endpoint of this speed, with 5 ms overhead and 10 % noise."""
        rng = random.Random(seed)
        for _ in range(count):
            work = rng.uniform(300, 8000)
            yield work, (0.005 + work / rate) * rng.uniform(0.95, 1.05)

    def test_a_slowed_endpoint_is_believed_slow_within_a_dozen_answers_and_fast_again_as_soon(self) -> None:
        """A fourth of the speed, then the old one: each is learnt within a dozen answers, not within the window."""
        estimator = fed(list(self.answers(20_000.0, 64)))
        for work, ttft in self.answers(5_000.0, 12):
            estimator.observe(work, ttft)
        assert estimator.rate == pytest.approx(5_000.0, rel=0.2)
        for work, ttft in self.answers(20_000.0, 12):
            estimator.observe(work, ttft)
        assert estimator.rate == pytest.approx(20_000.0, rel=0.2)

    def test_three_late_answers_change_little(self) -> None:
        """A hiccup of ten times the TTFT is no new speed."""
        estimator = fed(list(self.answers(20_000.0, 61)))
        for work, ttft in self.answers(2_000.0, 3):
            estimator.observe(work, ttft)
        assert estimator.rate == pytest.approx(20_000.0, rel=0.1)

    def test_silence_goes_half_way_back_to_what_it_was(self) -> None:
        """What is believed slow gets no requests: without this it would be slow for ever."""
        estimator = fed(list(self.answers(20_000.0, 64)))
        for work, ttft in self.answers(1_250.0, 12):
            estimator.observe(work, ttft)
        slow = estimator.rate
        estimator.relax()
        assert estimator.rate == pytest.approx(math.sqrt(slow * 20_000.0), rel=0.05)

    def test_an_endpoint_that_was_never_faster_stays_as_it_is(self) -> None:
        """The prior is no memory: a slow endpoint that is idle must not come to look like it."""
        estimator = fed(list(self.answers(1_000.0, 20)))
        before = estimator.rate
        estimator.relax()
        assert estimator.rate == before == pytest.approx(1_000.0, rel=0.1)


def simulated(load: float, believed: RateEstimator, requests: int = 1200) -> Iterator[tuple[float, float, float]]:
    """Uncached tokens, ledger's backlog and TTFT of Poisson arrivals at one engine, as the answers finish."""
    rng, hashes, settings = random.Random(7), itertools.count(1), EngineSettings(blocks=60_000)
    engine, charged = Engine(settings), dict[int, tuple[float, float]]()
    gap = 2040.0 / settings.prefill_tokens_per_s / load  # 1,912 tokens of prompt and 128 of answer in the mean
    now = bucket = 0.0

    def answers(until: float) -> Iterator[tuple[float, float, float]]:
        for sequence in engine.advance(until):
            if sequence.finished is not None:
                uncached, backlog = charged.pop(sequence.hashes[0])
                yield uncached, backlog, sequence.first_token_at - sequence.arrived_at

    for _ in range(requests):
        pause = rng.expovariate(1 / gap)
        now, bucket = now + pause, max(0.0, bucket - pause * believed.rate)
        yield from answers(now)
        prompt, output = min(20_000, int(rng.lognormvariate(7.0, 1.05)) + 20), 1 + int(rng.expovariate(1 / 127))
        blocks = [next(hashes) for _ in range((prompt + output) // 16)]
        charged[blocks[0]] = (prompt, bucket)
        bucket += prompt
        engine.submit([Sequence(prompt, output, blocks, streamed=False)], now)
    yield from answers(math.inf)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_ttft_of_a_simulated_engine_is_predicted(load: float) -> None:
    """The rate is at most the engine's and at least three quarters of it, and TTFT is predicted within a tenth."""
    believed = RateEstimator(8000.0)
    errors = []
    for number, (uncached, backlog, ttft_s) in enumerate(simulated(load, believed)):
        predicted_ms = predict_ttft_ms(believed.rate, believed.overhead_s, backlog, uncached)
        if number >= 200:
            errors.append(abs(predicted_ms / 1000.0 - ttft_s) / ttft_s)
        believed.observe(uncached + backlog, ttft_s, backlog)
    assert 15_000.0 <= believed.rate <= 20_000.0
    assert median(errors) <= 0.1


@given(st.lists(st.tuples(st.floats(), st.floats(), st.floats()), max_size=100))
@example([(1e308, 1e-300, 0.0)] * 16)
@example([(1e308, 5e-324, 0.0), (300.0, 1e308, 0.0)] * 16)
def test_a_rate_stays_a_number_whatever_the_feed_holds(answers: list[tuple[float, float, float]]) -> None:
    """A rate that is no number, or not positive, would make every reservation of the pool fail."""
    estimator = RateEstimator(8000.0)
    for work, ttft, backlog in answers:
        estimator.observe(work, ttft, backlog)
    assert 400.0 <= estimator.rate <= 160_000.0
    assert 0.0 <= estimator.overhead_s < math.inf

"""What workers measure: every unit once, sums that do not depend on who measured, bytes that nobody need trust."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.config_rollouts import Drift, Gates
from extproc.rollout.evidence import Evidence, Recorder, Sample, combined, encode, merge
from extproc.rollout.repeats import UNITS, Repeats, Seen, overlap
from extproc.rollout.state import Rollout
from tests import canaries
from tests.canaries import Traffic, plan, started

ROLLOUT = started(plan(steps=(0.25, 1.0)))


def good(unit: float, version: str = "base", ttft_s: float = 0.2, *, continued: bool = False) -> Sample:
    """A whole answer."""
    return Sample(
        version=version,
        unit=unit,
        uncached_tokens=500.0,
        streamed=True,
        ttft_s=ttft_s,
        tpot_s=0.02,
        output_tokens=100.0,
        answered=True,
        failed=False,
        abandoned=False,
        broken=False,
        continued=continued,
    )


def bad(unit: float, version: str = "base", *, continued: bool = False) -> Sample:
    """A request that its version failed."""
    return msgspec.structs.replace(
        good(unit, version, -1.0, continued=continued), answered=False, failed=True, tpot_s=-1.0, output_tokens=-1.0
    )


def recorded(samples: Sequence[Sample], rollout: Rollout = ROLLOUT, now: float = 100.0) -> Evidence:
    """What one worker measured of these."""
    recorder = Recorder(rollout)
    for sample in samples:
        recorder.add(sample, now)
    return merge([recorder.encode()])


def test_answers_and_rates_are_counted_by_version() -> None:
    """Each end counts where it belongs: a failed request is at risk of errors only, an abandoned one of no cut."""
    gone = msgspec.structs.replace(good(0.3), abandoned=True)
    cut = msgspec.structs.replace(good(0.4, "canary"), broken=True)
    told = recorded([good(0.1), bad(0.2, "canary"), gone, cut])
    assert told.answers == [2, 2]
    assert told.risks == {"errors": [2, 1, 2, 0], "abandons": [1, 0, 2, 1], "broken": [1, 1, 1, 0]}


def test_what_says_nothing_of_the_comparison_is_left_out() -> None:
    """Other versions, refusals that are nobody's fault, and requests that began while caches were cold."""
    neither = msgspec.structs.replace(good(0.1), answered=False)
    assert recorded([good(0.1, "third"), neither]).answers == [0, 0]
    assert recorded([good(0.1)], now=9.0).answers == [0, 0]
    long = msgspec.structs.replace(good(0.1), duration_s=95.0)
    assert recorded([long]).answers == [0, 0]
    assert recorded([msgspec.structs.replace(long, duration_s=85.0)]).answers == [0, 1]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e308])
@pytest.mark.parametrize("field", ["uncached_tokens", "ttft_s", "tpot_s", "output_tokens", "duration_s"])
def test_what_comes_from_outside_as_no_proper_number_ends_nothing(field: str, odd: float) -> None:
    """The access log is read for learning too, which must go on."""
    sample = msgspec.structs.replace(good(0.1), **{field: odd})
    assert recorded([sample, good(0.2)]).unread == 0


def test_conversations_from_before_the_step_are_not_compared() -> None:
    """They stay on the baseline whatever their unit is: only those that begin in the step are divided by chance."""
    told = recorded([good(0.1, continued=True), good(0.1), good(0.2), good(0.2, continued=True)])
    assert told.answers == [0, 2]


def test_a_conversation_that_began_while_caches_were_cold_counts_later() -> None:
    """Its first answer does not count, and yet it began in the step."""
    recorder = Recorder(ROLLOUT)
    recorder.add(good(0.1), 5.0)
    recorder.add(good(0.1, continued=True), 50.0)
    assert merge([recorder.encode()]).answers == [0, 1]


def test_one_session_is_one_value_and_one_event_however_long_it_is() -> None:
    """A session of a thousand slow or failed answers wins no more than a single one would."""
    rng = np.random.default_rng(1)
    units = rng.random(400)
    others = [good(unit, ttft_s=float(rng.lognormal(-2.0, 0.5))) for unit in units]
    heavy = [good(0.123, "canary", 60.0) for _ in range(1000)] + [bad(0.123, "canary")] * 1000
    order = rng.permutation(1400)
    told = recorded([(others + heavy[:1000])[index] for index in order])
    assert max(told.counted["ttft"].counts.values()) == 1
    alone = recorded([*others[:30], bad(0.123, "canary"), *others[30:]])
    repeated = recorded([each for other in others for each in (other, bad(0.123, "canary"))])
    assert sum(found for _, found in repeated.exposed["errors"]) == 1
    assert max(map(max, repeated.logs["errors"])) <= max(map(max, alone.logs["errors"])) + 1e-6


def test_ties_never_speak_against_the_canary() -> None:
    """Where all values are the same, and no tolerance, no bet on the canary being slower wins."""
    gates = Gates(length=Drift(tolerance=0.0))
    rollout = started(plan(steps=(0.5, 1.0), gates=gates))
    samples = [good((index + 0.5) / 400, "canary" if index % 2 else "base") for index in range(400)]
    told = recorded(samples, rollout)
    for gate in ("length_longer", "length_shorter"):
        assert max(map(sum, told.logs[gate])) == 0.0 > min(map(sum, told.logs[gate]))


def test_windows_go_on_beyond_the_hold_time_and_end() -> None:
    """Eight in the hold time, then longer ones; the last one has no end, and a clock that went back does not matter."""
    recorder = Recorder(ROLLOUT)
    numbers = [recorder._window(at * 600.0) for at in (-1.0, 0.0, 0.99, 1.0, 1.3, 3.0, 1e6)]
    assert numbers == [0, 0, 7, 8, 9, 12, 15]


def _parts(seed: int, requests: int) -> tuple[list[bytes], bytes]:
    """Parts of four workers, and one of a worker that saw everything."""
    rng = np.random.default_rng(seed)
    several, one = [Recorder(ROLLOUT) for _ in range(4)], Recorder(ROLLOUT)
    for now, worker, sample in canaries.samples(rng, ROLLOUT, Traffic(requests=requests, sticky=True)):
        several[worker].add(sample, now)
        one.add(sample, now)
    return [each.encode() for each in several], one.encode()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 800))
def test_the_order_and_grouping_of_parts_do_not_matter(seed: int, requests: int) -> None:
    """A sum is a sum, whoever adds first; and answers, rates and percentiles are those of one worker that saw all."""
    parts, one = _parts(seed, requests)
    first, second, third, fourth = (merge([part]) for part in parts)
    left = combined(combined(combined(first, second), third), fourth)
    right = combined(first, combined(second, combined(third, fourth)))
    mixed = combined(combined(fourth, second), combined(third, first))
    for other in (right, mixed, merge(parts)):
        assert _near(msgspec.to_builtins(left), msgspec.to_builtins(other))
    whole = merge([one])
    assert (left.answers, left.risks, left.values) == (whole.answers, whole.risks, whole.values)


def _near(one: object, other: object) -> bool:
    """Whether two trees are the same but for the rounding of sums."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_near(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_near, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
    return one == other


def test_bytes_say_what_was_measured_in_a_few_kibibytes() -> None:
    """What was encoded reads back as it was; a long epoch's part stays small."""
    rng, recorder = np.random.default_rng(2), Recorder(ROLLOUT)
    for now, _, sample in canaries.samples(rng, ROLLOUT, Traffic(requests=6000)):
        recorder.add(sample, now * 5.0)
    part = recorder.encode()
    assert len(part) < 12_000
    assert merge([encode(merge([part]))]) == merge([part])


@given(st.binary(max_size=300))
def test_parts_that_cannot_be_read_are_left_out_and_counted(garbage: bytes) -> None:
    """Whatever stands in the store, the rest of the evidence counts."""
    part = Recorder(ROLLOUT).encode()
    told = merge([part, garbage, part])
    assert told.parts + told.unread == 3 or told.parts >= 2


@pytest.mark.parametrize(
    "broken",
    [
        Evidence(form=2),
        Evidence(answers=[1, -1]),
        Evidence(answers=[1]),
        Evidence(logs={"errors": [[math.nan]]}),
        Evidence(logs={"errors": [[math.inf]]}),
        Evidence(logs={"errors": [[0.0]] * 17}),
        Evidence(risks={"errors": [1, 2, 3]}),
        Evidence(values={"ttft": ({10**6: 1}, {})}),
        Evidence(counted={"errors": Repeats(UNITS, {5: -1})}),
    ],
)
def test_parts_that_make_no_sense_are_left_out(broken: Evidence) -> None:
    """Negative counts, logs that are no numbers, other forms."""
    told = merge([encode(broken), Recorder(ROLLOUT).encode()])
    assert (told.parts, told.unread) == (1, 1)


def test_units_that_count_in_several_workers_are_known_by_a_sample() -> None:
    """Every unit at each of four workers counts four times over; half of them at two: between one and two."""
    rng = np.random.default_rng(3)
    units = [int(each * UNITS) for each in rng.random(5000)]
    parts = [Repeats(UNITS, {}) for _ in range(4)]
    for unit in units:
        for part in parts:
            part.add(unit)
    assert overlap(merge_repeats(parts)) == 4.0
    halves = [Repeats(UNITS, {}) for _ in range(2)]
    for index, unit in enumerate(units):
        halves[0].add(unit)
        if index % 2:
            halves[1].add(unit)
    assert 1.4 < overlap(merge_repeats(halves)) < 1.9
    assert overlap(Repeats()) == 1.0


def merge_repeats(parts: Sequence[Repeats]) -> Repeats:
    """The sum of several, through what is published."""
    return merge(encode(Evidence(counted={"x": each})) for each in parts).counted["x"]


def test_what_was_seen_is_forgotten_only_when_very_much_else_was() -> None:
    """Memory is bounded, and the last 32,768 units are always known."""
    seen = Seen()
    for unit in range(200_000):
        seen.add(unit)
    assert all(unit in seen for unit in range(200_000 - (1 << 15), 200_000))
    assert 0 not in seen

"""Gates on simulated canaries: equal ones pass, worse ones fail by the right gate, better ones never do."""

import math
from collections import Counter

import msgspec
import numpy as np
import pytest

from extproc.config_rollouts import Drift, Gates, Latency, Rate
from extproc.rollout.evidence import Evidence, Recorder, Sample, merge
from extproc.rollout.gates import Gate, Judgement, budget, judge
from extproc.rollout.preview import preview
from tests import canaries
from tests.canaries import Fault, Traffic, looks, plan, rolled, started

RUNS = 300
STRICT = Gates(
    ttft=Latency(tolerance=0.0),
    tpot=Latency(tolerance=0.0),
    errors=Rate(tolerance=0.0),
    abandons=Rate(tolerance=0.0),
    broken=Rate(tolerance=0.0),
    length=Drift(tolerance=0.0),
)
FAULTS = {
    "ttft": Fault(ttft=1.3),
    "tpot": Fault(tpot=1.3),
    "errors": Fault(errors=0.02),
    "broken": Fault(broken=0.025),
    "abandons": Fault(abandons=0.05),
    "length_longer": Fault(length=1.5),
    "length_shorter": Fault(length=1 / 1.5),
}


def most(runs: int, chance: float) -> int:
    """Failures that so many runs have with all but a chance of one in ten thousand, each with this one."""
    left, count = 1.0, 0
    while left > 1e-4:
        left -= math.comb(runs, count) * chance**count * (1.0 - chance) ** (runs - count)
        count += 1
    return count


@pytest.mark.parametrize(("turns", "sticky"), [(1.0, True), (5.0, True), (5.0, False)])
def test_equal_canaries_are_promoted(turns: float, sticky: bool) -> None:
    """Heavy tails, sessions with ways of their own, times that rise and fall, four workers, many looks.

    No more of them fail than `false_alarms` allows, and the others are promoted.
    """
    runs, traffic = RUNS // 3, Traffic(requests=500, turns=turns, sticky=sticky)
    settings, phases = plan(steps=(0.1, 0.5, 1.0), false_alarms=0.1, min_samples=5), Counter[str]()
    for seed in range(runs):
        phases[rolled(np.random.default_rng(seed), settings, traffic)[0].phase] += 1
    failed = phases["rolled_back"]
    assert failed <= most(runs, 0.1)
    assert phases["promoted"] >= 0.95 * (runs - failed)


@pytest.mark.parametrize("sticky", [True, False])
def test_evidence_against_equal_canaries_is_as_rare_as_ville_says(sticky: bool) -> None:
    """Without any tolerance: the chance that a gate's e-value ever comes to x is at most 1 / x."""
    runs, highest = 80, Counter[tuple[str, int]]()
    for seed in range(runs):
        rollout = started(plan(steps=(0.2, 1.0), gates=STRICT))
        best: dict[str, float] = {}
        for _, judgement in looks(np.random.default_rng(seed), rollout, Traffic(requests=800, sticky=sticky)):
            for gate in judgement.gates:
                best[gate.name] = max(best.get(gate.name, -math.inf), gate.evidence)
        highest.update((name, x) for name, value in best.items() for x in (4, 20) if 10.0**value >= x)
    assert len(judgement.gates) == 9
    for (name, x), count in highest.items():
        assert count <= most(runs, 1.0 / x), name
    assert highest, "bets that never win anything find nothing either"


@pytest.mark.parametrize("name", FAULTS)
def test_a_worse_canary_fails_by_the_gate_of_what_is_worse(name: str) -> None:
    """At 5 %, with a thousand answers of the canary in sessions of one turn and of two."""
    for turns in (1.0, 2.0):
        failed = Counter[str]()
        for seed in range(4):
            rollout = started(plan(steps=(0.05, 0.25, 1.0)))
            traffic = Traffic(requests=25_000, turns=turns, sticky=True, older=0.1)
            by = next(
                (
                    each.failed[0].name
                    for _, each in looks(np.random.default_rng(seed), rollout, traffic, FAULTS[name])
                    if each.failed
                ),
                "",
            )
            failed[by.partition("_p")[0]] += 1
        assert failed == {name: 4}


def test_a_canary_that_becomes_worse_late_fails_soon() -> None:
    """What it won while it was good does not count for long: it fails in the same step."""
    rollout = started(plan(steps=(0.25, 1.0)))
    fault = Fault(ttft=1.6, after=0.7)
    found = [
        (now, each.failed[0].name)
        for now, each in looks(np.random.default_rng(5), rollout, Traffic(requests=8000, turns=1.0), fault)
        if each.failed
    ]
    assert found
    assert found[0][0] > 420.0
    assert found[0][1].startswith("ttft")


def _slower(gates: Gates, fault: Fault) -> Judgement:
    """The last look at such a canary at 25 %."""
    rollout = started(plan(steps=(0.25, 1.0), gates=gates))
    *_, (_, last) = looks(np.random.default_rng(2), rollout, Traffic(requests=5000, turns=1.0), fault)
    return last


def test_tolerances_are_allowed() -> None:
    """What is within them is no evidence at all, times and lengths of either side; the same without them is."""
    allowed = Gates(ttft=Latency(tolerance=0.4), tpot=Latency(tolerance=0.4), length=Drift(tolerance=0.5))
    names = {"ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90"}
    for length, gate in ((1.3, "length_longer"), (1 / 1.3, "length_shorter")):
        fault = Fault(ttft=1.3, tpot=1.3, length=length)
        assert {each.name for each in _slower(STRICT, fault).failed} == names | {gate}
        assert all(each.evidence < 0.0 for each in _slower(allowed, fault).gates if each.name in names | {gate})


def test_what_several_workers_saw_of_the_same_sessions_counts_once() -> None:
    """Four workers that each saw all of it know no more than one."""
    rollout = started(plan(steps=(0.25, 1.0)))
    recorder = Recorder(rollout)
    fault = Fault(ttft=1.5, errors=0.1, length=2.0)
    for now, _, sample in canaries.samples(np.random.default_rng(1), rollout, Traffic(turns=1.0), fault):
        recorder.add(sample, now)
    part = recorder.encode()
    one, four = judge(merge([part]), rollout), judge(merge([part] * 4), rollout)
    assert len(one.failed) >= 4
    for alone, together in zip(one.gates, four.gates, strict=True):
        assert together.evidence == pytest.approx(alone.evidence, abs=0.01)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_much_better_canaries_never_fail(share: float) -> None:
    """Ten times as fast, and without a single error, on gates that look at one side."""
    gates = msgspec.structs.replace(STRICT, length=Drift(enabled=False))
    rollout = started(plan(steps=(share, 1.0), gates=gates, false_alarms=0.4))
    for seed in range(5):
        fault = Fault(ttft=0.1, tpot=0.1, errors=-1.0, abandons=-1.0, broken=-1.0)
        for _, judgement in looks(np.random.default_rng(seed), rollout, Traffic(requests=2000), fault):
            assert not judgement.failed
            assert all(gate.evidence < 0.5 for gate in judgement.gates)


def test_one_heavy_session_fails_no_gate() -> None:
    """A client of the canary that sends half of its requests, and fails and waits in all of them, is one client."""
    rollout = started(plan(steps=(0.05, 1.0), false_alarms=0.2))
    recorders = [Recorder(rollout) for _ in range(4)]
    template = Sample(
        version="canary",
        unit=0.321,
        uncached_tokens=900.0,
        streamed=True,
        ttft_s=90.0,
        tpot_s=5.0,
        output_tokens=1000.0,
        answered=True,
        failed=False,
        abandoned=False,
        broken=False,
    )
    broken = msgspec.structs.replace(template, broken=True)
    failed = msgspec.structs.replace(template, answered=False, failed=True)
    rng = np.random.default_rng(7)
    for count, (now, worker, sample) in enumerate(canaries.samples(rng, rollout, Traffic(requests=6000))):
        recorders[worker].add(sample, now)
        if count % 8 == 0:
            recorders[count % 4].add((template, broken, failed)[count % 3], now)
            assert not judge(merge(each.encode() for each in recorders), rollout).failed if count % 400 == 0 else True
    assert not judge(merge(each.encode() for each in recorders), rollout).failed


def test_a_rate_fails_only_over_its_tolerance() -> None:
    """However sure it is that a canary fails more often: as long as it is little, that is allowed."""
    gates = Gates(errors=Rate(tolerance=0.05))
    rollout = started(plan(steps=(0.5, 1.0), gates=gates))
    *_, (_, last) = looks(np.random.default_rng(1), rollout, Traffic(requests=6000, turns=1.0), Fault(errors=0.03))
    gate = next(each for each in last.gates if each.name == "errors")
    assert gate.evidence > gate.threshold
    assert not gate.failed
    assert not last.failed
    assert 0.02 < gate.canary - gate.baseline < 0.05


def test_estimates_are_those_of_the_samples() -> None:
    """Percentiles to 2 %, rates exactly, samples of each side."""
    rollout = started(plan(steps=(0.5, 1.0)))
    recorder, values = Recorder(rollout), list[float]()
    for now, _, sample in canaries.samples(np.random.default_rng(3), rollout, Traffic(requests=3000, older=0.0)):
        if now < 11.0:
            continue
        fresh = msgspec.structs.replace(sample, continued=False)
        recorder.add(fresh, now)
        if fresh.version == "base" and fresh.ttft_s >= 0.0:
            values.append(fresh.ttft_s)
    judgement = judge(merge([recorder.encode()]), rollout)
    gates = {gate.name: gate for gate in judgement.gates}
    assert gates["ttft_p50"].baseline_samples == len(values)
    for percentile in (50, 90):
        expected = float(np.percentile(values, percentile))
        assert gates[f"ttft_p{percentile}"].baseline == pytest.approx(expected, rel=0.04)
    assert judgement.baseline >= len(values)


def alone(units: int, events: int, before: dict[str, tuple[int, int]]) -> Judgement:
    """A step at 100 % in which so many of the canary's units had an error."""
    rollout = msgspec.structs.replace(started(plan(steps=(1.0,))), before=before)
    evidence = Evidence(exposed={"errors": [[units, events]]}, risks={"errors": [units, events, 0, 0]})
    return judge(evidence, rollout)


def test_without_a_baseline_rates_are_compared_with_those_of_before() -> None:
    """At 100 % errors fail against the steps before, not for what chance and the tolerance explain; the rest rests."""
    before = {"errors": (5000, 15)}
    bad = alone(3000, 90, before)
    assert [gate.name for gate in bad.failed] == ["errors"]
    assert not alone(3000, 20, before).failed
    # Of 15 in 5000, the rate may have been 0.7 %, and the tolerance is half a percent on top.
    assert not alone(3000, 33, before).failed
    assert not alone(200_000, 2200, before).failed
    notes = {gate.name: gate.note for gate in bad.gates}
    assert notes["errors"] == "against the baseline of the steps before"
    assert notes["ttft_p50"] == "rests: no baseline is left to compare with"
    assert notes["abandons"] == "rests: no step before had a baseline"
    assert not alone(3000, 3000, {}).failed
    assert bad.before == before


def test_a_step_adds_its_baseline_to_those_before() -> None:
    """What is compared with at 100 % is all that the baseline did meanwhile."""
    rollout = msgspec.structs.replace(started(plan()), before={"errors": (100, 1), "broken": (10, 0)})
    evidence = Evidence(others={"errors": [50, 2], "abandons": [40, 4]})
    assert judge(evidence, rollout).before == {"errors": (150, 3), "broken": (10, 0), "abandons": (40, 4)}


def test_all_gates_and_steps_together_have_one_budget() -> None:
    """Their chances of a false alarm sum up to `false_alarms`."""
    settings = plan(false_alarms=0.02)
    told = preview(settings)
    assert len(told.gates) * len(told.steps) * budget(settings) == pytest.approx(0.02)
    assert {gate.threshold for gate in judge(Evidence(), started(settings)).gates} == {told.evidence}
    assert told.evidence == pytest.approx(-math.log10(0.02 / 36))


def test_gates_that_are_switched_off_are_not_looked_at() -> None:
    """An empty list of percentiles, or `enabled: false`; and percentiles have gates of their own."""
    off = Rate(enabled=False)
    gates = Gates(
        ttft=Latency(percentiles=[99.0]), tpot=Latency(percentiles=[]), errors=off, length=Drift(enabled=False)
    )
    rollout = started(plan(steps=(0.5, 1.0), gates=gates))
    *_, (_, last) = looks(
        np.random.default_rng(1), rollout, Traffic(requests=9000, turns=1.0), Fault(ttft=6.0, errors=0.2)
    )
    assert [gate.name for gate in last.gates] == ["abandons", "broken", "ttft_p99"]
    assert [gate.name for gate in last.failed] == ["ttft_p99"]


def test_a_dry_run_says_what_steps_need() -> None:
    """Requests until both versions have enough answers, the shortest times, and what rests at the end."""
    told = preview(plan(steps=(0.01, 0.25, 0.9, 1.0), min_samples=100, hold_s=60.0, retire_after_s=30.0))
    assert [step.requests for step in told.steps] == [10_000, 400, 1000, 100]
    assert (told.promoted_s, told.retired_s) == (240.0, 270.0)
    assert [bool(step.rests) for step in told.steps] == [False, False, False, True]


@pytest.mark.parametrize(
    ("name", "canary", "baseline", "told"),
    [
        ("ttft_p90", 0.171, 0.13625, "171.0 ms on the canary, 136.2 ms on the baseline"),
        ("errors", 0.021, 0.0, "2.10 % on the canary, 0.00 % on the baseline"),
        ("length_longer", 1500.0, 40.0, "1,500 tokens on the canary, 40 tokens on the baseline"),
        ("abandons", 0.02, -1.0, "2.00 % on the canary, - on the baseline"),
    ],
)
def test_a_gate_tells_its_numbers_in_their_units(name: str, canary: float, baseline: float, told: str) -> None:
    """They stand in the audit log and in the status, for people."""
    gate = Gate(name=name, evidence=4.0, threshold=3.0, canary=canary, baseline=baseline, tolerance=0.1)
    assert gate.text == told

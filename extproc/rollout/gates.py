"""What a canary is judged by, from what all workers measured. Plain functions of values."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

import msgspec

from extproc.rollout import histogram
from extproc.rollout.e_values import RANK_BETS, RATE_BETS, log10_mixture, rate_log, upper_bound
from extproc.rollout.evidence import WINDOWS, Evidence
from extproc.rollout.kinds import Ranked, names, ranked, rates
from extproc.rollout.repeats import Repeats, overlap
from extproc.rollout.state import Plan, Rollout


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """One gate, as it is now.

    Attributes:
        name: `ttft_p50` and so on, `tpot_p90` and so on, `errors`, `abandons`, `broken`, `length_longer`,
            `length_shorter`.
        evidence: log10 of the e-value: how strongly the canary looks worse than the gate's tolerance allows.
        threshold: evidence from which the gate fails.
        canary: percentile in seconds or tokens, or rate, of the canary; -1 without samples.
        baseline: the same of the baseline.
        tolerance: how much greater the canary's may be: a share of the baseline's; of all answers, for rates.
        canary_samples: answers of the canary that it is looked at in.
        baseline_samples: answers of the baseline.
        failed: the canary is worse.
        note: why the gate rests, or what it compares with when that is not the baseline of now; empty as a rule.
    """

    name: str
    evidence: float
    threshold: float
    canary: float
    baseline: float
    tolerance: float
    canary_samples: int = 0
    baseline_samples: int = 0
    failed: bool = False
    note: str = ""

    @property
    def text(self) -> str:
        """What it found, for people."""
        return f"{self.shown(self.canary)} on the canary, {self.shown(self.baseline)} on the baseline"

    def shown(self, value: float) -> str:
        """A number of this gate in its unit; -1 stands for none."""
        if value < 0.0:
            return "-"
        if self.name.startswith(("ttft", "tpot")):
            return f"{1000.0 * value:,.1f} ms"
        if self.name.startswith("length"):
            return f"{value:,.0f} tokens"
        return f"{100.0 * value:.2f} %"


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """All gates of the present step.

    Attributes:
        epoch: epoch that was judged.
        gates: all gates that are switched on.
        canary: answers of the canary that count.
        baseline: answers of the baseline that count.
        parts: workers that told something.
        unread: parts that could not be read.
        before: what `Rollout.before` becomes when this step ends.
    """

    epoch: str
    gates: tuple[Gate, ...] = ()
    canary: int = 0
    baseline: int = 0
    parts: int = 0
    unread: int = 0
    before: Mapping[str, tuple[int, int]] = {}

    @property
    def failed(self) -> tuple[Gate, ...]:
        """Gates that failed, the strongest evidence first."""
        failed = [each for each in self.gates if each.failed]
        return tuple(sorted(failed, key=lambda each: each.threshold - each.evidence))


def budget(plan: Plan) -> float:
    """Chance of a false alarm that one gate has in one step: those of all gates in all steps sum up to the plan's."""
    return max(sys.float_info.min, plan.false_alarms / max(1, len(names(plan.gates)) * len(plan.steps)))


def judge(evidence: Evidence, rollout: Rollout) -> Judgement:
    """Judge the canary in the present step of its rollout."""
    plan = rollout.plan
    alone = rollout.share >= 1.0
    rate_of = _rate_alone if alone else _rate
    gates = [rate_of(evidence, rollout, name, rate.tolerance) for name, rate in rates(plan.gates).items()]
    gates += [_ranked(evidence, rollout, each, alone) for each in ranked(plan.gates)]
    canary, baseline = evidence.answers
    return Judgement(
        epoch=rollout.epoch,
        gates=tuple(gates),
        canary=canary,
        baseline=baseline,
        parts=evidence.parts,
        unread=evidence.unread,
        before=dict(rollout.before) if alone else _before(evidence, rollout),
    )


def _ranked(evidence: Evidence, rollout: Rollout, gate: Ranked, alone: bool) -> Gate:
    """A gate that ranks. Alone, the canary has nobody to be ranked among."""
    canary, baseline = evidence.values.get(gate.measure, ({}, {}))
    won = 0.0 if alone else _mixture(evidence, gate.name, gate.measure, len(RANK_BETS))
    threshold = -math.log10(budget(rollout.plan))
    return Gate(
        name=gate.name,
        evidence=won,
        threshold=threshold,
        canary=histogram.percentile(canary, gate.percentile),
        baseline=histogram.percentile(baseline, gate.percentile),
        tolerance=gate.tolerance,
        canary_samples=sum(canary.values()),
        baseline_samples=sum(baseline.values()),
        failed=won >= threshold,
        note="rests: no baseline is left to compare with" if alone else "",
    )


def _rate(evidence: Evidence, rollout: Rollout, name: str, tolerance: float) -> Gate:
    """A gate that counts, against the baseline of the same time."""
    risk, events, other_risk, other_events = evidence.risks.get(name, (0, 0, 0, 0))
    won = _mixture(evidence, name, name, len(RATE_BETS))
    threshold = -math.log10(budget(rollout.plan))
    canary, baseline = _share(events, risk), _share(other_events, other_risk)
    return Gate(
        name=name,
        evidence=won,
        threshold=threshold,
        canary=canary,
        baseline=baseline,
        tolerance=tolerance,
        canary_samples=risk,
        baseline_samples=other_risk,
        failed=won >= threshold and canary > max(0.0, baseline) + tolerance,
    )


def _rate_alone(evidence: Evidence, rollout: Rollout, name: str, tolerance: float) -> Gate:
    """A gate that counts, against the baseline of the steps before.

    Half of its budget is for the chance that the baseline's rate was over the bound which is taken of it. That bound
    and the tolerance are the rate that bets are made against: what changed since is not told from what the canary did.
    """
    units, events = rollout.before.get(name, (0, 0))
    half = budget(rollout.plan) / 2.0
    bound = min(1.0, upper_bound(events, units, half) + tolerance)
    exposed = evidence.exposed.get(name, [])
    logs = [[rate_log(found, risk, bound, odds) for odds in RATE_BETS] for risk, found in exposed]
    won = log10_mixture(_from_each(logs, len(RATE_BETS), overlap(evidence.counted.get(name, Repeats()))))
    threshold = -math.log10(half)
    risk, found = (sum(each[at] for each in exposed) for at in (0, 1))
    canary, baseline = _share(found, risk), _share(events, units)
    rests = units == 0
    return Gate(
        name=name,
        evidence=0.0 if rests else won,
        threshold=threshold,
        canary=canary,
        baseline=baseline,
        tolerance=tolerance,
        canary_samples=risk,
        baseline_samples=units,
        failed=not rests and won >= threshold and canary > baseline + tolerance,
        note="rests: no step before had a baseline" if rests else "against the baseline of the steps before",
    )


def _mixture(evidence: Evidence, gate: str, counted: str, bets: int) -> float:
    """Log10 of the wealth of a gate, all bets and beginnings together."""
    over = overlap(evidence.counted.get(counted, Repeats()))
    return log10_mixture(_from_each(evidence.logs.get(gate, []), bets, over))


def _from_each(windows: Sequence[Sequence[float]], bets: int, over: float) -> Iterator[tuple[float, float]]:
    """Shares and logs of all wealths: those that bet from the start, with half of all, and from each later window.

    A canary that was good for long has lost what was bet from the start; what is bet from now on has not. Windows to
    come hold what they began with.
    """
    later = 0.5 / (WINDOWS - 1)
    yield later * (WINDOWS - max(1, len(windows))), 0.0
    if not windows:
        yield 0.5, 0.0
    sums = [0.0] * bets
    for number in reversed(range(len(windows))):
        sums = [total + log for total, log in zip_longest(sums, windows[number][:bets], fillvalue=0.0)]
        for total in sums:
            yield (later if number else 0.5) / bets, total / over


def _before(evidence: Evidence, rollout: Rollout) -> Mapping[str, tuple[int, int]]:
    """Units of the baseline at risk, those with an event, of the steps before and this one."""
    found = dict(rollout.before)
    for name, (units, events) in evidence.others.items():
        units_before, events_before = found.get(name, (0, 0))
        found[name] = units_before + units, events_before + events
    return found


def _share(events: int, risk: int) -> float:
    return events / risk if risk else -1.0

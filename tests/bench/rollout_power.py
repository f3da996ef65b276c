"""How many answers of a canary it takes to see what is wrong with it, and what one answer costs the worker."""

import math
import time
from collections import Counter
from collections.abc import Iterator
from statistics import median

import msgspec
import numpy as np

from extproc.rollout.evidence import Recorder, merge
from extproc.rollout.gates import judge
from tests.bench.report import Check, Findings, Row, Scale
from tests.canaries import Fault, Traffic, looks, plan, rolled, samples, started

_FAULTS = {
    "TTFT 30 % longer": ("ttft", Fault(ttft=1.3)),
    "TPOT 30 % longer": ("tpot", Fault(tpot=1.3)),
    "2 % errors": ("errors", Fault(errors=0.02)),
    "all requests fail": ("errors", Fault(errors=1.0)),
    "2.5 % of answers cut": ("broken", Fault(broken=0.025)),
    "5 % more clients leave": ("abandons", Fault(abandons=0.05)),
    "answers 50 % longer": ("length_longer", Fault(length=1.5)),
    "TTFT 50 % longer from 60 % of the hold time on": ("ttft", Fault(ttft=1.5, after=0.6)),
}
_SHARES = (0.01, 0.05, 0.25)
_ANSWERS = 1500
"""Answers of the canary in the hold time of the step."""
_LOOKS = 100
_ADD_US = 25.0
"""What a finished request may cost its worker on this, of the 2 ms that one costs in all."""


def bench(scale: Scale) -> Findings:
    """Simulated canaries, each with one fault, at shares of 1, 5 and 25 %; then equal ones; then the cost."""
    runs, equal = scale.pick(7, 3), scale.pick(100, 40)
    findings = Findings(f"answers of a canary until the right gate fails it: median of {runs} simulated canaries")
    for what, (gate, fault) in _FAULTS.items():
        for turns in (1.0, 4.0):
            findings.rows.append(_detected(what, gate, fault, turns, runs))
    phases = Counter(
        rolled(np.random.default_rng(seed), plan(), Traffic(requests=1000))[0].phase for seed in range(equal)
    )
    costs = dict(_costs(scale.pick(40_000, 10_000)))
    findings.checks += [
        Check(f"equal canaries of {equal} that fail", float(phases["rolled_back"]), 0.01 * equal + 3.0, ""),
        Check("CPU of one finished request", costs["add"], _ADD_US, "us"),
    ]
    findings.notes += [
        f"{_ANSWERS} answers in the hold time, {_LOOKS} looks; 4 workers; false alarms 1 % over 9 gates and 4 steps",
        "the baseline has 0.3 % errors, 0.15 % cut answers, 4 % of clients that leave, heavy tails; times rise and fall"
        " by half within the step; sessions differ in speed, length and patience",
        "a session of several turns ends at any worker; answers count from those that a worker saw begin",
        f"one worker's part is {costs['bytes']:,.0f} bytes; encoding takes {costs['encode']:.0f} us, merging four parts"
        f" and judging {costs['judge']:.0f} us",
        f"equal canaries: {', '.join(f'{count} {phase}' for phase, count in sorted(phases.items()))}",
    ]
    return findings


def _detected(what: str, gate: str, fault: Fault, turns: float, runs: int) -> Row:
    """Answers of the canary that were counted until the gate failed, at each share; then how often another one did."""
    row: dict[str, str | float] = {"fault": what, "gate": gate, "turns": turns}
    others = 0
    for share in _SHARES:
        answers, most = [], 0
        for seed in range(runs):
            by, counted = _failed(seed, share, fault, turns)
            answers.append(counted if by.startswith(gate) else math.inf)
            others += bool(by) and not by.startswith(gate)
            most = max(most, counted)
        found = median(answers)
        row[f"at {share:.0%}"] = f"{found:.0f}" if found < math.inf else f">{most}"
    row["other gate"] = others
    return row


def _failed(seed: int, share: float, fault: Fault, turns: float) -> tuple[str, int]:
    """The gate that failed first, and the canary's answers that were counted until then; no gate where none did."""
    # Of the four steps of the plan, the rollout is at the one of this share.
    settings = plan(steps=(*_SHARES, 1.0))
    rollout = msgspec.structs.replace(started(settings), step=_SHARES.index(share), share=share)
    # Of sessions with several turns, which end at any worker, little more than half of the answers count.
    counted = 0.9 if turns == 1.0 else 0.5
    traffic = Traffic(requests=round(_ANSWERS / share / counted), turns=turns, older=0.1)
    for _, judgement in looks(np.random.default_rng(seed), rollout, traffic, fault, _LOOKS):
        if judgement.failed:
            return judgement.failed[0].name, judgement.canary
    return "", judgement.canary


def _costs(requests: int) -> Iterator[tuple[str, float]]:
    """Microseconds of CPU, and bytes."""
    rollout = started(plan(steps=(0.05, 0.25, 0.5, 1.0)))
    recorder = Recorder(rollout)
    told = [(now, each) for now, _, each in samples(np.random.default_rng(1), rollout, Traffic(requests=requests))]
    began = time.process_time()
    for now, sample in told:
        recorder.add(sample, now)
    yield "add", 1e6 * (time.process_time() - began) / len(told)
    part = recorder.encode()
    yield "bytes", float(len(part))
    began = time.process_time()
    for _ in range(100):
        recorder.encode()
    yield "encode", 1e4 * (time.process_time() - began)
    began = time.process_time()
    for _ in range(100):
        judge(merge([part] * 4), rollout)
    yield "judge", 1e4 * (time.process_time() - began)

"""Simulated traffic of a canary and its baseline, as samples: sessions of several turns, each with ways of its own."""

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from extproc.config_rollouts import Gates
from extproc.rollout.advance import advance, begin
from extproc.rollout.evidence import Evidence, Recorder, Sample, merge
from extproc.rollout.gates import Judgement, judge
from extproc.rollout.state import Event, Plan, Rollout

WORKERS = 4
LOOKS = 8
"""Looks at the evidence in the hold time of a step, where nothing else is said."""
_CAP = 1024.0


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What a canary does otherwise than its baseline; equal by default.

    Attributes:
        ttft: factor of the time to the first token.
        tpot: factor of the time of each further token.
        length: factor of output tokens.
        errors: share of requests that fail, beyond the baseline's.
        abandons: share of answers whose client leaves, beyond the baseline's.
        broken: share of answers that are cut, beyond the baseline's.
        after: part of the step's time from which it does so.
    """

    ttft: float = 1.0
    tpot: float = 1.0
    length: float = 1.0
    errors: float = 0.0
    abandons: float = 0.0
    broken: float = 0.0
    after: float = 0.0


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic of one step.

    Attributes:
        requests: requests that end in the hold time, about.
        turns: mean turns of a session.
        sticky: whether a session's requests all end at one worker.
        older: part of the sessions that began before the step, all of them on the baseline.
        amplitude: how far times rise and fall within a step, on both.
    """

    requests: int = 1500
    turns: float = 4.0
    sticky: bool = False
    older: float = 0.3
    amplitude: float = 0.5


EQUAL = Fault()
NORMAL = Traffic()


def plan(steps: Sequence[float] = (0.05, 0.25, 0.75, 1.0), **settings: object) -> Plan:
    """A plan of ten minutes a step."""
    told: dict[str, object] = {
        "hold_s": 600.0,
        "settle_s": 10.0,
        "min_samples": 10,
        "on_failure": "rollback",
        "false_alarms": 0.01,
        "require_verdict": False,
        "retire_after_s": 600.0,
        "gates": Gates(),
        **settings,
    }
    return msgspec.convert({"steps": tuple(steps), **told}, Plan)


def started(settings: Plan, now: float = 0.0) -> Rollout:
    """A rollout at its first step."""
    return begin("r1", "m", "canary", {"base": 1.0, "canary": 0.0}, settings, (now, "test"))[0]


def samples(
    rng: np.random.Generator, rollout: Rollout, traffic: Traffic = NORMAL, fault: Fault = EQUAL
) -> Iterator[tuple[float, int, Sample]]:
    """Time, worker and sample of each request of a step, in order; tails are heavy, sessions differ in everything."""
    hold = max(rollout.plan.hold_s, 1.0)
    number = max(1, round(traffic.requests / traffic.turns))
    turns = rng.geometric(1.0 / traffic.turns, number)
    session = np.repeat(np.arange(number), turns)
    first = np.concatenate(([0], np.cumsum(turns)[:-1]))
    turn = np.arange(len(session)) - first[session]
    older = rng.random(number) < traffic.older
    canary = (rng.random(number) < rollout.share) & ~older
    start = rng.random(number) * hold
    gaps = np.where(turn == 0, 0.0, rng.exponential(20.0, len(session)))
    passed = np.cumsum(gaps)
    at = start[session] + passed - passed[first][session]
    kept = at < hold * 1.2
    unit, place = rng.random(number), rng.integers(0, WORKERS, number)
    worker = place[session] if traffic.sticky else rng.integers(0, WORKERS, len(session))
    is_canary = canary[session]
    bad = is_canary & (at >= fault.after * hold)
    drift = 1.0 + traffic.amplitude * np.sin(2.0 * math.pi * at / hold)
    uncached = np.where(turn == 0, 1500.0, 300.0) * rng.lognormal(0.0, 0.8, len(session))
    tail = np.where(rng.random(len(session)) < 0.03, 1.0 + rng.pareto(1.5, len(session)), 1.0)
    speed = rng.lognormal(0.0, 0.2, number)[session]
    ttft = (0.04 + uncached / 8000.0) * speed * rng.lognormal(0.0, 0.3, len(session)) * tail * drift
    ttft = np.where(bad, ttft * fault.ttft, ttft)
    tpot = 0.02 * rng.lognormal(0.0, 0.1, number)[session] * rng.lognormal(0.0, 0.15, len(session)) * drift
    tpot = np.where(bad, tpot * fault.tpot, tpot)
    # Later turns have longer answers, and so have conversations that began before the step.
    grown = 1.0 + 0.1 * (turn + 10 * older[session])
    tokens = 150.0 * grown * rng.lognormal(0.0, 0.4, number)[session] * rng.lognormal(0.0, 0.5, len(session))
    tokens = np.minimum(_CAP, np.ceil(np.where(bad, tokens * fault.length, tokens)))
    fails = np.where(rng.random(number) < 0.02, 0.1, 0.001)[session] + bad * fault.errors
    leaves = rng.beta(0.5, 12.0, number)[session] + bad * fault.abandons
    cuts = np.where(rng.random(number) < 0.01, 0.1, 0.0005)[session] + bad * fault.broken
    failed = rng.random(len(session)) < fails
    abandoned = (rng.random(len(session)) < leaves) & ~failed
    broken = (rng.random(len(session)) < cuts) & ~failed & ~abandoned
    for index in np.argsort(at, kind="stable"):
        if not kept[index]:
            continue
        good = not failed[index]
        whole = good and not abandoned[index] and not broken[index]
        yield (
            rollout.entered + float(at[index]),
            int(worker[index]),
            Sample(
                version="canary" if is_canary[index] else "base",
                unit=float(unit[session[index]]),
                uncached_tokens=float(uncached[index]),
                streamed=True,
                ttft_s=float(ttft[index]) if good else -1.0,
                tpot_s=float(tpot[index]) if whole else -1.0,
                output_tokens=float(tokens[index]) if whole else -1.0,
                answered=good,
                failed=not good,
                abandoned=bool(abandoned[index]),
                broken=bool(broken[index]),
                continued=bool(older[session[index]] or turn[index] > 0),
            ),
        )


def evidence_of(recorders: Sequence[Recorder]) -> Evidence:
    """What workers measured, through the bytes they publish."""
    return merge(each.encode() for each in recorders)


def looks(
    rng: np.random.Generator, rollout: Rollout, traffic: Traffic = NORMAL, fault: Fault = EQUAL, number: int = LOOKS
) -> Iterator[tuple[float, Judgement]]:
    """Time and judgement at each of so many looks in the hold time of a step, and at those after it."""
    recorders = [Recorder(rollout) for _ in range(WORKERS)]
    every = max(rollout.plan.hold_s, 1.0) / number
    due = rollout.entered + every
    for now, worker, sample in samples(rng, rollout, traffic, fault):
        while now >= due:
            yield due, judge(evidence_of(recorders), rollout)
            due += every
        recorders[worker].add(sample, now)
    yield due, judge(evidence_of(recorders), rollout)


def rolled(
    rng: np.random.Generator, settings: Plan, traffic: Traffic = NORMAL, fault: Fault = EQUAL
) -> tuple[Rollout, list[Event]]:
    """A whole rollout, until it is over or waits for more than its traffic."""
    rollout, events = started(settings), list[Event]()
    for _ in range(len(settings.steps) + 1):
        epoch = rollout.epoch
        for now, judgement in looks(rng, rollout, traffic, fault):
            told = advance(rollout, judgement, now)
            if told is not None:
                rollout, event = told
                events.append(event)
            if rollout.epoch != epoch or rollout.phase not in ("running", "paused"):
                break
        if rollout.phase not in ("running", "paused"):
            break
    return rollout, events

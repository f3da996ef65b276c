"""How a rollout goes on: one step of its controller, and what operators may tell it. Plain functions of values.

| phase | goes on to | when |
|---|---|---|
| running | running, next step | its time is over, answers suffice, no gate failed, a good verdict if it needs one |
| running, at 100 % | promoted | the same |
| promoted | retired | `retire_after_s` is over |
| any of these | rolled back, paused, or as it is | a gate or a verdict failed, by `on_failure` |
| paused | rolled back | a gate or a verdict failed, where `on_failure` says so |

Nothing leads back from `rolled_back`, `aborted` and `retired`: a new rollout begins, or they are forgotten. The canary
keeps 100 % after `retired`, and has nothing after the other two.
"""

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from extproc.errors import RolloutError
from extproc.rollout.gates import Gate, Judgement
from extproc.rollout.state import ACTIVE, Event, Phase, Plan, Rollout

CONTROLLER: Final = "controller"
"""Who acts in events that no operator asked for."""
VERDICT: Final = "verdict"
"""Stands where a gate's name does for a verdict of bad quality."""
_MAY: Final[Mapping[Phase, str]] = {
    "running": "promote, pause or abort it, or post a verdict",
    "paused": "resume, promote or abort it, or post a verdict",
    "promoted": "promote it to retire the old version at once, pause or abort it, or post a verdict",
    "retired": "it is over: start another one",
    "rolled_back": "it is over: start another one",
    "aborted": "it is over: start another one",
    "forgotten": "it is over: start another one",
}


def begin(
    name: str, model: str, canary: str, base: Mapping[str, float], plan: Plan, at: tuple[float, str]
) -> tuple[Rollout, Event]:
    """Start a rollout at the first step that is over the share which the canary has already.

    Args:
        name: id of the rollout, which no other one has.
        model: model whose traffic moves.
        canary: version that it moves to.
        base: weights of all versions now, the canary's with them.
        plan: how it goes.
        at: the present time, in seconds of the store's clock, and who starts it.

    Raises:
        RolloutError: there is no other version with any weight, or the canary has 100 % already.
    """
    now, by = at
    others = sum(weight for version, weight in base.items() if version != canary)
    if canary not in base or others <= 0.0:
        told = f"model `{model}` has no traffic to move to version `{canary}`"
        if base.get(canary, 0.0) > 0.0:
            raise RolloutError(f"{told}: it has everything already")
        raise RolloutError(f"{told}: give it and another version a weight, of which its own may be 0")
    share = base[canary] / (others + base[canary])
    step = next((index for index, each in enumerate(plan.steps) if each > share), None)
    if step is None:
        raise RolloutError(f"version `{canary}` has {share:.0%} already, and no step is over that: add a greater one")
    rollout = Rollout(
        id=name,
        model=model,
        canary=canary,
        base=dict(base),
        plan=plan,
        step=step,
        share=plan.steps[step],
        started=now,
        entered=now,
        since=now,
        earlier=(share,),
    )
    return rollout, _event(rollout, "started", now, by)


def elapsed_s(rollout: Rollout, now: float) -> float:
    """Seconds of the present step or phase that count, those of pauses left out."""
    running = 0.0 if rollout.phase == "paused" else max(0.0, now - rollout.since)
    return rollout.held_s + running


def waits_for(rollout: Rollout, judgement: Judgement, now: float) -> tuple[str, ...]:
    """What a running rollout's present step still waits for, in words; empty when it may end."""
    plan, waits = rollout.plan, []
    left = plan.hold_s - elapsed_s(rollout, now)
    if left > 0.0:
        waits.append(f"{left:.0f} s of its hold time")
    if judgement.canary < plan.min_samples:
        waits.append(f"{plan.min_samples - judgement.canary} more answers of the canary")
    if rollout.share < 1.0 and judgement.baseline < plan.min_samples:
        waits.append(f"{plan.min_samples - judgement.baseline} more answers of the baseline")
    if rollout.verdict == "fail" and plan.on_failure != "report":
        waits.append("a better verdict")
    elif plan.require_verdict and not rollout.verdict:
        waits.append("a verdict")
    return tuple(waits)


def advance(rollout: Rollout, judgement: Judgement, now: float) -> tuple[Rollout, Event] | None:
    """What the controller does now, if anything; a judgement of another epoch decides nothing."""
    if rollout.phase not in ACTIVE or judgement.epoch != rollout.epoch:
        return None
    if failed := _failed(rollout, judgement):
        return _failing(rollout, failed, now)
    if rollout.phase == "promoted":
        over = elapsed_s(rollout, now) >= rollout.plan.retire_after_s
        return _retired(rollout, now, CONTROLLER, "") if over else None
    if rollout.phase == "paused" or waits_for(rollout, judgement, now):
        return None
    return _further(replace(rollout, before=judgement.before), now, CONTROLLER, "", _totals(judgement))


def promote(
    rollout: Rollout, now: float, by: str, text: str = "", *, full: bool = False, judgement: Judgement | None = None
) -> tuple[Rollout, Event]:
    """Go on to the next step at once, or to 100 % where `full`; retire the old version where it is at 100 % already.

    A judgement of the step that ends, where there is one, keeps what its baseline did: rates are compared with it at
    100 %.

    Raises:
        RolloutError: it is over.
    """
    _expect(rollout, "promoted", "running", "paused", "promoted")
    if rollout.phase == "promoted":
        return _retired(rollout, now, by, text)
    if judgement is not None and judgement.epoch == rollout.epoch:
        rollout = replace(rollout, before=judgement.before)
    last = len(rollout.plan.steps) - 1
    step = last - 1 if full and rollout.step < last else rollout.step
    return _further(replace(rollout, step=step), now, by, text, {})


def pause(rollout: Rollout, now: float, by: str, text: str = "") -> tuple[Rollout, Event]:
    """Stop where it is: the canary keeps its share, and no time passes.

    Raises:
        RolloutError: it is paused, or over.
    """
    _expect(rollout, "paused", "running", "promoted")
    paused = replace(_stopped(rollout, now), reason=text)
    return paused, _event(paused, "paused", now, by, text=text)


def resume(
    rollout: Rollout, now: float, by: str, text: str = "", *, judgement: Judgement | None = None
) -> tuple[Rollout, Event]:
    """Go on after a pause, in spite of the gates and the verdict that it was paused for.

    Gates of the judgement, where there is one, that failed since then are passed over too: who resumes has seen them.

    Raises:
        RolloutError: it is not paused.
    """
    _expect(rollout, "resumed", "paused")
    verdict = "" if rollout.verdict == "fail" else rollout.verdict
    failed = judgement.failed if judgement is not None and judgement.epoch == rollout.epoch else ()
    seen = (*rollout.passed_over, *(each.name for each in failed if each.name not in rollout.passed_over))
    resumed = replace(rollout, phase="running", since=now, gate="", reason=text, verdict=verdict, passed_over=seen)
    return resumed, _event(resumed, "resumed", now, by, text=text)


def abort(rollout: Rollout, now: float, by: str, text: str = "") -> tuple[Rollout, Event]:
    """Take everything from the canary at once.

    Raises:
        RolloutError: it is over.
    """
    _expect(rollout, "aborted", "running", "paused", "promoted")
    aborted = replace(_ended(rollout, "aborted", now), reason=text)
    return aborted, _event(aborted, "aborted", now, by, text=text)


def forget(rollout: Rollout, now: float, by: str, text: str = "") -> tuple[Rollout, Event]:
    """What stands for a rollout that nobody needs any more, until all replicas have seen it; from any phase."""
    forgotten = replace(_ended(rollout, "forgotten", now), reason=text)
    return forgotten, _event(forgotten, "forgotten", now, by, text=text)


def verdict(rollout: Rollout, now: float, by: str, text: str, *, passed: bool) -> tuple[Rollout, Event]:
    """Note what somebody outside found of the present step's quality; the controller acts on it.

    Raises:
        RolloutError: it is over.
    """
    _expect(rollout, "judged", "running", "paused", "promoted")
    passed_over = tuple(each for each in rollout.passed_over if each != VERDICT)
    judged = replace(rollout, verdict="pass" if passed else "fail", passed_over=passed_over)
    return judged, _event(judged, "verdict", now, by, text=f"{judged.verdict}: {text}" if text else judged.verdict)


def _failed(rollout: Rollout, judgement: Judgement) -> list[Gate]:
    """Gates that failed and are not passed over, the strongest evidence first; a bad verdict stands before them."""
    gates = [each for each in judgement.failed if each.name not in rollout.passed_over]
    if rollout.verdict == "fail" and VERDICT not in rollout.passed_over:
        told = Gate(name=VERDICT, evidence=0.0, threshold=0.0, canary=-1.0, baseline=-1.0, tolerance=0.0, failed=True)
        gates.insert(0, told)
    return gates


def _failing(rollout: Rollout, failed: list[Gate], now: float) -> tuple[Rollout, Event] | None:
    does, gate = rollout.plan.on_failure, failed[0]
    if rollout.phase == "paused" and does != "rollback":
        return None
    told = {} if gate.name == VERDICT else _numbers(gate)
    text = "the verdict was bad" if gate.name == VERDICT else gate.text
    if does == "report":
        reported = replace(rollout, passed_over=(*rollout.passed_over, gate.name))
        return reported, _event(reported, "gate_failed", now, CONTROLLER, gate=gate.name, text=text, told=told)
    if does == "pause":
        names = tuple(each.name for each in failed if each.name != VERDICT)
        stopped = replace(_stopped(rollout, now), passed_over=(*rollout.passed_over, *names))
    else:
        stopped = _ended(rollout, "rolled_back", now)
    stopped = replace(stopped, gate=gate.name, reason=text)
    return stopped, _event(stopped, stopped.phase, now, CONTROLLER, gate=gate.name, text=text, told=told)


def _further(rollout: Rollout, now: float, by: str, text: str, told: Mapping[str, float]) -> tuple[Rollout, Event]:
    """The next step, or `promoted` after the last one."""
    fresh = replace(rollout, since=now, held_s=0.0, gate="", reason=text)
    if rollout.step + 1 >= len(rollout.plan.steps):
        promoted = replace(fresh, phase="promoted", share=1.0)
        return promoted, _event(promoted, "promoted", now, by, text=text, told=told)
    share = rollout.plan.steps[rollout.step + 1]
    earlier = (rollout.share, *(each for each in rollout.earlier if each != rollout.share))
    further = replace(
        fresh,
        phase="running",
        step=rollout.step + 1,
        share=share,
        entered=now,
        earlier=earlier,
        verdict="",
        passed_over=(),
    )
    return further, _event(further, "step", now, by, text=text, told=told)


def _retired(rollout: Rollout, now: float, by: str, text: str) -> tuple[Rollout, Event]:
    retired = replace(rollout, phase="retired", since=now, held_s=0.0, earlier=(), reason=text)
    return retired, _event(retired, "retired", now, by, text=text)


def _stopped(rollout: Rollout, now: float) -> Rollout:
    """Paused. Whoever was promoted has done the last step's time."""
    held = rollout.plan.hold_s if rollout.phase == "promoted" else elapsed_s(rollout, now)
    return replace(rollout, phase="paused", since=now, held_s=held)


def _ended(rollout: Rollout, phase: Phase, now: float) -> Rollout:
    """Over, with nothing for the canary: no share of before is kept, so everybody leaves it at once."""
    return replace(rollout, phase=phase, share=0.0, since=now, held_s=0.0, earlier=())


def _expect(rollout: Rollout, what: str, *phases: Phase) -> None:
    if rollout.phase not in phases:
        stands = rollout.phase.replace("_", " ")
        raise RolloutError(
            f"the rollout of model `{rollout.model}` is {stands} and cannot be {what}: {_MAY[rollout.phase]}"
        )


def _numbers(gate: Gate) -> dict[str, float]:
    fields = ("evidence", "threshold", "canary", "baseline", "tolerance", "canary_samples", "baseline_samples")
    return {name: float(getattr(gate, name)) for name in fields}


def _totals(judgement: Judgement) -> dict[str, float]:
    gates = {each.name: each.evidence for each in judgement.gates if not each.note}
    return {"canary_samples": float(judgement.canary), "baseline_samples": float(judgement.baseline), **gates}


def _event(
    rollout: Rollout,
    what: str,
    now: float,
    by: str,
    *,
    gate: str = "",
    text: str = "",
    told: Mapping[str, float] | None = None,
) -> Event:
    return Event(
        at=now,
        model=rollout.model,
        rollout=rollout.id,
        what=what,
        by=by,
        share=rollout.share,
        gate=gate,
        text=text,
        told=told or {},
    )

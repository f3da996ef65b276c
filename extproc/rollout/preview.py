"""What a rollout is going to need, for dry runs. Plain functions of values."""

import math

import msgspec

from extproc.rollout.gates import budget
from extproc.rollout.kinds import names, ranked
from extproc.rollout.state import Plan


class StepNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What one step needs at least.

    Attributes:
        share: share of the canary, 0 to 1.
        requests: requests of the model until both versions have enough answers, on average, all of them comparable.
        rests: gates that rest, as no baseline is left to rank the canary among.
    """

    share: float
    requests: int
    rests: tuple[str, ...] = ()


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout needs at least.

    Attributes:
        steps: its steps.
        promoted_s: shortest time until the canary has everything for good.
        retired_s: shortest time until the old version has nothing left.
        gates: all gates.
        evidence: log10 of the e-value from which each of them fails.
    """

    steps: tuple[StepNeeds, ...]
    promoted_s: float
    retired_s: float
    gates: tuple[str, ...]
    evidence: float


def preview(plan: Plan) -> Preview:
    """What a rollout by this plan needs at least."""
    resting = tuple(gate.name for gate in ranked(plan.gates))
    steps = tuple(
        StepNeeds(share=share, requests=_requests(plan, share), rests=resting if share >= 1.0 else ())
        for share in plan.steps
    )
    promoted_s = plan.hold_s * len(plan.steps)
    return Preview(
        steps=steps,
        promoted_s=promoted_s,
        retired_s=promoted_s + plan.retire_after_s,
        gates=names(plan.gates),
        evidence=-math.log10(budget(plan)),
    )


def _requests(plan: Plan, share: float) -> int:
    rarer = min(share, 1.0 - share) if share < 1.0 else 1.0
    return math.ceil(round(plan.min_samples / rarer, 6))

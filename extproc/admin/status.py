"""A model, its versions and its rollout as they are now. A plain function of values."""

from extproc.admin.starting import base_of
from extproc.admin.values import Status, VersionNow
from extproc.config import Model
from extproc.rollout.advance import elapsed_s
from extproc.rollout.gates import Judgement
from extproc.rollout.state import Rollout, governs, weights


def status_of(name: str, model: Model, last: Rollout | None, judgement: Judgement | None, now: float) -> Status:
    """How it stands.

    Args:
        name: the model's own name.
        model: its settings.
        last: its last rollout; None when it never had one.
        judgement: what is known of the rollout's present step.
        now: time of the store's clock.
    """
    base = base_of(model)
    # As workers go by it: a version that the configuration has no more gets nothing, and its part goes to the others.
    told = weights(last, last.share) if last is not None and governs(last, base) else {}
    known = {version: part for version, part in told.items() if version in base}
    rules = any(part > 0.0 for part in known.values())
    present = known if rules else base
    total = sum(present.values())
    versions = [
        VersionNow(
            name=version,
            pool=settings.pool,
            weight=settings.weight,
            share=present.get(version, 0.0) / total if total > 0.0 else 0.0,
        )
        for version, settings in model.versions.items()
    ]
    left = 0.0
    if last is not None and last.phase in ("running", "promoted"):
        needs = last.plan.hold_s if last.phase == "running" else last.plan.retire_after_s
        left = max(0.0, needs - elapsed_s(last, now))
    if last is None or judgement is None or judgement.epoch != last.epoch:
        judgement = None
    return Status(
        model=name, versions=versions, now=now, rollout=last, governs=rules, judgement=judgement, hold_left_s=left
    )

"""Whether a rollout may be forgotten, and what stands for one that cannot be read. Plain functions of values."""

from collections.abc import Mapping
from typing import Final

from extproc.admin.starting import base_of
from extproc.config import Config, Model, Rollouts
from extproc.errors import RolloutError, UnknownModelError
from extproc.rollout.state import ACTIVE, Plan, Rollout, governs, weights

_MOST_NAMED: Final = 20
_LEAST: Final = 1e-9
"""Shares that differ by less are the same."""


def expect_over(name: str, model: Model | None, last: Rollout, *, force: bool) -> None:
    """Raise RolloutError unless a rollout may be forgotten: it is over, and no traffic moves by it.

    Args:
        name: the model.
        model: its settings; None where the configuration has no such model, so that nobody could abort it.
        last: its rollout.
        force: forget it although traffic moves, or the configuration of another host may have the model.
    """
    if last.phase in ACTIVE:
        if model is not None:
            raise RolloutError(f"the rollout of model `{name}` is {last.phase}: abort it first")
        if not force:
            raise RolloutError(
                f"the rollout of model `{name}` is {last.phase}, and warmpath.yaml has no such model here: where no "
                "other host has it either, forget it with --force (`force`)"
            )
    elif model is not None and not force and _moves(last, base_of(model)):
        raise RolloutError(
            f"the last rollout of model `{name}` says who gets what, and warmpath.yaml says otherwise: write what "
            "`warmpath rollout status` shows there, on all hosts, or move the traffic with --force (`force`)"
        )


def _moves(last: Rollout, base: Mapping[str, float]) -> bool:
    """Whether the file's weights are other shares than those of now."""
    if not governs(last, base):
        return False
    now, then = _shares(weights(last, last.share)), _shares(base)
    return any(abs(now.get(each, 0.0) - then.get(each, 0.0)) > _LEAST for each in {*now, *then})


def _shares(told: Mapping[str, float]) -> dict[str, float]:
    total = sum(told.values())
    return {version: weight / total for version, weight in told.items()} if total > 0.0 else {}


def blank(new_id: str, name: str, defaults: Rollouts, now: float) -> Rollout:
    """A rollout in place of one that cannot be read, so that it can be forgotten."""
    plan = Plan(
        steps=(1.0,),
        hold_s=defaults.hold_s,
        settle_s=defaults.settle_s,
        min_samples=defaults.min_samples,
        on_failure=defaults.on_failure,
        false_alarms=defaults.false_alarms,
        require_verdict=defaults.require_verdict,
        retire_after_s=defaults.retire_after_s,
        gates=defaults.gates,
    )
    return Rollout(id=new_id, model=name, canary="", base={}, plan=plan, phase="aborted", started=now, since=now)


def unknown(config: Config, name: str, kept: Mapping[str, object]) -> UnknownModelError:
    """The error of a name that is neither a model's nor that of a rollout, with those that only the store knows."""
    left = sorted(set(kept) - set(config.models))
    told = ", ".join(f"`{each[:256]}`" for each in left[:_MOST_NAMED]) + (" and more" if left[_MOST_NAMED:] else "")
    others = f"; the store has rollouts of models that warmpath.yaml has not: {told}" if left else ""
    return UnknownModelError(f"no model `{name[:256]}`, and no rollout of one{others}")

"""What changes a rollout, and which one it must be. Plain functions of values."""

from collections.abc import Callable

from extproc.admin.values import Change, Verdict
from extproc.errors import RolloutError, UnknownRolloutError
from extproc.rollout.state import Event, Rollout

Step = Callable[[Rollout | None, float], tuple[Rollout, Event]]
"""What becomes of a model's last rollout at a time of the store's clock. Raises RolloutError."""
Blank = Callable[[float], Rollout]
"""What stands, at a time of the store's clock, for a rollout that cannot be read."""


def expecting(name: str, ask: Change | Verdict, step: Callable[[Rollout, float], tuple[Rollout, Event]]) -> Step:
    """A change of a rollout that there must be, and that must be the one which is meant."""

    def known(last: Rollout | None, now: float) -> tuple[Rollout, Event]:
        if last is None or last.phase == "forgotten":
            told = f"model `{name}` has no rollout: begin one with `warmpath rollout start {name} --to VERSION`"
            raise UnknownRolloutError(told)
        if ask.rollout and ask.rollout != last.id:
            raise RolloutError(f"rollout `{ask.rollout}` was meant, but `{last.id}` is the last of model `{name}`")
        return step(last, now)

    return known

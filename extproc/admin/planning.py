"""How a rollout is to go: what the file says, with what its start says laid over it."""

import sys
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from extproc.config import Rollouts
from extproc.config_mistakes import first_mistake, nearest
from extproc.errors import BadQuestionError
from extproc.rollout.state import Plan
from extproc.rules_rollouts import steps_mistake

_OF_THE_FILE: Final = ("testers", "history")
_MOST_TEXT: Final = 500


def plan_of(defaults: Rollouts, overrides: Mapping[str, Any]) -> Plan:
    """The plan of a rollout.

    Args:
        defaults: section `rollouts` of the file.
        overrides: plain values of the same keys: `{"hold_s": 60, "gates": {"ttft": {"tolerance": 0.2}}}`; what they
            leave out is as the defaults have it. Steps are percent, as there.

    Raises:
        BadQuestionError: a key is unknown, or a value is not what its key takes; the text names the place, what was
            found and what to write.
    """
    for key in _OF_THE_FILE:
        if key in overrides:
            raise BadQuestionError(f"{key}: is of the file, for all rollouts: set rollouts.{key} there")
    plain = _laid_over(msgspec.to_builtins(defaults), overrides)
    if mistake := first_mistake(plain, Rollouts):
        raise _wrong(mistake.path, mistake.text)
    try:
        settings = msgspec.convert(plain, Rollouts)
    except msgspec.ValidationError as error:
        raise _wrong("$", str(error)) from None
    if told := steps_mistake(settings.steps):
        raise _wrong("$.steps", told)
    return Plan(
        steps=tuple(step / 100.0 for step in settings.steps),
        **{name: getattr(settings, name) for name in Plan.__struct_fields__ if name != "steps"},
    )


def known(word: str, names: Mapping[str, Any], what: str) -> str:
    """A remedy for a name that is not known, short enough for one line whatever was sent."""
    return nearest(word[:_MOST_TEXT], names, what)[:_MOST_TEXT]


def _laid_over(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two trees as one: what both have as a mapping is merged, else the upper one counts."""
    merged = dict(below)
    for key, value in above.items():
        under = below.get(key)
        both = isinstance(under, dict) and isinstance(value, Mapping)
        merged[key] = _laid_over(under, value) if both and isinstance(under, dict) else _bounded(value)
    return merged


def _bounded(value: Any) -> Any:
    """A number as the schema can compare it: whole ones past the range of a double are infinite."""
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return float("inf")
    return value


def _wrong(path: str, text: str) -> BadQuestionError:
    place = path.removeprefix("$").removeprefix(".") or "overrides"
    return BadQuestionError(f"{place}: {text}"[:_MOST_TEXT])

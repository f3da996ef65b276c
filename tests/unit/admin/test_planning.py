"""How a rollout is to go, when its start says otherwise than the file."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admin.planning import plan_of
from extproc.config import Rollouts
from extproc.config_rollouts import Gates, Latency, Rate
from extproc.errors import BadQuestionError
from extproc.rollout.state import Plan

FILE = Rollouts(hold_s=60.0, gates=Gates(ttft=Latency(percentiles=[50.0], tolerance=0.3)))


def test_without_overrides_it_is_as_the_file_says() -> None:
    """Percents become shares; everything else is the file's own."""
    plan = plan_of(FILE, {})
    assert plan.steps == (0.01, 0.05, 0.25, 1.0)
    assert (plan.hold_s, plan.min_samples, plan.on_failure, plan.gates) == (60.0, 100, "rollback", FILE.gates)


def test_overrides_are_laid_over_the_file() -> None:
    """Lists are replaced, sections are merged: what they do not name stays the file's."""
    plan = plan_of(
        FILE, {"steps": [50, 100], "min_samples": 7, "gates": {"ttft": {"tolerance": 1}, "errors": {"enabled": False}}}
    )
    assert (plan.steps, plan.min_samples, plan.hold_s) == ((0.5, 1.0), 7, 60.0)
    assert plan.gates.ttft == Latency(percentiles=[50.0], tolerance=1.0)
    assert plan.gates.errors == Rate(enabled=False)
    assert plan.gates.tpot == Latency()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"hold": 5}, "hold: unknown key `hold`: did you mean `hold_s`?"),
        ({"hold_s": "long"}, "hold_s: found 'long': write a number"),
        ({"hold_s": -1}, "hold_s: found -1: write a number at least 0"),
        ({"hold_s": None}, "hold_s: has no value"),
        ({"min_samples": 1.5}, "min_samples: found 1.5: write a whole number"),
        ({"min_samples": True}, "min_samples: found true: write a whole number"),
        ({"on_failure": "rolback"}, "on_failure: found 'rolback': did you mean `rollback`?"),
        ({"false_alarms": 0.6}, "false_alarms: found 0.6: write a number more than 0 and less than 0.5"),
        ({"gates": {"ttft": {"tolerence": 1}}}, "gates.ttft.tolerence: unknown key"),
        ({"gates": {"tftt": {}}}, "gates.tftt: unknown key `tftt`: did you mean `ttft`?"),
        ({"gates": 1}, "gates: found 1: write a mapping"),
        ({"gates": {"ttft": [1]}}, "gates.ttft: found a list: write a mapping"),
        ({"steps": []}, "steps: is empty"),
        ({"steps": [5, 1, 100]}, "steps: go up, and end with 100"),
        ({"steps": [1, 5]}, "steps: go up, and end with 100"),
        ({"steps": [0, 100]}, "steps[0]: found 0: write a number more than 0"),
        ({"steps": list(range(1, 34))}, "steps: has 33 values: write 32 at most"),
        ({"hold_s": float("nan")}, "hold_s: found nan: write a number"),
        ({"hold_s": 10**400}, "hold_s: found inf: write a number"),
        ({"testers": ["a"]}, "testers: is of the file"),
        ({"history": 10}, "history: is of the file"),
    ],
)
def test_each_mistake_is_told_with_its_place_and_remedy(overrides: dict[str, Any], told: str) -> None:
    """As in the file; nothing is passed over."""
    with pytest.raises(BadQuestionError) as caught:
        plan_of(FILE, overrides)
    assert str(caught.value).startswith(told)


def test_what_was_sent_does_not_make_an_error_long() -> None:
    """A key of a megabyte is not sent back."""
    with pytest.raises(BadQuestionError) as caught:
        plan_of(FILE, {"x" * 1_000_000: 1})
    assert len(str(caught.value)) <= 500


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)


def _plan(overrides: dict[str, Any]) -> Plan | None:
    """The plan; None for a bad question. Anything else goes through."""
    try:
        return plan_of(FILE, overrides)
    except BadQuestionError:
        return None


@given(st.dictionaries(st.sampled_from([*Rollouts.__struct_fields__, "x"]), _VALUES, max_size=3))
def test_any_overrides_make_a_plan_or_are_a_bad_question(overrides: dict[str, Any]) -> None:
    """Nothing else is raised, and a plan that is made goes up to everything."""
    plan = _plan(overrides)
    assert plan is None or (plan.steps[-1] == 1.0 and list(plan.steps) == sorted(plan.steps))


@given(st.dictionaries(st.sampled_from(Gates.__struct_fields__), _VALUES, max_size=3))
def test_any_gates_make_a_plan_or_are_a_bad_question(gates: dict[str, Any]) -> None:
    """The same one floor deeper."""
    plan = _plan({"gates": gates})
    assert plan is None or plan.gates.errors.tolerance >= 0.0

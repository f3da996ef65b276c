"""What is shown of versions and rollouts: closed sets of labels, and nothing of what is gone."""

import typing

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from extproc.rollout.state import Phase
from extproc.telemetry.families import Families
from extproc.telemetry.rollout_metrics import PHASES, GateView, RolloutMetrics, RolloutView, VersionMetrics


@pytest.fixture
def registry() -> CollectorRegistry:
    """What the page is made of."""
    return CollectorRegistry()


def samples(registry: CollectorRegistry, name: str) -> dict[str, float]:
    """Samples of a metric: value by labels, as they stand on the page."""
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line.startswith(f"warmpath_{name}{{"))
    return {labels.partition("{")[2].rstrip("}"): float(value) for labels, _, value in pairs}


def test_every_phase_is_shown() -> None:
    """One that is added to rollouts is missed here; what is forgotten is not shown at all."""
    assert set(PHASES) == set(typing.get_args(Phase)) - {"forgotten"}


def test_the_present_phase_is_1_and_all_others_are_0(registry: CollectorRegistry) -> None:
    """So that an alert sees the end of a phase, too."""
    metrics = RolloutMetrics(Families(registry))
    metrics.rollouts({"m": RolloutView("running", 0, 0.05)})
    metrics.rollouts({"m": RolloutView("paused", 0, 0.05)})
    phases = samples(registry, "rollout_phase")
    assert len(phases) == len(PHASES)
    assert {labels for labels, value in phases.items() if value} == {'model="m",phase="paused"'}


def test_a_rollout_that_is_gone_is_shown_no_more(registry: CollectorRegistry) -> None:
    """Nor are gates and answers that this keeper does not judge by any more; what others have stays."""
    metrics = RolloutMetrics(Families(registry))
    metrics.rollouts({"m": RolloutView("running", 1, 0.25, True, 3.0), "n": RolloutView("running", 0, 0.01)})
    metrics.judged(
        "m", {"canary": 7.0, "baseline": 9.0}, {"errors": GateView(1.5, True), "ttft_p50": GateView(0.0, False)}
    )
    assert samples(registry, "rollout_gate_failed") == {
        'gate="errors",model="m"': 1.0,
        'gate="ttft_p50",model="m"': 0.0,
    }
    assert samples(registry, "rollout_samples") == {'model="m",side="canary"': 7.0, 'model="m",side="baseline"': 9.0}
    metrics.judged("m", {}, {"errors": GateView(2.5, True)})
    assert samples(registry, "rollout_gate_evidence") == {'gate="errors",model="m"': 2.5}
    assert samples(registry, "rollout_samples") == {}
    metrics.rollouts({"n": RolloutView("running", 0, 0.01)})
    for name in ("rollout_phase", "rollout_step", "rollout_share", "rollout_controlled", "rollout_overdue_seconds"):
        assert all('model="n"' in labels for labels in samples(registry, name)), name


def test_events_are_counted_from_0_and_by_known_names(registry: CollectorRegistry) -> None:
    """The first rollback is an increase; what nobody knows has one name."""
    metrics = RolloutMetrics(Families(registry))
    metrics.may_happen(["m"])
    assert samples(registry, "rollout_events_total")['model="m",what="rolled_back"'] == 0.0
    metrics.happened("m", "rolled_back")
    metrics.happened("m", "x" * 100)
    counted = samples(registry, "rollout_events_total")
    assert (counted['model="m",what="rolled_back"'], counted['model="m",what="other"']) == (1.0, 1.0)


def test_a_version_that_is_gone_has_no_share(registry: CollectorRegistry) -> None:
    """Its requests stay counted."""
    metrics = VersionMetrics(Families(registry))
    metrics.shares({"m": {"one": 0.9, "two": 0.1}})
    metrics.ended("m", "two", "ok")
    metrics.shares({"m": {"one": 1.0}})
    assert samples(registry, "version_share") == {'model="m",version="one"': 1.0}
    assert samples(registry, "version_requests_total") == {'model="m",outcome="ok",version="two"': 1.0}

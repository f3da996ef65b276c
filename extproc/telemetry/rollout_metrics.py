"""Metrics of versions and rollouts: who serves what, where a rollout is, and what speaks against it."""

from collections.abc import Collection, Mapping
from typing import Final, Literal

import msgspec

from extproc.telemetry.families import Families

VersionOutcome = Literal["ok", "failed", "abandoned", "broken", "neutral"]
"""How a request ended for the version that had it; `neutral` is what no version is to blame for."""
PHASES: Final = ("running", "paused", "promoted", "retired", "rolled_back", "aborted")
EVENTS: Final = (
    "started",
    "step",
    "paused",
    "resumed",
    "promoted",
    "retired",
    "rolled_back",
    "aborted",
    "forgotten",
    "verdict",
    "gate_failed",
)
_OTHER: Final = "other"


class VersionMetrics:
    """Versions' part of a worker's metrics."""

    def __init__(self, families: Families) -> None:
        self._requests = families.counter(
            "version_requests_total", "Requests of models with versions.", ("model", "version", "outcome")
        )
        self._share = families.gauge("version_share", "Share of the traffic that a version gets.", ("model", "version"))
        self._shown: set[tuple[str, str]] = set()

    def ended(self, model: str, version: str, outcome: VersionOutcome) -> None:
        """A request of a version is over; names are those of the configuration."""
        self._requests.at(model, version, outcome).inc()

    def shares(self, shares: Mapping[str, Mapping[str, float]]) -> None:
        """Share of the traffic by model and version, as this worker splits it; others are shown no more."""
        shown = {(model, version) for model, versions in shares.items() for version in versions}
        for gone in self._shown - shown:
            self._share.drop(*gone)
        for model, versions in shares.items():
            for version, share in versions.items():
                self._share.at(model, version).set(share)
        self._shown = shown


class RolloutView(msgspec.Struct, frozen=True, gc=False):
    """What is shown of one rollout.

    Attributes:
        phase: as `rollout.state.Phase`.
        step: number of the present step, from 0.
        share: share of the traffic that the canary gets.
        acting: this keeper looks after it.
        overdue_s: for how long its step has lasted beyond its hold time.
    """

    phase: str
    step: int
    share: float
    acting: bool = False
    overdue_s: float = 0.0


class GateView(msgspec.Struct, frozen=True, gc=False):
    """What is shown of one gate.

    Attributes:
        evidence: log10 of the evidence against the canary.
        failed: the gate has failed.
    """

    evidence: float
    failed: bool


class RolloutMetrics:
    """Rollouts' part of a keeper's metrics."""

    def __init__(self, families: Families) -> None:
        counter, gauge = families.counter, families.gauge
        self._phase = gauge("rollout_phase", "1 for the phase that a model's rollout is in.", ("model", "phase"))
        self._step = gauge("rollout_step", "Step that it is at, from 0.", ("model",))
        self._share = gauge("rollout_share", "Share of the traffic that its canary gets.", ("model",))
        self._acting = gauge("rollout_controlled", "1 on the keeper that looks after it.", ("model",))
        self._overdue = gauge("rollout_overdue_seconds", "Time of its step beyond the hold time.", ("model",))
        self._samples = gauge("rollout_samples", "Answers of its step that count.", ("model", "side"))
        self._evidence = gauge("rollout_gate_evidence", "Log10 of the evidence against a canary.", ("model", "gate"))
        self._failed = gauge("rollout_gate_failed", "1 for gates that have failed.", ("model", "gate"))
        self._events = counter("rollout_events_total", "Lines of the audit log.", ("model", "what"))
        self._gates: dict[str, set[str]] = {}
        self._models: set[str] = set()

    def may_happen(self, models: Collection[str]) -> None:
        """Begin to count the events of these models, so that the first of each is seen as an increase."""
        for model in models:
            for what in EVENTS:
                self._events.at(model, what)

    def happened(self, model: str, what: str) -> None:
        """A line was written."""
        self._events.at(model, what if what in EVENTS else _OTHER).inc()

    def rollouts(self, views: Mapping[str, RolloutView]) -> None:
        """All rollouts that are known, by model; others are shown no more."""
        for model in self._models - views.keys():
            for phase in PHASES:
                self._phase.drop(model, phase)
            for family in (self._step, self._share, self._acting, self._overdue):
                family.drop(model)
        for model, view in views.items():
            for phase in PHASES:
                self._phase.at(model, phase).set(float(phase == view.phase))
            self._step.at(model).set(view.step)
            self._share.at(model).set(view.share)
            self._acting.at(model).set(float(view.acting))
            self._overdue.at(model).set(view.overdue_s)
        self._models = set(views)

    def judged(self, model: str, samples: Mapping[str, float], gates: Mapping[str, GateView]) -> None:
        """What a canary is judged by: answers by side, and its gates; none once this keeper does not judge it."""
        for side in ("canary", "baseline"):
            if side in samples:
                self._samples.at(model, side).set(samples[side])
            else:
                self._samples.drop(model, side)
        for gone in self._gates.get(model, set()) - gates.keys():
            self._evidence.drop(model, gone)
            self._failed.drop(model, gone)
        for gate, view in gates.items():
            self._evidence.at(model, gate).set(view.evidence)
            self._failed.at(model, gate).set(float(view.failed))
        self._gates[model] = set(gates)

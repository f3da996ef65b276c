"""A rollout as it is kept: one document a model, which every replica reads. Values and their bytes, no I/O."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from extproc.config_rollouts import Gates, OnFailure
from extproc.errors import StoreError

GROUP = "rollouts"
"""Group of documents, parts and records in the store: documents and records by model, parts by `evidence_name`."""

Phase = Literal["running", "paused", "promoted", "retired", "rolled_back", "aborted", "forgotten"]
"""`promoted`: at 100 %, conversations on the baseline may stay. `retired`: they may not. It and what
follows are ends. `forgotten`: it counts as if there were none, and is dropped once nobody remembers what was before."""
ACTIVE: frozenset[Phase] = frozenset({"running", "paused", "promoted"})
"""Phases that the controller looks after."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How a rollout goes; see `config_rollouts.Rollouts`. `steps` are shares of 1, the last is 1."""

    steps: tuple[float, ...]
    hold_s: float
    settle_s: float
    min_samples: int
    on_failure: OnFailure
    false_alarms: Annotated[float, Meta(gt=0, lt=1)]
    require_verdict: bool
    retire_after_s: float
    gates: Gates


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the audit log.

    Attributes:
        at: when, in seconds of the store's clock.
        model: the model.
        rollout: id of its rollout.
        what: what happened: `started`, `step`, `paused`, `resumed`, `promoted`, `retired`, `rolled_back`, `aborted`,
            `forgotten`, `verdict`, `gate_failed` (reported, nothing done).
        by: who did it: an operator's name as it was given, or `controller`.
        share: share of the canary from now on.
        gate: gate that failed.
        text: why, for people.
        told: numbers that it was decided by.
    """

    at: float
    model: str
    rollout: str
    what: str
    by: str
    share: float = 0.0
    gate: str = ""
    text: str = ""
    told: Mapping[str, float] = {}


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout. Times are seconds of the store's clock.

    Attributes:
        id: unique.
        model: the model.
        canary: version that gets more and more.
        base: weights of all versions before, the canary's with them.
        plan: how it goes.
        phase: where it is.
        step: index of the present step.
        share: share of the traffic that the canary gets now, 0 to 1.
        started: when it began.
        entered: when the present step began; a pause does not change it.
        since: when the present step or phase began.
        held_s: time of the present step that passed before it was paused.
        earlier: shares of the canary that were in force before and whose conversations stay, the newest first.
        gate: gate that failed; empty while none has.
        reason: why it is in this phase, for people.
        verdict: verdict on the present step, posted from outside.
        passed_over: gates of the present step whose failure stops nothing any more: it was reported, or an operator
            went on in spite of it.
        before: (units at risk, those with an event) of the baseline in the steps before, by gate: what rates are
            compared with where the baseline gets nothing.
        event: what happened when it became as it is: kept with it, so that no line of the audit log is lost with who
            was about to write it.
    """

    id: str
    model: str
    canary: str
    base: Mapping[str, float]
    plan: Plan
    phase: Phase = "running"
    step: int = 0
    share: float = 0.0
    started: float = 0.0
    entered: float = 0.0
    since: float = 0.0
    held_s: float = 0.0
    earlier: tuple[float, ...] = ()
    gate: str = ""
    reason: str = ""
    verdict: Literal["", "pass", "fail"] = ""
    passed_over: tuple[str, ...] = ()
    before: Mapping[str, tuple[int, int]] = {}
    event: Event | None = None

    @property
    def epoch(self) -> str:
        """What is measured belongs to one epoch: a step of a rollout, which a pause does not end."""
        return f"{self.id}-{self.step}"


_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_pack = msgspec.json.Encoder().encode
_read = msgspec.json.Decoder(Rollout).decode
_read_event = msgspec.json.Decoder(Event).decode


def encode(rollout: Rollout) -> bytes:
    """A rollout as bytes of the store."""
    return _pack(rollout)


def decode(payload: bytes) -> Rollout:
    """The rollout that bytes of the store stand for. Raises StoreError for others."""
    try:
        return _read(payload)
    except _UNREADABLE as error:
        raise StoreError(f"a rollout in the store cannot be read: {error}") from error


def encode_event(event: Event) -> bytes:
    """An event as bytes of the store."""
    return _pack(event)


def decode_event(payload: bytes) -> Event:
    """The event that bytes of the store stand for. Raises StoreError for others."""
    try:
        return _read_event(payload)
    except _UNREADABLE as error:
        raise StoreError(f"an event in the store cannot be read: {error}") from error


def evidence_name(rollout: Rollout) -> str:
    """Name of the parts in which workers publish what they measured of the present step."""
    return rollout.epoch


def weights(rollout: Rollout, share: float) -> Mapping[str, float]:
    """Weights of all versions when the canary has this share: the others keep their proportions."""
    others = {version: weight for version, weight in rollout.base.items() if version != rollout.canary}
    total = sum(others.values())
    if total <= 0.0 or share >= 1.0:
        return {rollout.canary: 1.0}
    return {**{version: weight / total * (1.0 - share) for version, weight in others.items()}, rollout.canary: share}


def governs(rollout: Rollout, configured: Mapping[str, float]) -> bool:
    """Whether a rollout still says who gets what: until it is over and the file's weights were changed after it.

    A version of weight 0 that comes or goes changes nothing, unless it is the canary: else who writes the next version
    down would give the retired one everything again.
    """
    if rollout.phase in ACTIVE:
        return True
    if rollout.phase == "forgotten":
        return False
    return rollout.canary in configured and _used(rollout.base) == _used(configured)


def _used(weights: Mapping[str, float]) -> dict[str, float]:
    return {version: weight for version, weight in weights.items() if weight > 0.0}

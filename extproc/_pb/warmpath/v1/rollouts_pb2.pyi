from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StartRequest(_message.Message):
    __slots__ = ("model", "to", "overrides", "dry_run")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    model: str
    to: str
    overrides: _struct_pb2.Struct
    dry_run: bool
    def __init__(self, model: _Optional[str] = ..., to: _Optional[str] = ..., overrides: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class StartReply(_message.Message):
    __slots__ = ("rollout", "preview", "warnings", "dry_run")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    rollout: Rollout
    preview: _containers.RepeatedScalarFieldContainer[str]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    dry_run: bool
    def __init__(self, rollout: _Optional[_Union[Rollout, _Mapping]] = ..., preview: _Optional[_Iterable[str]] = ..., warnings: _Optional[_Iterable[str]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedCompositeFieldContainer[RolloutStatus]
    def __init__(self, statuses: _Optional[_Iterable[_Union[RolloutStatus, _Mapping]]] = ...) -> None: ...

class ChangeRequest(_message.Message):
    __slots__ = ("model", "text", "rollout")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    rollout: str
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., rollout: _Optional[str] = ...) -> None: ...

class PromoteRequest(_message.Message):
    __slots__ = ("model", "text", "rollout", "full", "step", "phase")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    rollout: str
    full: bool
    step: int
    phase: str
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., rollout: _Optional[str] = ..., full: _Optional[bool] = ..., step: _Optional[int] = ..., phase: _Optional[str] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("model", "text", "rollout", "force")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    rollout: str
    force: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., rollout: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class ChangeReply(_message.Message):
    __slots__ = ("rollout", "event")
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    rollout: Rollout
    event: RolloutEvent
    def __init__(self, rollout: _Optional[_Union[Rollout, _Mapping]] = ..., event: _Optional[_Union[RolloutEvent, _Mapping]] = ...) -> None: ...

class VerdictRequest(_message.Message):
    __slots__ = ("model", "verdict", "text", "rollout", "step")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    model: str
    verdict: str
    text: str
    rollout: str
    step: int
    def __init__(self, model: _Optional[str] = ..., verdict: _Optional[str] = ..., text: _Optional[str] = ..., rollout: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class HistoryRequest(_message.Message):
    __slots__ = ("model", "limit", "before")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    model: str
    limit: int
    before: str
    def __init__(self, model: _Optional[str] = ..., limit: _Optional[int] = ..., before: _Optional[str] = ...) -> None: ...

class HistoryReply(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[RolloutLine]
    def __init__(self, events: _Optional[_Iterable[_Union[RolloutLine, _Mapping]]] = ...) -> None: ...

class RolloutLine(_message.Message):
    __slots__ = ("id", "event")
    ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    id: str
    event: RolloutEvent
    def __init__(self, id: _Optional[str] = ..., event: _Optional[_Union[RolloutEvent, _Mapping]] = ...) -> None: ...

class RolloutStatus(_message.Message):
    __slots__ = ("model", "versions", "now", "rollout", "governs", "judgement", "hold_left_s")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    GOVERNS_FIELD_NUMBER: _ClassVar[int]
    JUDGEMENT_FIELD_NUMBER: _ClassVar[int]
    HOLD_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    model: str
    versions: _containers.RepeatedCompositeFieldContainer[VersionNow]
    now: float
    rollout: Rollout
    governs: bool
    judgement: RolloutJudgement
    hold_left_s: float
    def __init__(self, model: _Optional[str] = ..., versions: _Optional[_Iterable[_Union[VersionNow, _Mapping]]] = ..., now: _Optional[float] = ..., rollout: _Optional[_Union[Rollout, _Mapping]] = ..., governs: _Optional[bool] = ..., judgement: _Optional[_Union[RolloutJudgement, _Mapping]] = ..., hold_left_s: _Optional[float] = ...) -> None: ...

class VersionNow(_message.Message):
    __slots__ = ("name", "pool", "weight", "share")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    name: str
    pool: str
    weight: float
    share: float
    def __init__(self, name: _Optional[str] = ..., pool: _Optional[str] = ..., weight: _Optional[float] = ..., share: _Optional[float] = ...) -> None: ...

class Rollout(_message.Message):
    __slots__ = ("id", "model", "canary", "base", "plan", "phase", "step", "share", "started", "since", "held_s", "gate", "reason", "verdict")
    class BaseEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    HELD_S_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    id: str
    model: str
    canary: str
    base: _containers.ScalarMap[str, float]
    plan: RolloutPlan
    phase: str
    step: int
    share: float
    started: float
    since: float
    held_s: float
    gate: str
    reason: str
    verdict: str
    def __init__(self, id: _Optional[str] = ..., model: _Optional[str] = ..., canary: _Optional[str] = ..., base: _Optional[_Mapping[str, float]] = ..., plan: _Optional[_Union[RolloutPlan, _Mapping]] = ..., phase: _Optional[str] = ..., step: _Optional[int] = ..., share: _Optional[float] = ..., started: _Optional[float] = ..., since: _Optional[float] = ..., held_s: _Optional[float] = ..., gate: _Optional[str] = ..., reason: _Optional[str] = ..., verdict: _Optional[str] = ...) -> None: ...

class RolloutPlan(_message.Message):
    __slots__ = ("steps", "hold_s", "settle_s", "min_samples", "on_failure", "false_alarms", "require_verdict", "retire_after_s", "gates")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    HOLD_S_FIELD_NUMBER: _ClassVar[int]
    SETTLE_S_FIELD_NUMBER: _ClassVar[int]
    MIN_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ON_FAILURE_FIELD_NUMBER: _ClassVar[int]
    FALSE_ALARMS_FIELD_NUMBER: _ClassVar[int]
    REQUIRE_VERDICT_FIELD_NUMBER: _ClassVar[int]
    RETIRE_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    GATES_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedScalarFieldContainer[float]
    hold_s: float
    settle_s: float
    min_samples: int
    on_failure: str
    false_alarms: float
    require_verdict: bool
    retire_after_s: float
    gates: _struct_pb2.Struct
    def __init__(self, steps: _Optional[_Iterable[float]] = ..., hold_s: _Optional[float] = ..., settle_s: _Optional[float] = ..., min_samples: _Optional[int] = ..., on_failure: _Optional[str] = ..., false_alarms: _Optional[float] = ..., require_verdict: _Optional[bool] = ..., retire_after_s: _Optional[float] = ..., gates: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class RolloutJudgement(_message.Message):
    __slots__ = ("epoch", "gates", "canary", "baseline", "parts")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GATES_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    BASELINE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    gates: _containers.RepeatedCompositeFieldContainer[RolloutGate]
    canary: int
    baseline: int
    parts: int
    def __init__(self, epoch: _Optional[str] = ..., gates: _Optional[_Iterable[_Union[RolloutGate, _Mapping]]] = ..., canary: _Optional[int] = ..., baseline: _Optional[int] = ..., parts: _Optional[int] = ...) -> None: ...

class RolloutGate(_message.Message):
    __slots__ = ("name", "evidence", "threshold", "canary", "baseline", "tolerance", "canary_samples", "baseline_samples", "failed", "note")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    BASELINE_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    CANARY_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BASELINE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    name: str
    evidence: float
    threshold: float
    canary: float
    baseline: float
    tolerance: float
    canary_samples: int
    baseline_samples: int
    failed: bool
    note: str
    def __init__(self, name: _Optional[str] = ..., evidence: _Optional[float] = ..., threshold: _Optional[float] = ..., canary: _Optional[float] = ..., baseline: _Optional[float] = ..., tolerance: _Optional[float] = ..., canary_samples: _Optional[int] = ..., baseline_samples: _Optional[int] = ..., failed: _Optional[bool] = ..., note: _Optional[str] = ...) -> None: ...

class RolloutEvent(_message.Message):
    __slots__ = ("at", "model", "rollout", "what", "by", "share", "gate", "text", "told")
    class ToldEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    AT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    at: float
    model: str
    rollout: str
    what: str
    by: str
    share: float
    gate: str
    text: str
    told: _containers.ScalarMap[str, float]
    def __init__(self, at: _Optional[float] = ..., model: _Optional[str] = ..., rollout: _Optional[str] = ..., what: _Optional[str] = ..., by: _Optional[str] = ..., share: _Optional[float] = ..., gate: _Optional[str] = ..., text: _Optional[str] = ..., told: _Optional[_Mapping[str, float]] = ...) -> None: ...

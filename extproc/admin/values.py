"""What the operator API takes and gives, as plain values: JSON over HTTP has these names, and so has gRPC."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from extproc.rollout.gates import Judgement
from extproc.rollout.state import Event, Rollout

Text = Annotated[str, Meta(max_length=1000)]
ShortName = Annotated[str, Meta(min_length=1, max_length=256)]


class _Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what is asked: unknown fields are refused."""


class Start(_Asked, frozen=True, kw_only=True):
    """Begin a rollout.

    Attributes:
        to: version that is to have all traffic in the end.
        overrides: keys of the section `rollouts` that are other than in the file, `gates` as a tree.
        dry_run: say what would happen, or why it cannot, and change nothing.
    """

    to: ShortName
    overrides: dict[str, Any] = {}
    dry_run: bool = False


class Change(_Asked, frozen=True, kw_only=True):
    """Pause, resume or abort.

    Attributes:
        text: why, for the audit log.
        rollout: id of the rollout that is meant; when another one runs by now, nothing is done. Empty for whichever.
    """

    text: Text = ""
    rollout: Annotated[str, Meta(max_length=256)] = ""


class Promote(Change, frozen=True, kw_only=True):
    """Go on to the next step at once; of a rollout that has 100 % already, end what the old version still has.

    Attributes:
        full: go to 100 %, past all steps.
        step: step that the operator saw, counted from 0; when another one runs by now, nothing is done. None for
            whichever it is.
        phase: phase that the operator saw, likewise; empty for whichever.
    """

    full: bool = False
    step: Annotated[int, Meta(ge=0, le=1000)] | None = None
    phase: Annotated[str, Meta(max_length=32)] = ""


class Forget(Change, frozen=True, kw_only=True):
    """Drop what is kept of a rollout that is over.

    Attributes:
        force: also where that moves traffic, where it cannot be read, and, of a model that the configuration has not,
            where it is not over.
    """

    force: bool = False


class Verdict(_Asked, frozen=True, kw_only=True):
    """What an evaluation from outside found of the canary's answers.

    Attributes:
        verdict: `pass` or `fail`.
        text: why, for the audit log.
        rollout: as of `Change`.
        step: step that was evaluated, counted from 0; when another one runs by now, nothing is done. None for whichever
            it is.
    """

    verdict: Literal["pass", "fail"]
    text: Text = ""
    rollout: Annotated[str, Meta(max_length=256)] = ""
    step: Annotated[int, Meta(ge=0, le=1000)] | None = None


class VersionNow(msgspec.Struct, frozen=True, kw_only=True):
    """A version as it is.

    Attributes:
        name: the version.
        pool: its pool.
        weight: its weight in the file.
        share: share of new conversations that it gets now, 0 to 1.
    """

    name: str
    pool: str
    weight: float
    share: float


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A model, its versions, and its rollout.

    Attributes:
        model: the model.
        versions: its versions.
        now: seconds of the store's clock.
        rollout: its last rollout; None when it never had one.
        governs: the rollout says who gets what, not the file.
        judgement: how its controller judges the present step; None while nothing is known.
        hold_left_s: time that the present step lasts at least, from now.
    """

    model: str
    versions: list[VersionNow]
    now: float
    rollout: Rollout | None = None
    governs: bool = False
    judgement: Judgement | None = None
    hold_left_s: float = 0.0


class Statuses(msgspec.Struct, frozen=True):
    """All models with more than one version."""

    statuses: list[Status]


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that began, or would.

    Attributes:
        rollout: as it began.
        preview: what is going to happen, a line each.
        warnings: what speaks against it.
        dry_run: nothing was changed.
    """

    rollout: Rollout
    preview: list[str]
    warnings: list[str]
    dry_run: bool


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout after a change.

    Attributes:
        rollout: as it is now.
        event: what was written into the audit log.
    """

    rollout: Rollout
    event: Event


class Line(msgspec.Struct, frozen=True):
    """One line of the audit log.

    Attributes:
        id: where it stands, for `before`.
        event: what happened.
    """

    id: str
    event: Event


class History(msgspec.Struct, frozen=True):
    """The newest lines of a model's audit log, the newest first."""

    events: list[Line]

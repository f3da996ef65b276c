"""What `warmpath rollout` shows: the operator API's answers as sentences and tables. Plain functions of values."""

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import yaml

from extproc.admin.values import Changed, History, Started, Status
from extproc.config import Config
from extproc.rollout.advance import waits_for
from extproc.rollout.gates import Gate
from extproc.rollout.state import ACTIVE, Event, Rollout

_WORDS: Final = {
    "running": "is running",
    "paused": "is paused",
    "promoted": "is promoted: version {canary} has all new conversations",
    "retired": "is over: version {canary} has everything",
    "rolled_back": "was rolled back: version {canary} has nothing",
    "aborted": "was aborted: version {canary} has nothing",
    "forgotten": "is forgotten: the weights of warmpath.yaml hold",
}
_SPACE: Final = "  "


def of_status(status: Status, config: Config | None) -> str:
    """How a model stands. With a configuration, a promoted rollout ends with what to write into it."""
    lines = [f"model {status.model}"]
    rollout = status.rollout
    if rollout is None:
        lines.append("no rollout as yet: the weights of warmpath.yaml hold")
    else:
        lines += _of_rollout(status, rollout)
    lines += ["", *_versions(status)]
    if rollout is not None and rollout.phase in ("running", "paused", "promoted"):
        lines += ["", *_judged(status, rollout)]
    unwritten = rollout and any((each.weight > 0.0) != (each.name == rollout.canary) for each in status.versions)
    if rollout is not None and unwritten and status.governs and rollout.phase in ("promoted", "retired"):
        lines += ["", *to_write(rollout, config)]
    return _plain(lines)


def _of_rollout(status: Status, rollout: Rollout) -> list[str]:
    plan = rollout.plan
    lines = [
        f"rollout {rollout.id} to version {rollout.canary} {_WORDS[rollout.phase].format(canary=rollout.canary)}; "
        f"it began {_at(rollout.started)}"
    ]
    if rollout.phase in ACTIVE and rollout.canary not in {each.name for each in status.versions}:
        lines.append(f"it stands still: warmpath.yaml has no version {rollout.canary} of the model any more; abort it")
    if rollout.phase in ("running", "paused"):
        steps = ", ".join(f"{_percent(share)}" for share in plan.steps)
        since = f"{_percent(rollout.share)} since {_at(rollout.entered)}"
        lines.append(f"step {rollout.step + 1} of {len(plan.steps)} ({steps}): {since}")
    if rollout.phase == "promoted":
        lines.append(f"conversations leave the old version in {_duration(status.hold_left_s)}, or with `promote`")
    if rollout.gate:
        lines.append(f"failed gate: {rollout.gate}")
    if rollout.reason:
        lines.append(f"why: {rollout.reason}")
    if rollout.verdict:
        lines.append(f"verdict on this step: {rollout.verdict}")
    if not status.governs:
        lines.append("the weights of warmpath.yaml hold: they were changed since")
    return lines


def _versions(status: Status) -> list[str]:
    canary = status.rollout.canary if status.rollout else ""
    rows = [
        [">" if each.name == canary else "", each.name, each.pool, f"{each.weight:g}", _percent(each.share)]
        for each in status.versions
    ]
    return _table(["", "version", "pool", "weight", "now"], rows, left=3)


def _judged(status: Status, rollout: Rollout) -> list[str]:
    judgement = status.judgement
    if judgement is None:
        return ["nothing is measured of this step as yet, or no keeper looks after the rollout"]
    need = rollout.plan.min_samples
    lines = [
        f"answers that count: {judgement.canary:,} of version {rollout.canary}, {judgement.baseline:,} of the others "
        f"({need:,} of each are needed), told by {judgement.parts} workers"
    ]
    if judgement.unread:
        lines.append(f"what {judgement.unread} workers told cannot be read: are they of another release?")
    if judgement.gates:
        rows = [_gate_row(gate) for gate in judgement.gates]
        header = ["", "gate", "canary", "baseline", "tolerance", "evidence", "fails at", "samples", ""]
        lines += [*_table(header, rows, left=2), "A gate fails when its evidence, log10 of an e-value, gets there."]
    if rollout.phase == "running":
        waits = waits_for(rollout, judgement, status.now)
        lines.append(
            f"waits for: {', '.join(waits)}" if waits else "waits for nothing: the next step is about to begin"
        )
    return lines


def _gate_row(gate: Gate) -> list[str]:
    return [
        "!" if gate.failed else "",
        gate.name,
        gate.shown(gate.canary),
        gate.shown(gate.baseline),
        f"+{_percent(gate.tolerance)}",
        f"{gate.evidence:.2f}",
        f"{gate.threshold:.2f}",
        f"{gate.canary_samples:,}/{gate.baseline_samples:,}",
        gate.note,
    ]


def to_write(rollout: Rollout, config: Config | None) -> list[str]:
    """What a promoted rollout asks for in the file."""
    lines = [
        f"To finish, write this into warmpath.yaml on all hosts; nothing moves when you do, and the next rollout of "
        f"{rollout.model} wants it:",
    ]
    model = config.models.get(rollout.model) if config else None
    versions: dict[str, Any] = {}
    for version in rollout.base:
        known = model.versions.get(version) if model else None
        rest = msgspec.to_builtins(known) if known else {}
        kept = {key: value for key, value in rest.items() if value is not None and key != "weight"}
        versions[version] = {**kept, "weight": 1 if version == rollout.canary else 0}
    lines += ["models:", f"  {_scalar(rollout.model)}:", "    versions:"]
    lines += [f"      {_scalar(version)}: {_flow(settings)}" for version, settings in versions.items()]
    return lines


def _scalar(text: str) -> str:
    return _flow(text)


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1 << 20, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def of_start(started: Started) -> str:
    """A rollout that began, or would."""
    rollout = started.rollout
    if started.dry_run:
        lines = ["dry run: nothing was changed. It would start, and:"]
    else:
        lines = [f"rollout {rollout.id} of model {rollout.model} to version {rollout.canary} has started:"]
    lines += [f"{_SPACE}{each}" for each in started.preview]
    lines += [f"warning: {each}" for each in started.warnings]
    return _plain(lines)


def of_change(changed: Changed) -> str:
    """What a change did."""
    rollout, event = changed.rollout, changed.event
    words = _WORDS[rollout.phase].format(canary=rollout.canary)
    lines = [f"rollout {rollout.id} of model {rollout.model} {words}"]
    if rollout.phase != "forgotten":
        lines.append(f"version {rollout.canary} has {_percent(rollout.share)}")
    if event.what == "verdict":
        lines.append(f"verdict on step {rollout.step + 1}: {rollout.verdict}")
    return _plain(lines)


def of_history(history: History) -> str:
    """The audit log, oldest line last."""
    if not history.events:
        return "nothing has happened as yet\n"
    return _plain([line for each in history.events for line in _event(each.event)])


def _event(event: Event) -> list[str]:
    gate = f", gate {event.gate}" if event.gate else ""
    text = f": {event.text}" if event.text else ""
    lines = [f"{_at(event.at)}  {event.rollout}  {event.what} by {event.by}, {_percent(event.share)}{gate}{text}"]
    if event.told:
        lines.append(f"{_SPACE * 2}{', '.join(f'{name} {value:.4g}' for name, value in event.told.items())}")
    return lines


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Rows under their header; the first `left` columns stand to the left, the others but notes to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    last = len(header) - 1
    return [
        _SPACE.join(
            cell if at == last and not header[last] else cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]


def _plain(lines: Sequence[str]) -> str:
    """Lines for a terminal, without anything that it would obey: texts come from whoever wrote them."""
    return "".join("".join(letter if letter.isprintable() else "?" for letter in line) + "\n" for line in lines)


def _percent(share: float) -> str:
    return f"{100.0 * share:.3g} %"


def _at(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h {whole % 3600 // 60} min"

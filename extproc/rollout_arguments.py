"""The arguments of `warmpath rollout`, and the question to a keeper that they stand for."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from extproc.config import Rollouts
from extproc.errors import ConfigError

_OPTIONS: Final[Mapping[str, str]] = {
    "hold": "hold_s",
    "settle": "settle_s",
    "min_samples": "min_samples",
    "on_failure": "on_failure",
    "false_alarms": "false_alarms",
    "retire_after": "retire_after_s",
    "require_verdict": "require_verdict",
}
"""Options of `start`, and the key of the section `rollouts` that each is."""
_CHANGES: Final[Mapping[str, str]] = {
    "promote": "go on to the next step now; at 100 %% already, end what the old version still has",
    "pause": "stop where it is",
    "resume": "go on after a pause",
    "abort": "take everything from the new version at once",
    "forget": "drop what is kept of a rollout that is over: the weights of warmpath.yaml hold",
    "verdict": "tell what an evaluation found of the new version's answers",
}


class _Parser(argparse.ArgumentParser):
    """A parser that may get its arguments when it is used: what they come from takes long to load."""

    late: Callable[[argparse.ArgumentParser], None] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As of the base class."""
        if self.late is not None:
            late, self.late = self.late, None
            late(self)
        return super().parse_known_args(args, namespace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands; what was parsed names its own as `action`."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=_Parser)
    _add_start(commands)
    status = _with_keeper(commands, "status", "show versions, share, samples and gates")
    status.add_argument("model", nargs="?", default="", metavar="MODEL", help="one model alone")
    text = "show it every two seconds until it is over; exit with 1 when the new version was given up"
    status.add_argument("--watch", action="store_true", help=text)
    for name, text in _CHANGES.items():
        change = _with_keeper(commands, name, text)
        change.add_argument("model", metavar="MODEL")
        if name == "verdict":
            change.add_argument("verdict", choices=("pass", "fail"))
            step = "step that was evaluated, from 1; nothing is done when another one runs"
            change.add_argument("--step", type=int, metavar="N", help=step)
        if name == "forget":
            force = "also where that moves traffic, or where it cannot be read"
            change.add_argument("--force", action="store_true", help=force)
        if name == "promote":
            step = "step that you saw, from 1; nothing is done when another one runs (default: what stands just now)"
            change.add_argument("--step", type=int, metavar="N", help=step)
            change.add_argument("--full", action="store_true", help="go to 100 %% now, past all steps")
        change.add_argument("--text", default="", metavar="WHY", help="why, for the audit log")
        meant = "the rollout that is meant; nothing is done when another one runs"
        change.add_argument("--rollout", default="", metavar="ID", help=meant)
    history = _with_keeper(commands, "history", "show the audit log, newest first")
    history.add_argument("model", metavar="MODEL")
    history.add_argument("--limit", type=int, default=100, metavar="N", help="most lines (%(default)s)")
    history.add_argument("--before", default="", metavar="ID", help="only lines older than that of this id")
    report = _with_config(commands, "report", "show what the comparisons of a shadow found, and how rollouts went")
    report.late = _add_report


def _add_report(parser: argparse.ArgumentParser) -> None:
    from extproc import rollout_report

    rollout_report.add_arguments(parser)


def _add_start(commands: "argparse._SubParsersAction[_Parser]") -> None:
    start = _with_keeper(commands, "start", "move the traffic of a model to another version, step by step")
    start.add_argument("model", metavar="MODEL")
    start.add_argument("--to", required=True, metavar="VERSION", help="version that is to have all traffic in the end")
    start.add_argument("--steps", metavar="PERCENTS", help="its share, step by step, as 1,5,25,100")
    start.add_argument("--hold", type=float, metavar="SECONDS", help="shortest time of each step")
    start.add_argument("--settle", type=float, metavar="SECONDS", help="what begins so soon in a step does not count")
    start.add_argument("--min-samples", type=int, metavar="N", help="answers of each side that a step needs")
    start.add_argument("--on-failure", metavar="ACTION", help="what a failed gate does: rollback, pause or report")
    start.add_argument("--false-alarms", type=float, metavar="CHANCE", help="of all gates and steps together")
    start.add_argument("--retire-after", type=float, metavar="SECONDS", help="how long old conversations may stay")
    start.add_argument("--require-verdict", action="store_true", default=None, help="steps wait for a verdict too")
    start.add_argument("--dry-run", action="store_true", help="say what would happen, and change nothing")


def _with_config(commands: "argparse._SubParsersAction[_Parser]", name: str, text: str) -> _Parser:
    # argparse formats `help` alone: its `%%` would stand as it is in a description.
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.".replace("%%", "%"))
    parser.add_argument("--config", type=Path, metavar="FILE", help="the configuration (warmpath.yaml)")
    more = (
        ", or one of the section `rollouts` over this rollout, as gates.ttft.tolerance=0.2" if name == "start" else ""
    )
    text = f"lay a setting over the file, as gateway.sidecar.admin=10.0.0.5:9103{more}; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help=text)
    return parser


def _with_keeper(commands: "argparse._SubParsersAction[_Parser]", name: str, text: str) -> _Parser:
    parser = _with_config(commands, name, text)
    parser.add_argument("--url", metavar="URL", help="ask the keeper at http://HOST:PORT in place of this host's")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="the token (gateway.sidecar.admin_token)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def is_override(setting: str) -> bool:
    """Whether a `--set` of `start` is about the rollout: no section of the file has the name of a key of `rollouts`."""
    return setting.partition("=")[0].partition(".")[0] in {"rollouts", *Rollouts.__struct_fields__}


def body(arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON that a sub-command sends which changes something. Raises ConfigError for what cannot be sent."""
    if arguments.action == "start":
        return {"to": arguments.to, "overrides": _overrides(arguments), "dry_run": arguments.dry_run}
    asked = {"text": arguments.text, "rollout": arguments.rollout}
    if arguments.action == "promote":
        asked["full"] = arguments.full
    if arguments.action == "forget":
        asked["force"] = arguments.force
    if arguments.action == "verdict":
        asked["verdict"] = arguments.verdict
    if arguments.action in ("promote", "verdict") and arguments.step is not None:
        asked["step"] = arguments.step - 1
        if arguments.step < 1:
            raise ConfigError(f"--step {arguments.step}: steps are counted from 1")
    return asked


def _overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    overrides = {key: value for name, key in _OPTIONS.items() if (value := getattr(arguments, name)) is not None}
    if arguments.steps is not None:
        overrides["steps"] = _steps(arguments.steps)
    for each in filter(is_override, arguments.set):
        _lay(overrides, each)
    return overrides


def _steps(text: str) -> list[float]:
    try:
        return [float(each.strip().removesuffix("%")) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"--steps {text}: write percents with commas between them, as 1,5,25,100") from None


def _lay(overrides: dict[str, Any], setting: str) -> None:
    """Lay `a.b.c=value` into a tree of overrides. Raises ConfigError."""
    path, equals, text = setting.partition("=")
    *steps, last = path.removeprefix("rollouts.").split(".")
    if not equals or not all((*steps, last)):
        raise ConfigError(f"--set {setting}: write it as key=value, as gates.ttft.tolerance=0.2")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"--set {path}: the value is not valid YAML: quote it") from None
    for step in steps:
        overrides = overrides.setdefault(step, {})
        if not isinstance(overrides, dict):
            raise ConfigError(f"--set {path}: `{step}` has a value of its own already")
    overrides[last] = value

"""`warmpath rollout`: asks a keeper's operator API, and shows what it says as text or as JSON."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from extproc import reload, rollout_text
from extproc.admin.values import Changed, History, Started, Statuses
from extproc.config import Config
from extproc.errors import WarmpathError
from extproc.rollout_arguments import body, is_override
from extproc.rollout_client import Client, client_of

_OVER: Final = ("retired", "rolled_back", "aborted")
_GIVEN_UP: Final = ("rolled_back", "aborted")
_EVERY_S: Final = 2.0
_MOST_FAILURES: Final = 150
"""Looks in a row that may fail, five minutes of them."""
_CLEAR: Final = "\x1b[H\x1b[2J"
_NO_CONFIG: Final = Config(models={}, pools={})
"""For who asks a keeper elsewhere, and has no configuration here."""
T = TypeVar("T")


def run(arguments: argparse.Namespace) -> int:
    """Run one sub-command; returns the exit code.

    Raises:
        ConfigError: wrong use, or a configuration or token that cannot be read.
        WarmpathError: the keeper does not answer, or refuses.
    """
    if arguments.action == "report":
        from extproc import rollout_report

        return rollout_report.run(reload.read(_path(arguments), arguments.set), arguments)
    config = _config(arguments)
    client = client_of(config or _NO_CONFIG, arguments.url, arguments.token_file)
    if arguments.action == "status":
        return _status(client, config, arguments)
    if arguments.action == "history":
        query = {"limit": str(arguments.limit), **({"before": arguments.before} if arguments.before else {})}
        told = client.ask("GET", (arguments.model, "history"), query=query)
        return _show(arguments, told, rollout_text.of_history(_read(told, History)))
    asked = body(arguments)
    if arguments.action == "promote" and arguments.step is None:
        asked = {**asked, **_seen(client, arguments)}
    told = client.ask("POST", (arguments.model, arguments.action), asked)
    if arguments.action == "start":
        return _show(arguments, told, rollout_text.of_start(_read(told, Started)))
    return _show(arguments, told, rollout_text.of_change(_read(told, Changed)))


def _seen(client: Client, arguments: argparse.Namespace) -> dict[str, Any]:
    """The step that stands now: should the controller take it meanwhile, another one is not skipped with it."""
    statuses = _read(client.ask("GET", (arguments.model,)), Statuses).statuses
    rollout = statuses[0].rollout if statuses else None
    if rollout is None:
        return {}
    return {"rollout": arguments.rollout or rollout.id, "step": rollout.step, "phase": rollout.phase}


def _path(arguments: argparse.Namespace) -> Path:
    path: Path | None = arguments.config
    return path or Path("warmpath.yaml")


def _config(arguments: argparse.Namespace) -> Config | None:
    """The configuration; None where another keeper is asked and there is none here. Raises ConfigError."""
    path = _path(arguments)
    if arguments.url and arguments.config is None and not path.exists():
        return None
    return reload.read(path, [each for each in arguments.set if arguments.action != "start" or not is_override(each)])


def _status(client: Client, config: Config | None, arguments: argparse.Namespace) -> int:
    path = (arguments.model,) if arguments.model else ()
    heard = False
    while True:
        told, heard = _looked(client, path, patient=heard), True
        found = _read(told, Statuses).statuses
        text = "\n".join(rollout_text.of_status(each, config) for each in found)
        _show(arguments, told, text or "no model has versions: see docs/rollouts.md\n", again=arguments.watch)
        phases = [each.rollout.phase for each in found if each.rollout is not None]
        if not arguments.watch or all(phase in _OVER for phase in phases):
            return 1 if arguments.watch and any(phase in _GIVEN_UP for phase in phases) else 0
        time.sleep(_EVERY_S)


def _looked(client: Client, path: tuple[str, ...], *, patient: bool) -> bytes:
    """One look. A patient one waits for keepers that start again, and for Redis. Raises WarmpathError."""
    failures = 0
    while True:
        try:
            return client.ask("GET", path)
        except WarmpathError as error:
            if not patient or failures == _MOST_FAILURES:
                raise
            if not failures:
                sys.stderr.write(f"warmpath: {error}; trying again\n")
        failures += 1
        time.sleep(_EVERY_S)


def _show(arguments: argparse.Namespace, told: bytes, text: str, *, again: bool = False) -> int:
    before = (_CLEAR if sys.stdout.isatty() else "\n") if again and not arguments.json else ""
    sys.stdout.write(before + (f"{told.decode().strip()}\n" if arguments.json else text))
    sys.stdout.flush()
    return 0


def _read(told: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(told, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WarmpathError("the keeper answered with something else: is it of this version?") from error

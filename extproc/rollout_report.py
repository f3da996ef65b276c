"""`warmpath rollout report`: reads what a shadow's comparisons found, and how rollouts of the model went."""

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from extproc import addresses
from extproc.config import Config, Model
from extproc.config_mistakes import nearest
from extproc.errors import ConfigError, StoreError
from extproc.rollout import state as rollouts
from extproc.shadow import folder, plots, report, results
from extproc.shadow.figures import Figures, figures
from extproc.shadow.report import Table
from extproc.shadow.result import Result
from extproc.state.document_store import DocumentStore
from extproc.state.redis import RedisStore

_MOST_EVENTS: Final = 200
_LEAST_TIMEOUT_MS: Final = 2000
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SINCE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd]?)")


class Told(msgspec.Struct):
    """What a report is made of.

    Attributes:
        model: the model.
        since: results and events older than this are left out, in seconds since the epoch.
        found: results, and how many could not be read.
        rollout: the rollout that is kept; None without one.
        events: its audit log, the newest first.
        notes: what could not be read, for people.
    """

    model: str
    since: float
    found: folder.Read
    rollout: rollouts.Rollout | None = None
    events: list[rollouts.Event] = []
    notes: list[str] = []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, besides those of the configuration."""
    parser.add_argument("model", metavar="MODEL", help="the model, or one of its aliases")
    parser.add_argument(
        "--since", type=seconds, default="24h", metavar="TIME", help="how far back, as 30m, 12h or 7d (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="write report.md, report.html, report.json and plots there too"
    )


def seconds(text: str) -> float:
    """A length of time as it is written: a number and s, m, h or d. Raises `argparse.ArgumentTypeError`."""
    found = _SINCE.fullmatch(text)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no length of time: write a number and s, m, h or d, as 12h")
    return float(found[1]) * _UNITS[found[2] or "s"]


def run(config: Config, arguments: argparse.Namespace) -> int:
    """Print the report, and write it where `--output` says; returns 0.

    Raises:
        ConfigError: the model is unknown, results cannot be read, or the folder cannot be written.
        StoreError: the store does not answer.
    """
    told = asyncio.run(_told(config, arguments.model, time.time() - arguments.since))
    found = figures(told.found.results)
    drawn: dict[tuple[str, str], list[str]] = {}
    if arguments.output:
        try:
            drawn = _draw(arguments.output, told, found)
            _write(arguments.output, told, found, drawn)
        except OSError as error:
            where = f"--output {arguments.output}"
            raise ConfigError(f"{where}: cannot be written ({error.strerror}): name a folder to write to") from error
    sys.stdout.write(to_json(told, found) if arguments.json else to_text(told, found))
    return 0


def to_json(told: Told, found: Sequence[Figures]) -> str:
    """The report as one JSON object in one line: `model`, `since`, `unreadable`, `shadows`, `rollout`, `events`."""
    value = {
        "model": told.model,
        "since": told.since,
        "unreadable": told.found.unreadable,
        "shadows": found,
        "rollout": told.rollout,
        "events": told.events,
        "notes": told.notes,
    }
    return json.dumps(msgspec.to_builtins(value)) + "\n"


def to_text(told: Told, found: Sequence[Figures]) -> str:
    """The report for a terminal."""
    parts = [report.to_text(report.title(one), report.tables(one)) for one in found]
    if told.events or told.rollout:
        parts.append(report.to_text(_heading(told), [_history(told)]))
    return "\n".join([*parts, *(f"{note}\n" for note in _notes(told))])


async def _told(config: Config, name: str, since: float) -> Told:
    model, settings = _model(config, name)
    shadow = settings.shadow
    if not config.redis.url and (shadow is None or not shadow.folder):
        raise ConfigError(
            "redis.url is missing: a report is read from the Redis that the sidecars share, or from the files of "
            "models.<name>.shadow.folder; the one that `warmpath up` brings along is known to nobody else"
        )
    if not config.redis.url:
        assert shadow is not None  # noqa: S101 -- else there is a store
        found = await asyncio.to_thread(folder.read, Path(shadow.folder), model, since, shadow.max_results)
        return Told(model, since, found, notes=["no redis.url: what rollouts did is not known here"])
    timeout_ms = max(config.redis.timeout_ms, _LEAST_TIMEOUT_MS)
    store = RedisStore(addresses.store(config.redis), timeout_ms, config.redis.key_prefix)
    try:
        if shadow is not None and shadow.folder:
            found = await asyncio.to_thread(folder.read, Path(shadow.folder), model, since, shadow.max_results)
        else:
            found = await results.read(store, model, since, shadow.max_results if shadow else 1_000_000)
        told = Told(model, since, found)
        try:
            await _read_rollout(store, told)
        except StoreError as error:
            told.notes.append(f"what rollouts did cannot be read: {error}")
        return told
    finally:
        await store.close()


def _model(config: Config, name: str) -> tuple[str, Model]:
    """A model by its name or alias. Raises ConfigError for an unknown one."""
    for known, model in config.models.items():
        if name == known or name in model.aliases:
            return known, model
    raise ConfigError(f"no model `{name}`: {nearest(name, config.models, 'models are')}")


async def _read_rollout(store: DocumentStore, told: Told) -> None:
    documents = await store.documents(rollouts.GROUP)
    if kept := documents.found.get(told.model):
        told.rollout = rollouts.decode(kept.payload)
    for entry in await store.records(rollouts.GROUP, told.model, _MOST_EVENTS):
        try:
            event = rollouts.decode_event(entry.payload)
        except StoreError:
            told.found.unreadable += 1
            continue
        if event.at >= told.since:
            told.events.append(event)


def _notes(told: Told) -> list[str]:
    notes = list(told.notes)
    if not told.found.results:
        notes.append(
            f"no results of {told.model} since {report.moment(told.since)}: models.{told.model}.shadow with "
            "mode: compare makes them, --since looks further back"
        )
    if told.found.unreadable:
        notes.append(f"{told.found.unreadable:,} records could not be read, and are left out")
    return notes


def _heading(told: Told) -> str:
    kept = told.rollout
    if kept is None:
        return f"{told.model}: rollouts"
    reason = f", {kept.reason}" if kept.reason else ""
    gate = f", gate {kept.gate}" if kept.gate else ""
    phase = kept.phase.replace("_", " ")
    return f"{told.model}: rollout of {kept.canary} is {phase} at {kept.share:.1%}, step {kept.step + 1} of " + (
        f"{len(kept.plan.steps)}{gate}{reason}"
    )


def _history(told: Told) -> Table:
    rows = [
        [
            report.moment(event.at),
            event.what.replace("_", " "),
            f"{event.share:.1%}",
            event.by,
            event.gate,
            event.text,
            ", ".join(f"{name}={value:g}" for name, value in event.told.items()),
        ]
        for event in reversed(told.events)
    ]
    return Table("What happened", ("when", "what", "canary", "by", "gate", "why", "decided by"), rows)


def _draw(out: Path, told: Told, found: Sequence[Figures]) -> dict[tuple[str, str], list[str]]:
    """Draw the plots of each pair of versions; without Matplotlib there are none, and a note says how to get them."""
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    drawn: dict[tuple[str, str], list[str]] = {}
    try:
        for index, one in enumerate(found):
            drawn[one.primary, one.shadow] = plots.draw(_of(told.found.results, one), out, f"plot-{index + 1}")
    except ImportError:
        told.notes.append(report.NO_PLOTS)
    return drawn


def _of(every: Sequence[Result], one: Figures) -> list[Result]:
    return [result for result in every if (result.primary, result.shadow) == (one.primary, one.shadow)]


def _write(out: Path, told: Told, found: Sequence[Figures], drawn: dict[tuple[str, str], list[str]]) -> None:
    markdown, page = [f"# {told.model}\n"], list[str]()
    for one in found:
        heading, shown, pictures = report.title(one), report.tables(one), drawn.get((one.primary, one.shadow), [])
        markdown.append(report.to_markdown(heading, shown, pictures))
        page.append(report.to_html(heading, shown, pictures))
    history = [_history(told)] if told.events or told.rollout else []
    if history or _notes(told):
        heading = _heading(told) if history else "Notes"
        markdown.append(report.to_markdown(heading, history, notes=_notes(told)))
        page.append(report.to_html(heading, history, notes=_notes(told)))
    _save(out / "report.md", "\n".join(markdown))
    _save(out / "report.html", report.page(page))
    _save(out / "report.json", to_json(told, found))


def _save(file: Path, text: str) -> None:
    """Write a file for this user alone: a report may hold excerpts of answers."""
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")

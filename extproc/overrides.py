"""Settings given on the command line (`--set a.b.c=value`), laid over a configuration that was read from a file."""

from collections.abc import Sequence
from typing import Any

import msgspec
import yaml

from extproc.config import Config
from extproc.config_rules import checked
from extproc.errors import ConfigError


def overlay(config: Config, settings: Sequence[str]) -> Config:
    """Return the configuration with each `path=value` laid over it; values are read as YAML.

    Raises:
        ConfigError: a setting is not of that form, names no known key, its value does not fit, or it contradicts
            another part. Values are not repeated in the text: one may be a password.
    """
    if not settings:
        return config
    plain = msgspec.to_builtins(config)
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path:
            raise ConfigError(f"--set {path or setting}: write it as section.key=value")
        _put(plain, path, _value(path, text))
    return checked(plain, _place)


def _value(path: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"--set {path}: the value is not valid YAML: quote it") from None


def _put(plain: dict[str, Any], path: str, value: Any) -> None:
    """Lay one value down. Names of pools and models may hold dots, so the keys that are there say where one ends."""
    inner, rest = plain, path
    while "." in rest and rest not in inner:
        step = max((key for key in inner if rest.startswith(f"{key}.")), key=len, default=None)
        if step is None or not isinstance(inner[step], dict):
            raise ConfigError(f"--set {path}: there is no section `{rest.partition('.')[0]}`")
        inner, rest = inner[step], rest[len(step) + 1 :]
    inner[rest] = value


def _place(path: str) -> str:
    return f"--set {path.removeprefix('$').removeprefix('.') or 'top level'}"

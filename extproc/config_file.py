"""Reads `warmpath.yaml`: YAML to `Config`, every mistake as a `ConfigError` with file, line, path and remedy."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from extproc.config import Config
from extproc.config_rules import checked
from extproc.errors import ConfigError

MAX_FILE_BYTES = 4 * 1024 * 1024
_MAX_NODES = 100_000
_MAX_DEPTH = 32
_MERGE = "tag:yaml.org,2002:merge"


def load(path: Path) -> Config:
    """Read and check a configuration file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, has an unknown or repeated key, a value of the wrong
            type or out of range, or sections that contradict one another.
    """
    return parse(_content(path), path)


def places(path: Path) -> Callable[[str], str]:
    """What tells `file:line: path` of a path such as `$.pools.main` in a file. Raises ConfigError as `load`."""
    return _Lines(str(path), _compose(_text(_content(path), path), str(path))).place


def parse(content: bytes, path: Path) -> Config:
    """Check the content of the file at `path`, which is not read again. Raises ConfigError as `load`."""
    return loads(_text(content, path), str(path))


def _content(path: Path) -> bytes:
    try:
        # One byte more than is taken tells that there is more.
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}): name an existing file with --config") from error


def _text(content: bytes, path: Path) -> str:
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes: this is not a warmpath.yaml")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}: save the file as UTF-8") from error


def loads(text: str, name: str = "<text>") -> Config:
    """Check a configuration given as text; `name` stands for the file in errors. Raises ConfigError as `load`."""
    root = _compose(text, name)
    lines = _Lines(name, root)
    plain = _construct(root, name)
    return checked(plain, lines.place)


def _compose(text: str, name: str) -> yaml.MappingNode:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise _not_yaml(error, name) from error
    except RecursionError as error:
        raise ConfigError(f"{name}: nested too deeply: this is not a warmpath.yaml") from error
    if root is None:
        raise ConfigError(f"{name}: the file is empty: it needs at least `models:` and `pools:`")
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{name}: the top level must be a mapping of sections such as `models:` and `pools:`")
    return root


def _construct(root: yaml.MappingNode, name: str) -> Any:
    try:
        return yaml.SafeLoader("").construct_document(root)
    except yaml.YAMLError as error:
        raise _not_yaml(error, name) from error
    except ValueError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}: put the value in quotes if it is text") from error


def _not_yaml(error: yaml.YAMLError, name: str) -> ConfigError:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        place = f"{name}:{mark.line + 1}" if mark else name
        return ConfigError(f"{place}: not valid YAML: {error.problem}: check indentation and quotes")
    return ConfigError(f"{name}: not valid YAML: {error}".splitlines()[0])


class _Lines:
    """Finds the line that a path such as `$.pools.main.endpoints[0]` was written on.

    Raises:
        ConfigError: a key is repeated or no plain text, or aliases blow the file up.
    """

    def __init__(self, name: str, root: yaml.MappingNode) -> None:
        self._name = name
        self._lines: dict[str, int] = {}
        for count, (path, depth, node) in enumerate(_walk(root)):
            self._lines.setdefault(path, node.start_mark.line + 1)
            if count > _MAX_NODES or depth > _MAX_DEPTH:
                raise ConfigError(f"{name}: too many values or levels: does an alias (`*name`) refer to itself?")
            if isinstance(node, yaml.MappingNode):
                self._check_keys(path, node)

    def place(self, path: str) -> str:
        """`file:line: path`, with the nearest line known when the path itself was not written."""
        known = path
        while known not in self._lines and known != "$":
            known = re.sub(r"(\.[^.\[]*|\[[^\]]*\])$", "", known) or "$"
        shown = path.removeprefix("$").removeprefix(".") or "top level"
        return f"{self._name}:{self._lines.get(known, 1)}: {shown}"

    def _check_keys(self, path: str, node: yaml.MappingNode) -> None:
        seen: set[str] = set()
        for key, _ in node.value:
            place = f"{self._name}:{key.start_mark.line + 1}: {path.removeprefix('$').removeprefix('.') or 'top level'}"
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{place}: a key must be plain text")
            if key.value in seen and key.tag != _MERGE:
                raise ConfigError(f"{place}: `{key.value}` is written twice: keep one")
            seen.add(key.value)


def _walk(root: yaml.Node) -> Iterator[tuple[str, int, yaml.Node]]:
    """Path, depth and node of every key and value, top down, a key before its value; without recursion."""
    waiting: list[tuple[str, int, yaml.Node, yaml.Node]] = [("$", 0, root, root)]
    while waiting:
        path, depth, key, value = waiting.pop()
        yield path, depth, key
        if key is not value:
            yield path, depth, value
        if isinstance(value, yaml.MappingNode):
            inner = [(f"{path}.{name.value}", depth + 1, name, item) for name, item in value.value]
        elif isinstance(value, yaml.SequenceNode):
            inner = [(f"{path}[{index}]", depth + 1, item, item) for index, item in enumerate(value.value)]
        else:
            continue
        waiting.extend(reversed(inner))

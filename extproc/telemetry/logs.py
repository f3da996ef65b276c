"""Structured logs: one JSON object a line on stderr, by the standard library's `logging`.

Prompts, keys and session ids must never be logged. Code does not pass them; `Redactor` stands behind that rule and
blots out the values of keys that are known to hold such things, wherever in a record they turn up.
"""

import json
import logging
import math
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from extproc.config import LogLevel

ROOT = "extproc"
"""Logger above all of this package's."""

REDACTED = "[redacted]"

SECRET_KEYS = frozenset(
    {
        "api_key", "apikey", "authorization", "body", "cache_salt", "content", "cookie", "credential", "credentials",
        "headers", "input", "key", "messages", "password", "passwd", "prompt", "proxy_authorization", "secret",
        "session", "session_id", "set_cookie", "tenant", "token", "user", "x_api_key", "x_session_id",
    }
)  # fmt: skip
"""Keys whose values never pass: lower case, dashes as underscores."""

_DEPTH = 6
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_URL_PASSWORD = re.compile(r"(?<=://)[^/@\s]*@")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]+")
_ASSIGNED = re.compile(
    r"""(?ix) (['"]?) \b ((?:x-)? (?:api[-_]?key|authorization|cookie|password|passwd|secret|session(?:[-_]id)?|prompt
    |token)) \1 (\s*[:=]\s*) ( "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' | [^\s,;}\]]+ )"""
)


class Redactor(logging.Filter):
    """A filter that lets every record through, with the values of `SECRET_KEYS` replaced.

    It covers fields given as `extra`, mappings among the arguments, and `key=value`, `key: value`, bearer tokens and
    passwords of URLs in texts.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Blot out secrets in `record`."""
        if isinstance(record.args, Mapping):
            record.args = _redacted(record.args, _DEPTH)
        elif record.args:
            record.args = tuple(_redacted(value, _DEPTH) for value in record.args)
        for name, value in vars(record).items():
            if name not in _PLAIN:
                setattr(record, name, _value(name, value, _DEPTH))
        return True


class JsonFormatter(logging.Formatter):
    """Writes a record as one line: `time, level, logger, message`, bound fields, the record's `extra`, `exception`."""

    def __init__(self, bound: Mapping[str, Any]) -> None:
        """Make a formatter.

        Args:
            bound: fields added to every line, such as the process's name.
        """
        super().__init__()
        self._bound = dict(bound)

    def format(self, record: logging.LogRecord) -> str:
        """One JSON object, without a newline in it."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": scrub(record.getMessage()),
            **self._bound,
        }
        for name, value in vars(record).items():
            if name not in _PLAIN and name not in line:
                line[name] = value
        if record.exc_info:
            # The traceback module's own text: file, line, source and message, never the values of locals.
            line["exception"] = scrub(self.formatException(record.exc_info))
        # ASCII alone: U+2028 and its like end a line for some readers of logs.
        return json.dumps(line, default=_described)


def setup(level: LogLevel, process: str, stream: TextIO | None = None, **bound: str | int) -> logging.Handler:
    """Send all logs of this process to `stream`; call it once, first thing in the process, and again to change level.

    This package logs from `level` on, libraries from `warning` on. A handler of an earlier call is replaced.

    Args:
        level: `telemetry.log_level` of the configuration.
        process: the process's name, such as `worker-0`.
        stream: where lines go; stderr when absent.
        bound: more fields of every line.

    Returns:
        The handler that was installed.
    """
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter({"process": process, **bound}))
    handler.addFilter(Redactor())
    root = logging.getLogger()
    for old in [installed for installed in root.handlers if isinstance(installed, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(ROOT).setLevel(level.upper())
    return handler


def scrub(text: str) -> str:
    """`text` without bearer tokens, passwords of URLs, and values assigned to secret-bearing keys."""
    text = _URL_PASSWORD.sub(f"{REDACTED}@", text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    return _ASSIGNED.sub(rf"\1\2\1\3{REDACTED}", text)


class _Handler(logging.StreamHandler[TextIO]):
    """Told apart from handlers that others installed."""


def _value(name: str, value: Any, depth: int) -> Any:
    return REDACTED if name.lower().replace("-", "_") in SECRET_KEYS else _redacted(value, depth)


def _redacted(value: Any, depth: int) -> Any:
    """`value` with secrets replaced, containers copied; what lies deeper than `depth` is replaced whole."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, Mapping):
        if not depth:
            return REDACTED
        return {str(name): _value(str(name), held, depth - 1) for name, held in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_redacted(held, depth - 1) for held in value] if depth else REDACTED
    if isinstance(value, bytes | bytearray | memoryview):
        return _described(value)
    # JSON has no NaN and no infinity.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _described(value: object) -> str:
    """JSON for what has none: errors by their text, bytes and other objects by their type alone."""
    return scrub(str(value)) if isinstance(value, Exception) else f"<{type(value).__name__}>"

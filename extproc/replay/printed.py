"""How a comparison is written: one JSON object, one table, one line of introduction."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from extproc.errors import ConfigError
from extproc.replay.compare import Compared
from extproc.replay.rows import Trace

_T = TypeVar("_T")
Column = tuple[str, Callable[[_T], float | None], Callable[[float], str]]
"""Heading, what to read of a result, how to write it."""


def to_json(trace: Trace, factor: float, results: Mapping[str, msgspec.Struct], **more: Any) -> str:
    """Return one JSON object in one line: the trace's facts, `policies.<name>`, `more`; numbers have four decimals.

    Args:
        trace: what was replayed or sent.
        factor: by which its arrivals were sped up.
        results: one for each policy.
        more: further members; values are what `msgspec.to_builtins` takes.
    """
    value = {
        "trace": {
            "name": trace.name,
            "requests": trace.requests,
            "prompt_tokens": trace.prompt_tokens,
            "output_tokens": trace.output_tokens,
            "ideal_cached_share": trace.ideal_cached_share,
            "speed": factor,
        },
        "policies": msgspec.to_builtins(dict(results)),
        **msgspec.to_builtins(more),
    }
    return json.dumps(_rounded(value)) + "\n"


def table(results: Mapping[str, _T], columns: Sequence[Column[_T]]) -> str:
    """Return the policies side by side, one line each."""
    lines = [["policy", *(heading for heading, _, _ in columns)]]
    for name, result in results.items():
        cells = [(read(result), write) for _, read, write in columns]
        lines.append([name, *("-" if value is None else write(value) for value, write in cells)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    return "\n".join([rows[0], "  ".join("-" * width for width in widths), *rows[1:]]) + "\n"


def introduction(trace: Trace, wanted: Compared) -> str:
    """Return what is compared, and what could be reached at best, for people."""
    return (
        f"{trace.name}: {trace.requests:,} requests, {trace.prompt_tokens:,} prompt tokens; one endless cache would "
        f"hold {trace.ideal_cached_share:.1%} of them. {wanted.engines} engines of {wanted.kv_tokens:,} tokens."
    )


def ms(value: float) -> str:
    """Write whole milliseconds."""
    return f"{value:,.0f}"


def percent(value: float) -> str:
    """Write a share."""
    return f"{value:.1%}"


def save(path: Path, text: str) -> None:
    """Write `text` to the file that `--output` names.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from error


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value

"""Lines of trace files, plain or gzip, and the one way to refuse what stands in them."""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from extproc.errors import TraceError

_GZIP = b"\x1f\x8b"

LONGEST_LINE = 64 << 20
"""Bytes of the longest line that is read, with its end: dozens of times what a context of a million tokens takes."""

LONGEST_S = 10 * 365 * 86_400.0
"""Longest time from the first arrival of a trace to the last, in seconds: ten years. Nobody recorded for so long, and
far beyond it a 64-bit float does not tell one step of an engine from the next."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a line raises when it is no JSON, has other types than asked for, or is nested without end."""


def numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank with their numbers from 1, without white space around them.

    A byte order mark in front of the first line is dropped. Files that begin as gzip files do are unpacked,
    whatever their names.

    Raises:
        TraceError: the file cannot be read or unpacked, or a line is longer than `LONGEST_LINE`.
    """
    try:
        with path.open("rb") as probe:
            packed = probe.read(2) == _GZIP
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 2), b""), 1):
                if len(line.rstrip(b"\r\n")) > LONGEST_LINE:
                    found = f"it is longer than {LONGEST_LINE >> 20} MiB"
                    raise refused(path, number, found, "a trace has one request a line, so split it")
                bare = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
                if bare:
                    yield number, bare
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: the gzip file is damaged or was cut off; fetch it again") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error


def first_line(path: Path) -> tuple[int, bytes]:
    """Return the first line that is not blank, behind its number.

    Raises:
        TraceError: there is none, or the file cannot be read.
    """
    for line in islice(numbered(path), 1):
        return line
    raise TraceError(f"{path}: the file is empty; a trace has one request a line")


def refused(path: Path, line: int, found: str, remedy: str) -> TraceError:
    """Return the error for one line of a file; neither `found` nor `remedy` may quote a prompt."""
    return TraceError(f"{path}, line {line}: {found}; {remedy}")


def bad_json(path: Path, line: int, error: Exception, remedy: str) -> TraceError:
    """Return the error for a line that is no JSON, or whose fields have other types than the format has."""
    if isinstance(error, msgspec.ValidationError):
        return refused(path, line, f"a field is not what the format has there ({error})", remedy)
    # Neither kind of text quotes the line: a validation error names the field and the types alone.
    return refused(path, line, "this is not JSON", f"{remedy}; a line that was cut off has to go")


def check_times(path: Path, times: Iterable[tuple[int, float]]) -> None:
    """Check that no row comes more than `LONGEST_S` after the earliest.

    Args:
        path: the file.
        times: number of the line and time in seconds, for each row.

    Raises:
        TraceError: one does, or has no finite time; the text names its line.
    """
    known = list(times)
    earliest = min((at_s for _, at_s in known), default=0.0)
    for number, at_s in known:
        if not at_s - earliest <= LONGEST_S:
            raise refused(path, number, "its time is more than 10 years after the earliest", "check its unit")

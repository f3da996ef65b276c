"""Results in files: one a model and writer, a line of JSON each, the newest ones only. Blocks: call it in a thread."""

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from extproc.errors import ConfigError, StoreError
from extproc.shadow.result import Result, decode, encode

_SUFFIX: Final = ".jsonl"
_LONGEST_NAME: Final = 160
_SLACK: Final = 0.25
"""A file grows by so much beyond what it may hold before it is written anew: a line is then written twice at most five
times over."""
_TRIM_EVERY_S: Final = 60.0
_MODE: Final = 0o600


class _At(msgspec.Struct, frozen=True):
    """The part of a line that says how old it is."""

    at: float


_at = msgspec.json.Decoder(_At).decode


class Folder:
    """Writes the results of one process.

    A line is appended in one write, so that a crash can only leave the last one torn; readers pass that over, and the
    next line begins on a new one. A file that has grown too long or too old is written anew beside, then renamed.
    """

    def __init__(self, path: Path, writer: str) -> None:
        """`writer` is this process's own name in the folder, the same after a restart: it goes on with its files."""
        self._path = path
        self._writer = quote(writer, safe="")
        self._lines: dict[str, int] = {}
        self._trimmed: dict[str, float] = {}

    def add(self, result: Result, most: int, keep_s: float) -> None:
        """Add a result, and drop those beyond the newest `most` and those older than `keep_s` by its time.

        Raises:
            StoreError: the folder cannot be written to.
        """
        stem = _stem(result.model)
        file = self._path / f"{stem}@{self._writer}{_SUFFIX}"
        try:
            if stem not in self._lines:
                self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lines[stem] = _begun(file)
                self._trimmed[stem] = float("-inf")
            _append(file, encode(result) + b"\n")
            self._lines[stem] += 1
            grown = self._lines[stem] > most + max(16, int(_SLACK * most))
            if grown or result.at - self._trimmed[stem] >= min(_TRIM_EVERY_S, keep_s):
                self._trimmed[stem] = result.at
                self._lines[stem] = _trim(file, self._lines[stem], most, result.at - keep_s)
                self._drop_left_behind(stem, result.at - keep_s)
        except OSError as error:
            self._lines.pop(stem, None)
            raise StoreError(
                f"results of shadow comparisons cannot be written to {self._path}: {error.strerror}"
            ) from error

    def _drop_left_behind(self, stem: str, since: float) -> None:
        """Remove what processes left behind that write no more: a file that nobody wrote to for so long is all old."""
        for file in _files(self._path, stem):
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_mtime < since:
                    file.unlink()


class Read(msgspec.Struct):
    """What was read.

    Attributes:
        results: the results, the newest first.
        unreadable: lines or records that are none.
    """

    results: list[Result]
    unreadable: int = 0


def read(path: Path, model: str, since: float, most: int) -> Read:
    """The newest `most` results of a model, of all writers, not older than `since`.

    Raises:
        ConfigError: the folder cannot be read.
    """
    found = Read([])
    try:
        for file in _files(path, _stem(model)):
            _read(file, since, found)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}): name the folder of `shadow.folder`") from error
    found.results.sort(key=lambda result: result.at, reverse=True)
    del found.results[most:]
    return found


def _read(file: Path, since: float, found: Read) -> None:
    with file.open("rb") as lines:
        for line in lines:
            try:
                result = decode(line)
            except StoreError:
                found.unreadable += 1
                continue
            if result.at >= since:
                found.results.append(result)


def _stem(model: str) -> str:
    """A model's name as part of a file's; a long one by its hash."""
    name = quote(model, safe="")
    return name if len(name) <= _LONGEST_NAME else f"~{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"


def _files(path: Path, stem: str) -> Iterator[Path]:
    for entry in sorted(path.iterdir()):
        if entry.suffix == _SUFFIX and entry.name.partition("@")[0] == stem:
            yield entry


def _begun(file: Path) -> int:
    """Lines of a file that is there already; a torn last line gets its end."""
    try:
        # A pipe would be read for ever, and a link be a file of somebody else's.
        if not stat.S_ISREG(file.lstat().st_mode):
            raise OSError(errno.EINVAL, "what is there is no file: remove it")
        content = file.read_bytes()
    except FileNotFoundError:
        return 0
    if content and not content.endswith(b"\n"):
        _append(file, b"\n")
        return content.count(b"\n") + 1
    return content.count(b"\n")


def _append(file: Path, line: bytes) -> None:
    out = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
    try:
        written = os.write(out, line)
        if written < len(line):
            # A full disk: what was written of the line is passed over by readers, once it has an end.
            os.write(out, b"\n")
            raise OSError(0, "no room for a whole line")
    finally:
        os.close(out)


def _trim(file: Path, lines: int, most: int, since: float) -> int:
    """Leave the newest `most` lines that are not older; returns how many there are. Written anew only if some go."""
    kept = [line for line in file.read_bytes().splitlines(keepends=True) if _is_kept(line, since)][-most:]
    if len(kept) == lines or (len(kept) == most and lines <= most + int(_SLACK * most)):
        return lines
    beside = file.with_suffix(".new")
    beside.unlink(missing_ok=True)
    _append(beside, b"".join(kept))
    beside.replace(file)
    return len(kept)


def _is_kept(line: bytes, since: float) -> bool:
    try:
        return line.endswith(b"\n") and _at(line).at >= since
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False

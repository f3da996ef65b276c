"""API keys and the file that knows their hashes.

A key is 256 random bits, so its SHA-256 gives nothing away: a slow hash with a salt is for passwords, which can be
guessed, and would cost each request what it costs a guesser.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from extproc.errors import ConfigError

_BYTES: Final = 32
_PREFIX: Final = "wp-"
_MAX_FILE_BYTES: Final = 16 * 1024 * 1024
_LINE: Final = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,62})\s+sha256:(?P<hash>[0-9a-f]{64})")
_FORM: Final = "write `NAME sha256:HASH`, as `warmpath key NAME` does"


def new(random: Callable[[int], str]) -> str:
    """A key that nobody has yet; `random` writes so many random bytes as text, like `secrets.token_urlsafe`."""
    return f"{_PREFIX}{random(_BYTES)}"


def digest(key: bytes) -> bytes:
    """What is kept of a key: its SHA-256, 32 bytes."""
    return hashlib.sha256(key).digest()


def line(client: str, key: str) -> str:
    """The line of the file that lets a client in with this key. Raises ConfigError when it can have no such name."""
    written = f"{client} sha256:{digest(key.encode()).hex()}"
    if not _LINE.fullmatch(written):
        raise ConfigError(f"{client!r} cannot name a client: use up to 63 letters, digits, dots, hyphens, underscores")
    return written


def load(path: Path) -> dict[bytes, str]:
    """Read a file of keys. Raises ConfigError when it cannot be read, or as `parse`."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        remedy = f"make it with `warmpath key NAME --file {path}`"
        raise ConfigError(f"{path}: cannot be read ({error.strerror}): {remedy}") from error
    return parse(content, path)


def parse(content: bytes, path: Path) -> dict[bytes, str]:
    """Clients by the digest of their keys. A client may have several; empty lines and those with # are passed over.

    Args:
        content: of the file.
        path: its name in errors. Whatever stands in a wrong line is never quoted: it may be a key.

    Raises:
        ConfigError: it is too large, no UTF-8, or a line is wrong.
    """
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {_MAX_FILE_BYTES} bytes: this is no file of keys")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}: {_FORM}") from error
    clients: dict[bytes, str] = {}
    for number, written in enumerate(text.splitlines(), start=1):
        if not written.strip() or written.lstrip().startswith("#"):
            continue
        found = _LINE.fullmatch(written.strip())
        if not found:
            raise ConfigError(f"{path}:{number}: no name and hash of a key: {_FORM}")
        key = bytes.fromhex(found["hash"])
        if clients.setdefault(key, found["name"]) != found["name"]:
            raise ConfigError(f"{path}:{number}: the same key is another client's above: give each client its own")
    return clients


def client_of(headers: Mapping[str, list[bytes]], clients: Mapping[bytes, str]) -> str | None:
    """The client whose key is among the headers.

    The key is looked up by its digest, so what a lookup takes tells nothing of keys that are known.

    Args:
        headers: values by lower-case name.
        clients: by digest.

    Returns:
        None without a key, or without one that is known.
    """
    shown = [_bearer(value) for value in headers.get("authorization", ())]
    shown += [value for name in ("api-key", "x-api-key") for value in headers.get(name, ())]
    return next((clients[known] for key in shown if (known := digest(key.strip())) in clients), None)


def _bearer(value: bytes) -> bytes:
    scheme, _, token = value.strip().partition(b" ")
    return token if scheme.lower() == b"bearer" else b""

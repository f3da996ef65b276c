"""`warmpath key`: makes an API key for a client. The key is shown once; what is kept is its hash."""

import os
import secrets
from pathlib import Path

from extproc.envoy import api_keys
from extproc.errors import ConfigError


def make(client: str, file: Path | None) -> str:
    """Make a key; returns the text to show.

    Args:
        client: its owner.
        file: where its line is added; made, for this user and its group to read, if it is not there. None shows the
            line.

    Raises:
        ConfigError: the client can have no such name, or the file cannot be written or is no file of keys.
    """
    key = api_keys.new(secrets.token_urlsafe)
    line = api_keys.line(client, key)
    shown = f"key:  {key}\n"
    if file is None:
        return f"{shown}line: {line}\n"
    before = ""
    if file.exists():
        api_keys.load(file)
        # An editor may have left the last line without its end.
        before = "" if file.read_bytes()[-1:] in (b"", b"\n") else "\n"
    try:
        # Appended in one write, so a worker that reads meanwhile sees the line whole or not at all.
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640), "a", encoding="utf-8") as out:
            out.write(f"{before}{line}\n")
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be written ({error.strerror}): name a file that this user may write"
        ) from error
    return f"{shown}added to {file}; it is not shown again\n"

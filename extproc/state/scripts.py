"""The Lua scripts that run inside Redis: found, joined with their helpers, and known by their digest."""

import hashlib
from functools import cache
from pathlib import Path

import msgspec

_INSTALLED = Path(__file__).parent.parent / "_redis"
_REPOSITORY = Path(__file__).parents[2] / "redis"

NAMES = (
    "reserve",
    "settle",
    "move",
    "heartbeat",
    "release",
    "pin",
    "loads",
    "snapshot",
    "hold",
    "breaker",
    "quota",
    "claim",
    "document",
)


class Script(msgspec.Struct, frozen=True):
    """One script: its name, its whole text, and the SHA-1 digest by which Redis knows it."""

    name: str
    text: str
    sha: str


@cache
def load(name: str) -> Script:
    """Return the script `name` of `NAMES`. Raises FileNotFoundError when the installation lacks it."""
    folder = _INSTALLED if _INSTALLED.is_dir() else _REPOSITORY
    parts = [(folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("common", name)]
    text = "\n".join(parts)
    # Redis names scripts by SHA-1; nothing here rests on it being hard to forge.
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

"""The order of rooms: who may import whom, read from the source itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "extproc"
SECTIONS = {path.stem for path in PACKAGE.glob("config_*.py")} - {"config_file", "config_mistakes", "config_rules"}
BOTTOM = {"errors", "clock", "config", "block_extras", "_pb"} | SECTIONS
ALLOWED: dict[str, set[str]] = {
    "request": BOTTOM,
    "telemetry": BOTTOM,
    "govern": BOTTOM,
    "rollout": BOTTOM,
    "choose": BOTTOM | {"request", "rollout"},
    "state": BOTTOM | {"govern"},
    "engines": BOTTOM,
    "tokens": BOTTOM | {"request", "state"},
    "fleet": BOTTOM | {"state", "engines", "telemetry", "rollout"},
    "envoy": BOTTOM | {"request", "telemetry", "govern", "config_file", "overrides"},
    "relay": BOTTOM | {"request", "telemetry"},
    "shadow": BOTTOM | {"request", "telemetry", "engines", "relay"},
    "admin": BOTTOM | {"telemetry", "rollout", "state", "fleet", "shadow", "config_mistakes", "rules_rollouts"},
    "sim": BOTTOM,
    "replay": {path.stem for path in PACKAGE.iterdir()} - {"cli"},
}
"""Rooms and what each may import of this package besides itself.

Top-level modules compose and may import all; so does `replay`, which runs the parts of a fleet in one process: only
the command is above it.
"""


def imports(path: Path) -> Iterator[str]:
    """First part below `extproc` of every import in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "extproc" and len(parts) > 1:
                yield parts[1]


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_what_lies_below_it(room: str) -> None:
    """Arrows between rooms follow the table; `choose` and `state` know nothing of one another."""
    broken = {
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in (PACKAGE / room).rglob("*.py")
        for name in imports(path)
        if name not in ALLOWED[room] | {room, "__version__"}
    }
    assert not broken


def test_every_room_has_its_place_in_the_table() -> None:
    """A new folder must say what it may import."""
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()} - {"_pb"}
    assert rooms == set(ALLOWED)


def test_nothing_imports_the_command() -> None:
    """`cli` is the outermost module: only `__main__` starts it."""
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "cli" in set(imports(path)) and path.name not in {"__main__.py", "cli.py"}
    }
    assert not users


def test_files_stay_short() -> None:
    """A file has one reason to exist: none passes 330 lines."""
    long = {
        str(p.relative_to(PACKAGE)): n
        for p in PACKAGE.rglob("*.py")
        if "_pb" not in p.parts
        if (n := len(p.read_text().splitlines())) > 330
    }
    assert not long

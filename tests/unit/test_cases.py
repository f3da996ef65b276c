"""docs/acceptance.md: each test that it names is where it says, and no case is left out."""

import ast
import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "docs" / "acceptance.md").read_text(encoding="utf-8")
ROWS: Final = re.findall(r"^\| ([CDE]\d+) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
NUMBERS: Final = {"C": set(range(1, 19)) - {5, 13}, "D": set(range(1, 13)) - {11}, "E": {15, 16}}


def named(cell: str) -> list[tuple[str, str]]:
    """Files of a cell, each with the tests that follow it."""
    found, file = [], ""
    for name in re.findall(r"`([^`]+)`", cell):
        if name.startswith("tests/"):
            file = name
        elif name.startswith("test_"):
            found.append((file, name))
    return found


def test_every_case_has_its_row() -> None:
    """One row a case, in order."""
    assert [case for case, _, _ in ROWS] == [f"{letter}{n}" for letter in "CDE" for n in sorted(NUMBERS[letter])]


@pytest.mark.parametrize(("case", "cell"), [(case, cell) for case, _, cell in ROWS], ids=[row[0] for row in ROWS])
def test_every_test_that_a_case_names_exists(case: str, cell: str) -> None:
    """A renamed or removed test is noticed; the one case without a test is a measurement."""
    tests = named(cell)
    assert tests or case == "C17"
    for file, name in tests:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, (file, name)

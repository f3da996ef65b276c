"""Where the public traces lie that some tests replay; they are no part of the project."""

import os
from pathlib import Path

import pytest

VARIABLE = "WARMPATH_TRACES"


def trace_path(name: str) -> Path:
    """Return a file or folder of the public traces; a test without them is skipped.

    The folder of traces is named by the environment variable, else it is `shared/traces` beside the repository.
    """
    beside = Path(__file__).parents[2] / "shared" / "traces"
    path = Path(os.environ.get(VARIABLE) or beside) / name
    if not path.exists():
        pytest.skip(f"no public traces here: {VARIABLE} names the folder that holds {name}")
    return path

"""The atheris targets of `tests/fuzz` run, and find nothing in a few thousand inputs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_TARGETS = sorted(path.stem for path in (_ROOT / "tests" / "fuzz").glob("*.py") if path.stem != "__init__")
_RUNS = 3000


def test_there_are_targets() -> None:
    """The folder is where it is looked for."""
    assert "frames" in _TARGETS


@pytest.mark.parametrize("target", _TARGETS)
def test_a_target_finds_nothing_in_a_few_thousand_runs(target: str, tmp_path: Path) -> None:
    """Any exception but those of our own tree ends the run with a status; longer runs are described in `tests.fuzz`."""
    pytest.importorskip("atheris", reason="atheris is not installed: it has no wheel for this platform")
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.fuzz.{target}", f"-atheris_runs={_RUNS}", "-seed=1"],
        cwd=tmp_path,  # a crash leaves its input in the working directory
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert f"Done {_RUNS}" in ran.stderr

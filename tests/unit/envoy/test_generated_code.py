"""The committed protobuf code is what the .proto files give."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_committed_code_equals_generated(tmp_path: Path) -> None:
    """`scripts/gen-proto.sh` writes exactly the files under `extproc/_pb`, no more and no less."""
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([ROOT / "scripts/gen-proto.sh", tmp_path], check=True, env=environment)
    assert texts(tmp_path) == texts(ROOT / "extproc/_pb")


def texts(folder: Path) -> dict[str, str]:
    """Every file's text by its path under `folder`, compiled files left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_text() for path in files}

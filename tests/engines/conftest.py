"""Real vLLM CPU engines for the tests of this directory: `make test-vllm` makes their environment and runs them."""

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engines.gateway import Gateway, gateway
from tests.engines.vllm_engine import VllmEngine, revive
from tests.ports import free_ports

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-vllm"
# Written last when the environment is made: without it the environment is half-made.
STAMP = ENVIRONMENT / "warmpath-stamp"
ENGINES = 2


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of the environment that holds vLLM; a run without it fails and says the remedy."""
    if not STAMP.exists():
        pytest.fail(f"{ENVIRONMENT.name} is missing or half-made: run `make test-vllm`", pytrace=False)
    return ENVIRONMENT / "bin" / "python"


@pytest.fixture(scope="session")
def model_name() -> str:
    """The model name that every engine answers to."""
    return "tiny"


@pytest.fixture(scope="session")
def model_dir(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama made on the spot: weights, configuration and tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    maker = Path(__file__).with_name("model.py")
    made = subprocess.run([vllm_python, maker, directory], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.fail(f"{maker.name} failed with status {made.returncode}:\n{made.stderr}", pytrace=False)
    return directory


@pytest.fixture(scope="session")
def engines(
    vllm_python: Path, model_dir: Path, model_name: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[VllmEngine]]:
    """Two healthy engines of one core each (sharing it where the machine has one), ended whatever happens.

    A test may kill one: `every_engine_alive` starts it again, on its old address, before the next test.
    """
    cores = sorted(os.sched_getaffinity(0))
    fleet = [
        VllmEngine(vllm_python, model_dir, model_name, port, cores[i % len(cores)], tmp_path_factory.mktemp(f"vllm{i}"))
        for i, port in enumerate(free_ports(ENGINES))
    ]
    with ExitStack() as cleanup:
        # A run that is told to end goes through its finalizers, as with Ctrl-C, and leaves no engine behind.
        previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
        cleanup.callback(signal.signal, signal.SIGTERM, previous)
        for engine in fleet:
            cleanup.callback(engine.stop)
        revive(fleet)
        yield fleet


@pytest.fixture(autouse=True)
def every_engine_alive(request: pytest.FixtureRequest) -> None:
    """A test that uses the engines finds all of them healthy, even after one that killed some."""
    if "engines" in request.fixturenames:
        revive(request.getfixturevalue("engines"))


@pytest.fixture
async def through(engines: list[VllmEngine], model_name: str, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway that has just started: it knows nothing of what earlier tests left in the engines' caches."""
    async with gateway(tmp_path, model_name, [engine.address for engine in engines]) as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of each engine's log beside the failure of a test that used the engines."""
    report = yield
    fleet = item.funcargs.get("engines") if isinstance(item, pytest.Function) else None
    if report.failed and isinstance(fleet, list):
        for engine in fleet:
            report.sections.append((f"log of engine {engine.address}", engine.log_tail()))
    return report

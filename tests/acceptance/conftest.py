"""What every acceptance test has: a journal of its stack's children, shown when it fails, and a short folder.

What tests measured is printed after the last of them, whether they passed or not.
"""

import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.acceptance.journal import Journal

_JOURNAL = pytest.StashKey[Journal]()
_MEASURED = pytest.StashKey[list[str]]()


@pytest.fixture(scope="module")
def journal(pytestconfig: pytest.Config) -> Journal:
    """The journal of one module's stacks."""
    pytestconfig.stash[_JOURNAL] = kept = Journal()
    return kept


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with a short path: that of a Unix socket holds about 100 characters."""
    path = Path(tempfile.mkdtemp(prefix="wa-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def measured(pytestconfig: pytest.Config) -> list[str]:
    """Texts added here are printed at the end of the whole run."""
    return pytestconfig.stash.setdefault(_MEASURED, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what was measured."""
    for text in config.stash.get(_MEASURED, []):
        terminalreporter.write_line("\n" + text)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what the children said last to the report of a failure."""
    report = yield
    kept = item.config.stash.get(_JOURNAL, None)
    if report.failed and kept is not None:
        report.sections.append(("last lines of the stack", kept.tail()))
    return report

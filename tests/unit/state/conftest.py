"""A `ResilientStore` between a shared store that fails on command and a ledger of its own."""

from collections.abc import AsyncIterator

import pytest

from extproc.clock import ManualClock
from extproc.state.memory import MemoryStore
from extproc.state.resilient import ResilientStore
from tests.unit.state.unsteady import Unsteady, resilient


@pytest.fixture
def shared() -> Unsteady:
    """The store that fails on command."""
    return Unsteady()


@pytest.fixture
def local() -> MemoryStore:
    """The worker's own ledger."""
    return MemoryStore(ManualClock())


@pytest.fixture
async def store(shared: Unsteady, local: MemoryStore) -> AsyncIterator[ResilientStore]:
    """The store under test, with room for four settles and four pins."""
    store = resilient(shared, local, max_queued=4)
    yield store
    await store.close()

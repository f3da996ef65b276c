"""Where results go: the store, or a folder, as the model's settings say."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from extproc.clock import SystemClock
from extproc.config_rollouts import Shadow
from extproc.errors import StoreError
from extproc.shadow import folder
from extproc.shadow.results import GROUP, Results, read
from extproc.state.memory_documents import MemoryDocuments
from extproc.state.values import FeedEntry
from tests.unit.shadow.parts import result


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """One thread."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def test_results_go_to_the_store_unless_a_folder_is_named(thread: ThreadPoolExecutor, tmp_path: Path) -> None:
    """Each model has its own records, and its own file."""
    store = MemoryDocuments(SystemClock())
    results = Results(store, "host-0", thread)
    await results.add(result("a"), Shadow(version="v2"))
    await results.add(result("b"), Shadow(version="v2", folder=str(tmp_path)))
    assert [one.id for one in (await read(store, "m", 0.0, 10)).results] == ["a"]
    assert [one.id for one in folder.read(tmp_path, "m", 0.0, 10).results] == ["b"]
    assert (await read(store, "other", 0.0, 10)).results == []


async def test_the_store_keeps_the_newest(thread: ThreadPoolExecutor) -> None:
    """`max_results` is the cap of the model's records."""
    store = MemoryDocuments(SystemClock())
    results = Results(store, "host-0", thread)
    for at in range(300):
        await results.add(result(f"{at}", at=float(at)), Shadow(version="v2", max_results=100))
    found = await read(store, "m", 0.0, 1000)
    assert found.results[0].id == "299"
    assert 100 <= len(found.results) < 300


async def test_results_may_be_kept_for_ever(thread: ThreadPoolExecutor) -> None:
    """A time without end is one that the configuration allows."""
    store = MemoryDocuments(SystemClock())
    await Results(store, "host-0", thread).add(result("a"), Shadow(version="v2", keep_s=float("inf")))
    assert len((await read(store, "m", 0.0, 10)).results) == 1


async def test_records_are_read_page_by_page_and_no_further_than_asked(thread: ThreadPoolExecutor) -> None:
    """More than a page of them, by age and by number; what is no result is counted."""
    store = MemoryDocuments(SystemClock())
    results = Results(store, "host-0", thread)
    for at in range(1200):
        await results.add(result(f"{at}", at=float(at)), Shadow(version="v2", max_results=100_000))
    await store.record(GROUP, "m", b"oops", 100_000, 1_000_000)
    found = await read(store, "m", 100.0, 10_000)
    assert [one.id for one in found.results] == [f"{at}" for at in range(1199, 99, -1)]
    assert found.unreadable == 1
    assert len((await read(store, "m", 0.0, 7)).results) == 7


async def test_a_request_that_took_long_ends_no_reading(thread: ThreadPoolExecutor) -> None:
    """Records lie in the order in which comparisons ended: behind one that began too early others did not."""
    store = MemoryDocuments(SystemClock())
    results = Results(store, "host-0", thread)
    for number in range(600):
        began = 50.0 if number == 100 else 150.0
        await results.add(result(f"{number}", at=began), Shadow(version="v2"))
    assert len((await read(store, "m", 100.0, 10_000)).results) == 599


async def test_what_is_too_old_is_not_read_page_by_page(thread: ThreadPoolExecutor) -> None:
    """A comparison is recorded when it is over: what was recorded before that time began before it."""

    class Counted(MemoryDocuments):
        pages = 0

        async def records(self, group: str, name: str, limit: int, before: str = "") -> Sequence[FeedEntry]:
            self.pages += 1
            return await super().records(group, name, limit, before)

    store = Counted(SystemClock())
    results = Results(store, "host-0", thread)
    for number in range(1600):
        await results.add(result(f"{number}", at=1.0), Shadow(version="v2"))
    assert (await read(store, "m", SystemClock().wall() + 3600.0, 10_000)).results == []
    assert store.pages == 1


async def test_a_result_that_cannot_be_kept_is_told(thread: ThreadPoolExecutor, tmp_path: Path) -> None:
    """Who compares counts it; nothing else fails."""
    (tmp_path / "file").write_bytes(b"")
    results = Results(MemoryDocuments(SystemClock()), "host-0", thread)
    with pytest.raises(StoreError, match="cannot be written"):
        await results.add(result("a"), Shadow(version="v2", folder=str(tmp_path / "file")))

"""What workers tell one another of their queues: what is fresh counts, what is old does not, and names stay here."""

import msgspec

from extproc.clock import ManualClock
from extproc.queue_board import BOARD, QueueBoard, mark
from extproc.state.memory import MemoryStore

SECRET = b"secret"
DEMAND = {(1, mark(SECRET, "acme")): 500.0, (2, mark(SECRET, "other")): 20.0}


def boards() -> tuple[QueueBoard, QueueBoard, ManualClock, MemoryStore]:
    """Two workers' boards over one store."""
    clock = ManualClock()
    store = MemoryStore(clock)
    return QueueBoard(store, "main", "r1", clock), QueueBoard(store, "main", "r2", clock), clock, store


async def test_a_queue_is_seen_once_it_changes() -> None:
    """The first note may be that of a process long dead; from the second on it counts, and one's own never does."""
    one, two, _, _ = boards()
    await one.tell(DEMAND)
    assert await two.others() == []
    await one.tell(DEMAND)
    assert await two.others() == [DEMAND]
    assert await one.others() == []


async def test_a_queue_that_is_told_no_more_counts_for_a_second() -> None:
    """Its worker died, or has nothing to wait for."""
    one, two, clock, _ = boards()
    for _ in range(2):
        await one.tell(DEMAND)
        await two.others()
    clock.advance(0.9)
    assert await two.others() == [DEMAND]
    clock.advance(0.2)
    assert await two.others() == []


async def test_an_empty_queue_is_told_once_and_a_dead_ones_note_is_taken_down() -> None:
    """Nothing is written while nobody waits, and nothing is left for ever."""
    one, two, clock, store = boards()
    await one.tell({})
    assert not await store.states("main" + BOARD)
    for _ in range(2):
        await one.tell(DEMAND)
        await two.others()
    await one.tell({})
    before = await store.states("main" + BOARD)
    await one.tell({})
    assert await store.states("main" + BOARD) == before
    assert await two.others() == []
    clock.advance(31.0)
    await two.others()
    assert not await store.states("main" + BOARD)


async def test_who_leaves_takes_its_note_down() -> None:
    """A clean end leaves nothing."""
    one, _, _, store = boards()
    await one.tell(DEMAND)
    await one.leave()
    assert not await store.states("main" + BOARD)


async def test_a_note_that_cannot_be_read_is_no_queue() -> None:
    """Another version of Warmpath may tell more."""
    _, two, _, store = boards()
    for text in (b"one", b"another"):
        await store.put_states("main" + BOARD, {"r9": text})
        assert await two.others() == []


async def test_names_of_tenants_do_not_enter_the_store() -> None:
    """A mark stands for each."""
    one, _, _, store = boards()
    await one.tell(DEMAND)
    (note,) = (await store.states("main" + BOARD)).values()
    assert b"acme" not in note
    assert msgspec.msgpack.decode(note)[1][0] == [1, mark(SECRET, "acme"), 500.0]

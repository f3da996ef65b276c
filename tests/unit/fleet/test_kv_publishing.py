"""What goes into the feed, how much at a time, and what is told anew when the store was gone."""

from itertools import count

from extproc.clock import ManualClock
from extproc.engines.kv_values import Stored
from extproc.errors import StoreError
from extproc.fleet.kv_chain import Chain
from extproc.fleet.kv_publishing import BLOCKS_A_S, Publishing
from extproc.fleet.kv_telling import Telling
from extproc.outbox import Outbox
from extproc.state.feed import Cached, decode
from extproc.state.memory import MemoryStore
from extproc.state.trouble import StoreDeadlineError
from tests.kv_events import Worker

AT = "10.0.0.1:8000"


class Shelf(MemoryStore):
    """A store that fails when told to, and keeps what it was given."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        super().__init__(self.clock)
        self.error: StoreError | None = None
        self.took: list[bytes] = []

    async def append(self, pool: str, payload: bytes, cap: int) -> str:
        """See `Store.append`; one that misses its deadline has been executed all the same."""
        if isinstance(self.error, StoreDeadlineError) or self.error is None:
            self.took.append(payload)
            at = await super().append(pool, payload, cap)
        if self.error is not None:
            raise self.error
        return at


class Scene:
    """Profiles of some ranks on their way into a feed."""

    def __init__(self, ranks: int = 1) -> None:
        numbers = count()
        self.shelf = Shelf()
        self.publishing = Publishing("main", self.shelf, lambda: Outbox(f"k-{next(numbers)}"), 1000)
        self.chains = [Chain() for _ in range(ranks)]
        for chain in self.chains:
            chain.begin(from_start=True, block_tokens=1)
        self.tellings = [Telling(AT, rank, chain) for rank, chain in enumerate(self.chains)]
        self.worker = Worker(AT)

    def store(self, rank: int, *numbers: int) -> None:
        """Prompts of one token."""
        for number in numbers:
            for change in self.chains[rank].apply(Stored((number,), None, (number,), 1)):
                self.tellings[rank].note(change)

    def begin(self) -> None:
        """Tell all from the beginning."""
        for telling in self.tellings:
            telling.begin(1.0)

    async def flush(self, now: float = 0.0) -> bool:
        """See `Publishing.flush`."""
        return await self.publishing.flush(self.tellings, now)


async def test_what_is_due_goes_out_in_numbered_entries() -> None:
    """Nothing is sent when there is nothing to tell."""
    scene = Scene()
    scene.begin()
    scene.store(0, 1, 2)
    assert await scene.flush()
    assert await scene.flush()
    scene.store(0, 3)
    assert await scene.flush()
    assert [decode(each).number for each in scene.shelf.took] == [1, 2]
    await scene.worker.follow(scene.shelf, "main")
    assert len(scene.worker.blocks) == 3


async def test_a_large_profile_goes_out_little_by_little_and_each_has_its_turn() -> None:
    """The feed and the workers are not flooded: so many blocks a second at the most."""
    scene = Scene(ranks=3)
    for rank in range(3):
        scene.store(rank, *range(rank * 50_000, rank * 50_000 + 20_000))
    scene.begin()
    told, flushes, ranks = 0, 0, list[int]()
    while any(telling.is_due for telling in scene.tellings):
        before = len(scene.shelf.took)
        assert await scene.flush(flushes * 0.05)
        sizes = [
            (delta.rank, len(delta.blocks) // 8)
            for entry in scene.shelf.took[before:]
            for delta in decode(entry).deltas
            if isinstance(delta, Cached)
        ]
        assert sum(size for _, size in sizes) <= 2 * 8192
        told += sum(size for _, size in sizes)
        ranks += {rank for rank, _ in sizes}
        flushes += 1
    assert told == 60_000
    assert ranks[:3] == [0, 1, 2]
    assert BLOCKS_A_S * 0.05 <= 8192


async def test_a_store_that_is_slow_gets_the_same_entry_again() -> None:
    """It may have taken it: by its number workers know it again, and nothing has to be told anew."""
    scene = Scene()
    scene.begin()
    scene.store(0, 1)
    scene.shelf.error = StoreDeadlineError("slow")
    assert await scene.flush(0.0)
    scene.store(0, 2)
    assert await scene.flush(0.1), "too early to try again"
    assert await scene.flush(0.5)
    assert scene.tellings[0].is_due, "nothing more is taken before the store answers"
    scene.shelf.error = None
    assert await scene.flush(1.0)
    assert await scene.flush(2.0)
    assert [decode(each).number for each in scene.shelf.took] == [1, 1, 1, 2]
    await scene.worker.follow(scene.shelf, "main")
    assert len(scene.worker.blocks) == 2


async def test_a_store_that_was_gone_may_have_lost_what_it_took() -> None:
    """Whoever asks is told so once, when it is back."""
    scene = Scene()
    scene.begin()
    scene.shelf.error = StoreError("gone")
    assert await scene.flush(0.0)
    assert scene.shelf.took == []
    assert await scene.flush(1.0)
    scene.shelf.error = None
    assert not await scene.flush(2.0)
    assert await scene.flush(3.0)


async def test_a_feed_that_started_over_is_told_everything_anew() -> None:
    """Its ids go back: the store was emptied, or another one took its place."""
    scene = Scene()
    scene.begin()
    scene.shelf.clock.advance(100)
    assert await scene.flush()
    scene.shelf = Shelf()
    scene.publishing._store = scene.shelf
    scene.store(0, 1)
    assert not await scene.flush()


async def test_what_was_taken_and_not_sent_can_be_given_up() -> None:
    """Others may have its endpoints: nothing of it is sent any more, and what follows comes under another name."""
    scene = Scene()
    scene.begin()
    assert not scene.publishing.give_up()
    scene.shelf.error = StoreError("gone")
    await scene.flush(0.0)
    assert scene.publishing.give_up()
    assert not scene.publishing.give_up()
    scene.shelf.error = None
    scene.begin()
    await scene.flush(1.0)
    assert {(decode(each).origin, decode(each).number) for each in scene.shelf.took} == {("k-1", 1)}


async def test_what_cannot_be_is_left_out() -> None:
    """An outbox would refuse it, and readers would take the number that it leaves out for a loss of everything."""
    scene = Scene(ranks=2)
    scene.chains[1].begin(from_start=True, block_tokens=1 << 30)
    scene.begin()
    await scene.flush(0.0)
    await scene.flush(1.0)
    scene.store(0, 1)
    await scene.flush(2.0)
    assert [decode(each).number for each in scene.shelf.took] == [1, 2]
    await scene.worker.follow(scene.shelf, "main")
    assert len(scene.worker.blocks) == 1

"""What of a precise profile waits to be told: workers end up with what the engine told, whatever could not be sent."""

from hypothesis import given
from hypothesis import strategies as st

from extproc.engines.kv_values import Cleared, KvEvent, Moved, Removed, Stored, Tier
from extproc.fleet import kv_telling
from extproc.fleet.kv_chain import Chain
from extproc.fleet.kv_telling import Telling
from extproc.state.deltas import Cached, Evicted, Exact
from tests.kv_events import Worker

AT = "10.0.0.1:8000"


class Told:
    """A chain, what is told of it, and a worker that hears it."""

    def __init__(self) -> None:
        self.chain = Chain()
        self.chain.begin(from_start=True, block_tokens=1)
        self.telling = Telling(AT, 3, self.chain)
        self.worker = Worker(AT, 3)
        self.whole = True

    def happen(self, *events: KvEvent) -> None:
        """The engine tells of events."""
        for event in events:
            for change in self.chain.apply(event):
                self.whole = self.telling.note(change) and self.whole

    def send(self, most: int = 1_000_000) -> int:
        """Bring the worker some of what waits; returns how many deltas it was."""
        deltas = self.telling.take(most)
        self.worker.apply(deltas)
        return len(deltas)

    def agree(self) -> bool:
        """Whether the worker knows what the chain has."""
        held: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
        for change in self.chain.held():
            held[change.tier].update(change.blocks)
        return self.worker.tiers == held


def prompt(*ids: int, tier: Tier = Tier.GPU) -> Stored:
    """Prompts of one token each, which is their id."""
    return Stored(ids[:1], None, ids[:1], 1, tier)


def test_nothing_is_told_before_it_begins() -> None:
    """A profile that is not in use makes no deltas."""
    told = Told()
    told.happen(prompt(1))
    assert not told.telling.is_due
    assert told.telling.take(100) == []


def test_a_profile_is_told_from_its_beginning_and_then_what_changes() -> None:
    """First that it is exact, with its size of blocks and the engine's start; then its blocks; then the rest."""
    told = Told()
    told.happen(prompt(1), prompt(2, tier=Tier.CPU))
    told.telling.begin(77.0)
    assert told.telling.is_open
    told.send()
    assert told.worker.block_tokens == 1
    assert told.worker.started_at == 77.0
    assert told.agree()
    assert told.send() == 0
    told.happen(prompt(3), Removed((1,), Tier.GPU), Moved(3, Tier.DISK))
    assert told.telling.is_due
    told.send()
    assert told.agree()
    assert len(told.worker.tiers[2]) == 1


def test_a_block_that_came_and_went_is_one_block_of_the_next_delta() -> None:
    """Changes wait as the last state of each block."""
    told = Told()
    told.telling.begin(0.0)
    told.send()
    for _ in range(50):
        told.happen(prompt(1), Removed((1,), Tier.GPU))
    (delta,) = told.telling.take(100)
    assert isinstance(delta, Evicted)
    assert len(delta.blocks) == 8


def test_an_end_is_told_even_of_a_profile_that_never_began_here() -> None:
    """Workers may use the one that another keeper told: the end takes it away, and what waits with it."""
    told = Told()
    told.telling.begin(1.0)
    told.happen(prompt(1))
    told.telling.end(1.0)
    assert told.telling.take(100) == [Exact(AT, 3, 0, 1.0)]
    assert not told.telling.is_due
    told.happen(prompt(2))
    assert not told.telling.is_due


def test_an_emptied_cache_begins_anew() -> None:
    """One delta says so, whatever the cache held."""
    told = Told()
    told.telling.begin(0.0)
    told.happen(prompt(1), prompt(2))
    told.send()
    told.happen(Cleared(), prompt(3))
    told.send()
    assert told.agree()
    assert len(told.worker.tiers[0]) == 1


def test_more_than_may_wait_is_told_anew() -> None:
    """However long nothing could be sent, what waits is bounded, and nothing wrong is told."""
    told = Told()
    told.telling.begin(0.0)
    told.send()
    for number in range(kv_telling._MOST_WAITING + 1):
        told.happen(prompt(number))
    assert not told.whole
    (first, *rest) = told.telling.take(1_000_000)
    assert isinstance(first, Exact)
    told.worker.apply([first, *rest])
    assert told.agree()


def test_a_large_profile_is_told_in_parts() -> None:
    """Each take brings about as many blocks as were asked for, and each delta is small enough for one entry."""
    told = Told()
    told.happen(*(prompt(number) for number in range(20_000)))
    told.telling.begin(0.0)
    takes = 0
    while told.telling.is_due:
        deltas = told.telling.take(5000)
        sizes = [len(delta.blocks) // 8 for delta in deltas if isinstance(delta, Cached)]
        assert sum(sizes) <= 5000 + 2 * 2048
        assert max(sizes) <= 4096
        told.worker.apply(deltas)
        takes += 1
    assert told.agree()
    assert takes >= 3


_ID = st.integers(1, 12)
_EVENT = st.one_of(
    st.builds(prompt, _ID, tier=st.sampled_from(Tier)),
    st.builds(lambda at, tier: Removed((at,), tier), _ID, st.sampled_from([*Tier, None])),
    st.builds(Moved, _ID, st.sampled_from(Tier)),
    st.just(Cleared()),
)


@given(st.lists(st.one_of(_EVENT, st.integers(1, 5), st.sampled_from(["begin", "end"])), max_size=60))
def test_workers_end_up_with_what_the_engine_told(steps: list[KvEvent | int | str]) -> None:
    """Whatever happens between two deliveries, and however little each of them brings."""
    told = Told()
    for step in steps:
        match step:
            case "begin":
                told.telling.begin(1.0)
            case "end":
                told.telling.end(1.0)
            case int():
                told.send(step)
            case _:
                assert not isinstance(step, str)
                told.happen(step)
    told.send()
    assert not told.telling.is_due
    assert told.agree() if told.telling.is_open else not told.worker.block_tokens

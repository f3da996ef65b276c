"""Charge and pin go where the request is, whichever worker hears of it."""

from collections.abc import Sequence

import msgspec
import pytest

from extproc.clock import ManualClock
from extproc.errors import StoreError
from extproc.rerouting import Place, Rerouting, Route
from extproc.state.feed import Answered
from extproc.state.knowledge import PoolKnowledge, Priors
from extproc.state.memory import MemoryStore
from extproc.state.values import Candidate, Load, Move, Reserve, Settle

ROUTE = Route("main", "a", (Place("a", 100.0, 10.0), Place("b", 300.0, 20.0)), 1000.0, "k1", 60_000, 100)


class Bench:
    """A rerouting over a memory store that holds an open charge `c1` on endpoint `a`."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.rerouting = Rerouting(store, "r1")

    async def decide(self, route: Route = ROUTE) -> None:
        """Reserve the charge and remember its route."""
        await self.store.reserve(Reserve("main", "c1", "r1", [Candidate("a", 0.0, 100.0, 10.0)], route.pin_key))
        self.rerouting.decided("c1", route)

    async def loads(self) -> dict[str, Load]:
        """Load by endpoint."""
        return dict(await self.store.loads("main"))


@pytest.fixture
def bench() -> Bench:
    """A store whose clock stands still."""
    return Bench(MemoryStore(ManualClock()))


@pytest.mark.parametrize(("endpoint", "tokens"), [("b", 300.0), ("c", 1000.0)])
async def test_a_charge_moves_with_what_the_new_endpoint_has_to_prefill(
    bench: Bench, endpoint: str, tokens: float
) -> None:
    """By its own profile when it was on the list; the whole prompt where nobody knows better. The pin moves along."""
    await bench.decide()
    bench.rerouting.heard("c1", endpoint)
    await bench.rerouting.idle()
    assert await bench.loads() == {endpoint: Load(tokens, 1)}
    assert await bench.store.pinned("main", "k1") == endpoint


@pytest.mark.parametrize("told", [["a"], [""], ["b", "a"]])
async def test_what_ends_where_it_was_picked_is_as_it_was(bench: Bench, told: Sequence[str]) -> None:
    """The pick has the request, or nobody, or the pick again after another try."""
    await bench.decide()
    before = await bench.loads()
    for endpoint in told:
        bench.rerouting.heard("c1", endpoint)
        await bench.rerouting.idle()
    assert await bench.loads() == before
    assert await bench.store.pinned("main", "k1") == "a"


async def test_a_session_moves_after_the_request_is_settled_too(bench: Bench) -> None:
    """What the access log tells at the end comes after the charge has ended."""
    await bench.decide()
    await bench.store.settle(Settle("main", "c1", "r1"))
    await bench.rerouting.served("c1", "b")
    assert await bench.store.pinned("main", "k1") == "b"
    assert "b" not in await bench.loads()


async def test_a_request_without_a_session_pins_nothing(bench: Bench) -> None:
    """Only its charge moves."""
    await bench.decide(msgspec.structs.replace(ROUTE, pin_key=""))
    await bench.rerouting.served("c1", "b")
    assert list(await bench.loads()) == ["b"]
    assert await bench.store.pinned("main", "") == ""


async def test_another_worker_s_requests_are_left_to_it(bench: Bench) -> None:
    """Each worker hears of every request; the one that decided acts."""
    await bench.decide()
    elsewhere = Rerouting(bench.store, "r2")
    before = await bench.loads()
    elsewhere.heard("c1", "b")
    await elsewhere.idle()
    assert await bench.loads() == before


async def test_what_a_feed_tells_reaches_the_worker_that_decided(bench: Bench) -> None:
    """Another worker's access log told who answers: knowledge passes it on."""
    await bench.decide()
    known = PoolKnowledge(Priors())
    known.hear(bench.rerouting.heard)
    known.apply(Answered("c1", "b", -1.0, -1.0, -1.0, -1.0))
    await bench.rerouting.idle()
    assert list(await bench.loads()) == ["b"]


async def test_the_newest_decisions_are_remembered(bench: Bench) -> None:
    """A bounded number of them; the oldest one's session stays where it was."""
    await bench.decide()
    for number in range(8192):
        bench.rerouting.decided(f"x{number}", ROUTE)
    bench.rerouting.heard("c1", "b")
    await bench.rerouting.idle()
    assert list(await bench.loads()) == ["a"]


class Gone(MemoryStore):
    """A store that moves nothing."""

    async def move(self, move: Move) -> bool:
        """Fail."""
        raise StoreError(f"no answer to {move.charge_id}")


async def test_without_a_store_nothing_moves_and_nothing_fails() -> None:
    """The charge ends with its request."""
    bench = Bench(Gone(ManualClock()))
    await bench.decide()
    await bench.rerouting.served("c1", "b")
    assert list(await bench.loads()) == ["a"]

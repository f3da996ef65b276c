"""Sessions that stay, sessions that move, and a store that does not answer."""

import json

from extproc.config import Routing
from extproc.envoy.contract import Call
from extproc.errors import StoreError
from extproc.state.memory import MemoryStore
from extproc.state.pick import MAX_CANDIDATES
from extproc.state.values import Reservation, Reserve
from tests.unit.router.parts import Bench, endpoints, text


async def test_a_session_stays_where_it_is_pinned() -> None:
    """Short turns of one session follow the pin, whatever endpoint their text alone would lead to."""
    bench = Bench()
    picks = {(await bench.chat(f"turn {n}", session="s")).metadata["endpoint"] for n in range(12)}
    assert len(picks) == 1
    assert [outcome.pinned for outcome in bench.notes.outcomes] == [False] + [True] * 11


async def test_two_tenants_with_one_session_id_do_not_share_a_pin() -> None:
    """Tenant names are part of the pin: the second tenant's session is new."""
    bench = Bench()
    for tenant in ("t1", "t2"):
        body = json.dumps({"model": "m", "messages": []}).encode()
        headers = {"x-session-id": "1", "x-warmpath-tenant": tenant}
        await bench.router.decide(Call("POST", "/v1/chat/completions", headers, body))
    assert [outcome.pinned for outcome in bench.notes.outcomes] == [False, False]


async def test_a_session_leaves_an_endpoint_that_may_not_serve() -> None:
    """The pinned endpoint is outside the subset hint: the session moves, and is pinned to where it went."""
    bench = Bench()
    first = await bench.chat("turn 1", session="s")
    others = tuple(
        e.destination for e in bench.around.fleet.pools["main"].endpoints if e.destination != first.destinations[0]
    )
    moved = await bench.chat("turn 2", session="s", subset=others)
    stays = await bench.chat("turn 3", session="s")
    assert moved.destinations[0] in others
    assert stays.destinations[0] == moved.destinations[0]
    assert bench.notes.outcomes[1].moved


async def test_a_pin_outside_the_candidates_is_still_honoured() -> None:
    """With 40 endpoints and 16 candidates, a session comes back although its endpoint is not among the cheapest."""
    bench = Bench(*endpoints(40))
    picks = set()
    for number in range(20):
        decision = await bench.chat(text(300, seed=str(number)), session="s")
        await bench.router.settle(decision)
        picks.add(decision.metadata["endpoint"])
    assert len(picks) == 1


async def test_a_pin_outside_as_many_candidates_as_there_may_be_is_honoured() -> None:
    """With `routing.candidates` at its limit the pinned endpoint takes the place of the last one."""
    bench = Bench(*endpoints(40), routing=Routing(candidates=MAX_CANDIDATES))
    picks = set()
    for number in range(20):
        decision = await bench.chat(text(300, seed=str(number)), session="s")
        await bench.router.settle(decision)
        picks.add(decision.metadata["endpoint"])
    assert len(picks) == 1
    assert [outcome.pinned for outcome in bench.notes.outcomes] == [False] + [True] * 19


class Moving(MemoryStore):
    """A store in which another replica moves the session between two calls, to one that is no candidate either."""

    async def reserve(self, ask: Reserve) -> Reservation:
        """Answer as if the pin were elsewhere, as long as pins count."""
        if ask.ignore_pin:
            return await super().reserve(ask)
        return Reservation("", absent_pin="e1" if len(ask.candidates) > 2 else "e2")


async def test_a_pin_that_moves_meanwhile_is_left() -> None:
    """After one repetition with the pinned endpoint the decision is made without a pin, and charged."""
    bench = Bench(*endpoints(40), routing=Routing(candidates=2))
    bench.around.store = Moving(bench.clock)
    decision = await bench.chat("turn", session="s")
    loads = await bench.around.store.loads("main")
    assert list(loads) == [decision.metadata["endpoint"]]


class Gone(MemoryStore):
    """A store that does not answer."""

    async def reserve(self, ask: Reserve) -> Reservation:
        """Fail."""
        raise StoreError(f"no answer to {ask.charge_id}")


async def test_without_a_store_the_cheapest_is_picked() -> None:
    """Local knowledge alone decides: whoever has the prompt gets it, wherever it stands in the tie order."""
    picks = set()
    for name in "abc":
        bench = Bench()
        bench.around.store = Gone(bench.clock)
        await bench.chat(text(4000), subset=tuple(bench.destination(name)))
        picks.add((await bench.chat(text(4000))).metadata["endpoint"])
    assert picks == {"a", "b", "c"}

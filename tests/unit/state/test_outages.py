"""Whatever the order of outages: once the shared store is back and all requests have ended, nothing is left in it."""

import asyncio
from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from extproc.clock import ManualClock
from extproc.errors import StoreError
from extproc.state.memory import MemoryStore
from extproc.state.resilient import ResilientStore
from extproc.state.trouble import RefusedError, StoreDeadlineError
from extproc.state.values import Move
from tests.unit.state.unsteady import A, B, Unsteady, ask, end, resilient
from tests.waiting import until

FAULTS: dict[str, StoreError | None] = {
    "none": None,
    "gone": StoreError("gone"),
    "late": StoreDeadlineError("late"),
    "full": RefusedError("OOM"),
}
CHARGES = [f"c{number}" for number in range(8)]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.sampled_from(CHARGES), st.sampled_from(["a", "b"])),
        st.tuples(st.just("settle"), st.sampled_from(CHARGES), st.just("")),
        st.tuples(st.just("move"), st.sampled_from(CHARGES), st.sampled_from(["a", "b"])),
        st.tuples(st.just("fault"), st.sampled_from(sorted(FAULTS)), st.sampled_from(["executes", ""])),
        st.tuples(st.just("lose"), st.just(""), st.just("")),
        st.tuples(st.just("beat"), st.just(""), st.just("")),
        st.tuples(st.just("wait"), st.just(""), st.just("")),
    ),
    max_size=40,
)


class Worker:
    """One worker's requests, each reserved once and settled once."""

    def __init__(self) -> None:
        self.shared = Unsteady()
        self.ledger = MemoryStore(ManualClock())
        self.store: ResilientStore = resilient(self.shared, self.ledger, max_queued=3)
        self.open: dict[str, str] = {}
        self._count = 0

    async def do(self, action: str, what: str, how: str) -> None:
        """Do one thing; whatever the shared store does, none of it raises."""
        if action == "reserve" and what not in self.open:
            self._count += 1
            self.open[what] = charge = f"{what}-{self._count}"
            picked = await self.store.reserve(ask(charge, A if how == "a" else B, session=what, ignore_pin=True))
            assert picked.endpoint == how
        elif action == "settle" and what in self.open:
            assert await self.store.settle(end(self.open.pop(what)))
        elif action == "move" and what in self.open:
            assert await self.store.move(Move("p", self.open[what], "r", how, 1.0, 1e-6))
        elif action == "fault":
            self.shared.fault, self.shared.executes = FAULTS[what], bool(how)
        elif action == "lose":
            await MemoryStore.release(self.shared, "p", "r")
        elif action == "beat":
            await self.store.heartbeat("p", "r", 15_000)
        elif action == "wait":
            await asyncio.sleep(0.02)

    async def local(self) -> dict[str, int]:
        """Sequences in flight by the worker's own ledger."""
        held: dict[str, int] = {}
        for charge in self.ledger.open_charges("p"):
            held[charge.reservation.endpoint] = held.get(charge.reservation.endpoint, 0) + charge.sequences
        return held


async def play(actions: Sequence[tuple[str, str, str]]) -> None:
    """Let a worker live through these actions and a last return."""
    worker = Worker()
    for action in actions:
        await worker.do(*action)
    worker.shared.fault, worker.shared.executes = None, False
    await until(lambda: worker.store.settled)
    await worker.do("beat", "", "")
    await until(lambda: worker.store.settled)
    assert await worker.shared.running() == await worker.local()
    for charge in list(worker.open):
        await worker.do("settle", charge, "")
    await until(lambda: worker.store.settled)
    assert await worker.shared.running() == {}
    await worker.store.close()


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
# The charge moves while the shared store is told of it as it was: it must not move back.
@example(
    [
        ("reserve", "c1", "a"),
        ("lose", "", ""),
        ("beat", "", ""),
        ("reserve", "c0", "a"),
        ("reserve", "c2", "a"),
        ("move", "c0", "b"),
    ]
)
def test_nothing_is_left_and_nothing_is_missing_after_any_outages(actions: list[tuple[str, str, str]]) -> None:
    """After the return the shared store holds what the worker holds, at the endpoints that serve it; then nothing."""
    asyncio.run(play(actions))

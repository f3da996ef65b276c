"""Whatever keepers, operators and the store do, and in whatever order: no step is skipped, and no line is missing."""

import asyncio
import itertools
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extproc.errors import RolloutError, StoreError
from extproc.rollout import advance
from extproc.rollout.state import ACTIVE, Event, Rollout, decode, encode_event
from extproc.state.document_store import Document
from tests.unit.fleet.parts import SkewedClock
from tests.unit.fleet.rollout_parts import Keeper, Shelf, rounds, started

KEEPERS = 2
ACTIONS = st.one_of(
    st.tuples(st.just("round"), st.integers(0, KEEPERS - 1)),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 2.0, 5.0, 11.0])),
    st.tuples(st.just("restart"), st.integers(0, KEEPERS - 1)),
    st.tuples(st.just("down"), st.booleans()),
    st.tuples(st.just("record_down"), st.booleans()),
    st.tuples(st.just("operator"), st.sampled_from(["pause", "resume", "promote", "abort"])),
)


class Watched(Shelf):
    """A store that remembers every document that was put, and may lose the answer to a call it has carried out."""

    def __init__(self, clock: SkewedClock) -> None:
        super().__init__(clock)
        self.history: list[Rollout] = []
        self.deaf = False

    async def put_document(self, group: str, name: str, document: Document) -> bool:
        """See `Store.put_document`."""
        before = (await self.documents(group)).found.get(name)
        put = await super().put_document(group, name, document)
        if put and before != document:
            self.history.append(decode(document.payload))
        if self.deaf:
            self.deaf = False
            raise StoreError("the answer was lost")
        return put


async def operate(shelf: Watched, what: str) -> None:
    """An operator's call, as far as the rollout allows it; its line may be left for a keeper to write."""
    step: Any = getattr(advance, what)
    try:
        last = await shelf.rollout()
        after, event = step(last, shelf.clock.now, "ann")
        if last.event is not None and all(line != last.event for line in await shelf.log()):
            await shelf.record("rollouts", "m", encode_event(last.event), 1000, 0)
        await shelf.put(msgspec.structs.replace(after, event=event))
    except (RolloutError, StoreError):
        pass


async def play(actions: list[tuple[str, Any]]) -> tuple[Watched, list[Event]]:
    """Let all of it happen, then let one keeper finish in peace."""
    shelf = Watched(SkewedClock())
    await shelf.put(started(shelf.clock.now))
    keepers, born = [Keeper(shelf, f"k{at}") for at in range(KEEPERS)], KEEPERS
    for what, with_what in actions:
        if what == "round":
            await keepers[with_what].controller.round()
        elif what == "wait":
            shelf.clock.advance(with_what)
        elif what == "restart":
            keepers[with_what], born = Keeper(shelf, f"k{born}"), born + 1
        elif what == "down":
            shelf.down = with_what
        elif what == "record_down":
            shelf.record_down = with_what
            shelf.deaf = with_what
        else:
            await operate(shelf, with_what)
    shelf.down = shelf.record_down = shelf.deaf = False
    await rounds(shelf, keepers[:1], 60.0)
    return shelf, await shelf.log()


# An operator acts while the step's time is over and no keeper has looked: its line is all that is left of what it did.
@example([("wait", 11.0), ("operator", "pause"), ("operator", "resume"), ("round", 0)])
# Who acts freezes, the other takes over, and the first wakes.
@example([("round", 0), ("wait", 5.0), ("round", 1), ("wait", 11.0), ("round", 1), ("round", 0), ("round", 1)])
# A step is taken, its answer is lost and its line cannot be written; the keeper dies.
@example(
    [("round", 0), ("wait", 2.0), ("round", 0), ("wait", 11.0), ("record_down", True), ("round", 0), ("restart", 0)]
)
@settings(max_examples=60, deadline=None)
@given(st.lists(ACTIONS, min_size=1, max_size=40))
def test_a_rollout_takes_its_steps_in_order_and_leaves_a_line_of_each(actions: list[tuple[str, Any]]) -> None:
    """Keepers that die, freeze or disagree, calls that fail or whose answer is lost, operators in between."""
    shelf, log = asyncio.run(play(actions))
    for before, after in itertools.pairwise(shelf.history):
        assert before.phase in ACTIVE
        assert after.step in (before.step, before.step + 1)
        assert after.event != before.event
    assert shelf.history[-1].phase not in ("running", "promoted")
    told = [log[0], *(after for before, after in itertools.pairwise(log) if after != before)]
    assert told == [rollout.event for rollout in shelf.history]

"""Rollouts that are forgotten: every keeper and worker does so, and the store has room again."""

import msgspec
import pytest

from extproc.fleet.rollouts import FORGET_S
from extproc.rollout import advance
from extproc.rollout.state import GROUP, Rollout, encode
from extproc.state.document_store import Document
from tests.unit.fleet.parts import SkewedClock
from tests.unit.fleet.rollout_parts import Keeper, Shelf, configured, rounds, started


@pytest.fixture
def shelf() -> Shelf:
    """A store in memory."""
    return Shelf(SkewedClock())


async def forgotten(shelf: Shelf) -> Rollout:
    """A rollout that was aborted, and is to be forgotten from now on; returns what it was before."""
    rollout = started(shelf.clock.now)
    await shelf.put(rollout)
    over, event = advance.abort(rollout, shelf.clock.now, "ann")
    over = msgspec.structs.replace(over, event=event)
    await shelf.put(over)
    last, event = advance.forget(over, shelf.clock.now, "bob")
    await shelf.put(msgspec.structs.replace(last, event=event))
    return over


async def test_it_is_dropped_once_all_have_seen_it(shelf: Shelf) -> None:
    """After five minutes, by any keeper, whether it has a lease or not, with its line in the audit log."""
    await forgotten(shelf)
    keepers = [Keeper(shelf, name) for name in ("k1", "k2")]
    await rounds(shelf, keepers, FORGET_S)
    assert (await shelf.kept()).revision == 3
    assert not any(line.startswith("warmpath_rollout_phase{") for line in keepers[0].page())
    await rounds(shelf, keepers, 1.0)
    assert (await shelf.documents(GROUP)).found == {}
    assert [event.what for event in await shelf.log()] == ["forgotten"]
    shelf.flush()
    await rounds(shelf, keepers, 10.0)
    assert (await shelf.documents(GROUP)).found == {}


async def test_who_remembers_what_was_before_is_told(shelf: Shelf) -> None:
    """Who was cut off all the while puts the old document back: the others put the last revision over it."""
    old = await forgotten(shelf)
    keepers = [Keeper(shelf, name) for name in ("k1", "k2")]
    await rounds(shelf, keepers, FORGET_S + 1.0)
    assert await shelf.put_document(GROUP, "m", Document(2, encode(old)))
    late = Keeper(shelf, "k3")
    await late.controller.round()
    assert late.controller.known()["m"].rollout.phase == "aborted"
    await rounds(shelf, keepers[:1], 0.5)
    await rounds(shelf, [late], 0.5)
    assert late.controller.known()["m"].rollout.phase == "forgotten"
    await rounds(shelf, [*keepers, late], 2.0)
    assert (await shelf.documents(GROUP)).found == {}


async def test_a_rollout_that_begins_meanwhile_stays(shelf: Shelf) -> None:
    """Over the last revision, or where it was dropped; also when it comes between a keeper's look and its drop."""
    await forgotten(shelf)
    keeper = Keeper(shelf)
    await rounds(shelf, [keeper], FORGET_S)
    seen = await shelf.documents(GROUP)
    shelf.clock.advance(1.0)
    await shelf.put(started(shelf.clock.now, "r2"))
    await keeper.controller._forget(seen)
    assert (await shelf.rollout()).id == "r2"
    await rounds(shelf, [keeper], 2.0)
    assert (await shelf.rollout()).id == "r2"
    assert keeper.controller.known()["m"].rollout.id == "r2"


async def test_one_of_a_model_that_the_file_has_not_is_dropped_too(shelf: Shelf) -> None:
    """Nobody looks after it otherwise."""
    await forgotten(shelf)
    versions = {"one": {"pool": "p1", "weight": 1}, "two": {"pool": "p2"}}
    keeper = Keeper(shelf, config=configured(models={"n": {"versions": versions}}))
    await rounds(shelf, [keeper], FORGET_S + 1.0)
    assert (await shelf.documents(GROUP)).found == {}


async def test_nothing_is_dropped_without_its_line(shelf: Shelf) -> None:
    """The audit log has it first, however long that takes."""
    await forgotten(shelf)
    keeper, shelf.record_down = Keeper(shelf), True
    await rounds(shelf, [keeper], FORGET_S + 2.0)
    assert (await shelf.kept()).revision == 3
    shelf.record_down = False
    await rounds(shelf, [keeper], 1.0)
    assert (await shelf.documents(GROUP)).found == {}
    assert [event.what for event in await shelf.log()] == ["forgotten"]

"""Keepers move rollouts on: once each step, whoever does it, whatever dies or is lost in between."""

import itertools
import logging
from collections.abc import Mapping

import msgspec
import pytest

from extproc.fleet.rollouts import JUDGEMENTS, SHARD, statuses
from extproc.rollout import advance
from extproc.rollout.state import GROUP, encode, evidence_name
from extproc.state.document_store import Document
from tests.unit.fleet.parts import SkewedClock
from tests.unit.fleet.rollout_parts import LEASE_S, Keeper, Shelf, configured, rounds, started

WHOLE = ["started", "step", "step", "promoted", "retired"]
"""What happens in a rollout of three steps."""


@pytest.fixture
def shelf() -> Shelf:
    """The store of all."""
    return Shelf(SkewedClock())


async def test_a_rollout_goes_through_its_steps_by_itself(shelf: Shelf) -> None:
    """Each after its time, each once, each with its line in the audit log; and nothing comes after the end."""
    await shelf.put(started(shelf.clock.now))
    keeper, begun = Keeper(shelf), shelf.clock.now
    shares = []
    for _ in range(60):
        await keeper.rounds(1.0)
        shares.append((await shelf.rollout()).share)
    assert sorted(set(shares)) == [0.05, 0.25, 1.0]
    assert shares == sorted(shares)
    log = await shelf.log()
    assert [event.what for event in log] == WHOLE
    assert [event.share for event in log] == [0.05, 0.25, 1.0, 1.0, 1.0]
    assert [event.by for event in log] == ["ann", *["controller"] * 4]
    times = [event.at - begun for event in log]
    assert all(later - earlier >= 10.0 for earlier, later in itertools.pairwise(times))
    assert (await shelf.rollout()).phase == "retired"
    assert (await shelf.kept()).revision == len(log)


async def test_a_failure_takes_everything_from_the_canary(shelf: Shelf) -> None:
    """By a verdict here: share 0, no conversation stays, a line that says why."""
    await shelf.put(started(shelf.clock.now))
    keeper = Keeper(shelf)
    await keeper.rounds(11.0)
    judged, event = advance.verdict(await shelf.rollout(), shelf.clock.now, "eve", "worse", passed=False)
    await shelf.put(msgspec.structs.replace(judged, event=event))
    await keeper.rounds(3.0)
    after = await shelf.rollout()
    assert (after.phase, after.share, after.earlier, after.gate) == ("rolled_back", 0.0, (), "verdict")
    assert [event.what for event in await shelf.log()] == ["started", "step", "verdict", "rolled_back"]


async def test_of_two_keepers_one_acts(shelf: Shelf) -> None:
    """Both look, one holds the model; steps and lines are as with one."""
    await shelf.put(started(shelf.clock.now))
    keepers = [Keeper(shelf, name) for name in ("k1", "k2")]
    judges = set()
    for _ in range(120):
        await rounds(shelf, keepers, 0.5)
        judges |= {each.keeper for each in (await statuses(shelf)).values()}
    assert [event.what for event in await shelf.log()] == WHOLE
    assert {keeper.holding.holder for keeper in keepers if keeper.holding.held(SHARD)} == judges
    held = [sum('rollout_controlled{model="m"} 1.0' in line for line in keeper.page()) for keeper in keepers]
    assert sorted(held) == [0, 1]
    assert all('warmpath_rollout_phase{model="m",phase="retired"} 1.0' in keeper.page() for keeper in keepers)


@pytest.mark.parametrize("dies_after_s", [0.5, 9.5, 10.0, 10.5, 21.0, 35.0])
async def test_when_a_keeper_dies_another_goes_on_within_a_lease(shelf: Shelf, dies_after_s: float) -> None:
    """No step is left out, none is taken twice, and no line is missing."""
    await shelf.put(started(shelf.clock.now))
    first, second = Keeper(shelf, "k1"), Keeper(shelf, "k2")
    await rounds(shelf, [first, second], dies_after_s)
    await rounds(shelf, [second], LEASE_S + 0.5)
    assert 'warmpath_rollout_controlled{model="m"} 1.0' in second.page()
    await rounds(shelf, [second], 60.0)
    log = await shelf.log()
    assert [event.what for event in log] == WHOLE
    assert (await shelf.kept()).revision == len(log)


async def test_a_keeper_that_was_frozen_changes_nothing_when_it_wakes(shelf: Shelf) -> None:
    """Its lease is over by its own clock, and its document is an old one."""
    await shelf.put(started(shelf.clock.now))
    first, second = Keeper(shelf, "k1"), Keeper(shelf, "k2")
    await rounds(shelf, [first, second], 5.0)
    await rounds(shelf, [second], 25.0)
    before = await shelf.kept()
    assert any("warmpath_rollout_samples{" in line for line in first.page())
    await first.controller.round()
    assert await shelf.kept() == before
    assert not any("warmpath_rollout_samples{" in line for line in first.page())
    await rounds(shelf, [first, second], 40.0)
    assert [event.what for event in await shelf.log()] == WHOLE


async def test_a_lease_that_ends_while_it_judges_is_not_acted_on(shelf: Shelf) -> None:
    """Evidence that took so long to come is another keeper's to judge."""
    await shelf.put(started(shelf.clock.now))
    keeper = Keeper(shelf)
    await keeper.rounds(10.0)
    before, parts = await shelf.kept(), shelf.parts

    async def late(group: str, name: str) -> Mapping[str, bytes]:
        shelf.clock.advance(LEASE_S)
        return await parts(group, name)

    shelf.parts = late  # type: ignore[method-assign]
    await keeper.controller.round()
    assert await shelf.kept() == before
    shelf.parts = parts  # type: ignore[method-assign]
    await keeper.rounds(1.0)
    assert (await shelf.rollout()).step == 1


async def test_the_audit_log_is_not_searched_for_a_line_that_was_written(shelf: Shelf) -> None:
    """Twice a second, for as long as a step lasts."""
    await shelf.put(started(shelf.clock.now))
    keeper = Keeper(shelf)
    await keeper.rounds(9.0)
    assert shelf.searched == 1


async def test_a_line_that_its_author_could_not_write_is_written_by_the_next(shelf: Shelf) -> None:
    """A keeper that dies between the step and its line: the document brings the line with it."""
    await shelf.put(started(shelf.clock.now))
    first, second = Keeper(shelf, "k1"), Keeper(shelf, "k2")
    await rounds(shelf, [first], 9.5)
    shelf.record_down = True
    await rounds(shelf, [first], 1.0)
    assert ((await shelf.rollout()).step, [event.what for event in await shelf.log()]) == (1, ["started"])
    shelf.record_down = False
    await rounds(shelf, [second], LEASE_S + 1.0)
    assert [event.what for event in await shelf.log()] == ["started", "step"]


async def test_nothing_goes_on_before_its_last_line_is_written(shelf: Shelf) -> None:
    """Or a document would be written over with the only copy of what happened."""
    await shelf.put(started(shelf.clock.now))
    keeper = Keeper(shelf)
    shelf.record_down = True
    await keeper.rounds(15.0)
    assert (await shelf.rollout()).step == 0
    shelf.record_down = False
    await keeper.rounds(60.0)
    assert [event.what for event in await shelf.log()] == WHOLE


async def test_an_operator_who_was_first_wins(shelf: Shelf) -> None:
    """The keeper had read an older document: its step is not taken."""
    await shelf.put(started(shelf.clock.now))
    keeper = Keeper(shelf)
    await keeper.rounds(10.0)
    parts = shelf.parts

    async def paused_meanwhile(group: str, name: str) -> dict[str, bytes]:
        paused, event = advance.pause(await shelf.rollout(), shelf.clock.now, "eve")
        shelf.parts = parts  # type: ignore[method-assign]
        await shelf.put(msgspec.structs.replace(paused, event=event))
        return dict(await parts(group, name))

    shelf.parts = paused_meanwhile  # type: ignore[method-assign]
    await keeper.rounds(20.0)
    after = await shelf.rollout()
    assert (after.phase, after.step) == ("paused", 0)
    assert [event.what for event in await shelf.log()] == ["started", "paused"]


@pytest.mark.parametrize("first", ["k1", "k2"])
async def test_a_flush_in_the_middle_changes_nothing(shelf: Shelf, first: str) -> None:
    """The document is put back with its line, by whoever knows it, and the rollout goes on from there."""
    await shelf.put(started(shelf.clock.now))
    keepers = [Keeper(shelf, name) for name in ("k1", "k2")]
    await rounds(shelf, keepers, 12.0)
    before = await shelf.kept()
    shelf.flush()
    await rounds(shelf, keepers if first == "k1" else keepers[::-1], 0.5)
    assert await shelf.kept() == before
    await rounds(shelf, keepers, 60.0)
    assert (await shelf.rollout()).phase == "retired"
    assert [event.what for event in await shelf.log()] == ["step", "step", "promoted", "retired"]


async def test_the_newest_that_any_keeper_knows_is_put_back(shelf: Shelf) -> None:
    """One that looked last before a step puts an older one back, and the other brings the newer one on top."""
    await shelf.put(started(shelf.clock.now))
    late, early = Keeper(shelf, "k1"), Keeper(shelf, "k2")
    await rounds(shelf, [early, late], 9.5)
    await rounds(shelf, [early], 2.0)
    newest = await shelf.kept()
    shelf.flush()
    await late.controller.round()
    assert (await shelf.kept()).revision == newest.revision - 1
    await early.controller.round()
    assert await shelf.kept() == newest


async def test_who_knows_an_older_document_decides_nothing_before_the_others_were_heard(shelf: Shelf) -> None:
    """A rollback that only one keeper knows of after a flush: the other one, whose step is due, does not take it."""
    await shelf.put(started(shelf.clock.now))
    late, early = Keeper(shelf, "k1"), Keeper(shelf, "k2")
    await rounds(shelf, [early, late], 11.5)
    aborted, event = advance.abort(await shelf.rollout(), shelf.clock.now, "eve")
    await shelf.put(msgspec.structs.replace(aborted, event=event))
    await early.controller.round()
    shelf.flush()
    shelf.clock.advance(9.0)
    await rounds(shelf, [late, early], 30.0)
    assert (await shelf.rollout()).phase == "aborted"
    assert [event.what for event in await shelf.log()] == ["step", "aborted"]  # the last line of either document


async def test_a_failover_to_an_older_state_is_mended(shelf: Shelf) -> None:
    """The store tells the document of one step before again."""
    await shelf.put(started(shelf.clock.now))
    keeper = Keeper(shelf)
    await keeper.rounds(9.5)
    older = await shelf.kept()
    await keeper.rounds(2.0)
    newest = await shelf.kept()
    shelf.flush()
    await shelf.put_document(GROUP, "m", older)
    await keeper.controller.round()
    assert (await shelf.kept()) == newest


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff\x00", b"{}", b'{"id":1}'])
async def test_a_damaged_document_is_mended(shelf: Shelf, payload: bytes) -> None:
    """Where its revision is one that is known, so that it cannot be anybody's newer one."""
    await shelf.put(started(shelf.clock.now))
    keeper = Keeper(shelf)
    await keeper.rounds(5.0)
    good = await shelf.kept()
    shelf.flush()
    await shelf.put_document(GROUP, "m", Document(good.revision, payload))
    await keeper.rounds(1.0)
    assert (await shelf.kept()).payload == good.payload
    await keeper.rounds(60.0)
    assert (await shelf.rollout()).phase == "retired"


async def test_a_document_of_a_newer_release_is_not_written_over(
    shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot be read here, and is newer than what is known: said once, left alone."""
    await shelf.put(started(shelf.clock.now))
    keeper = Keeper(shelf)
    await keeper.rounds(5.0)
    newer = Document((await shelf.kept()).revision + 1, b'{"phase":"of tomorrow"}')
    await shelf.put_document(GROUP, "m", newer)
    with caplog.at_level(logging.ERROR):
        await keeper.rounds(20.0)
    assert await shelf.kept() == newer
    assert len([line for line in caplog.records if line.message == "a rollout is left as it was"]) == 1


async def test_a_document_that_an_older_keeper_cannot_read_is_left_to_the_others(
    shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a keeper gives its lease up, so that one which can read the document looks after the rollout."""
    await shelf.put(started(shelf.clock.now))
    older = Keeper(shelf)
    await older.rounds(5.0)
    assert older.holding.held(SHARD) == {"m"}
    await shelf.put_document(GROUP, "m", Document((await shelf.kept()).revision + 1, b'{"phase":"of tomorrow"}'))
    with caplog.at_level(logging.INFO):
        await older.rounds(20.0)
    assert not older.holding.held(SHARD)
    assert "somebody else changed a rollout first" not in caplog.messages


@pytest.mark.parametrize("chance", [0.0, -1.0, 1.0])
async def test_a_document_that_nobody_could_judge_by_ends_no_keeper(shelf: Shelf, chance: float) -> None:
    """What stands there by somebody's hand counts as one that cannot be read."""
    rollout = started(shelf.clock.now)
    rollout = msgspec.structs.replace(rollout, plan=msgspec.structs.replace(rollout.plan, false_alarms=chance))
    await shelf.put_document(GROUP, "m", Document(1, encode(rollout)))
    keeper = Keeper(shelf)
    await keeper.rounds(2.0)
    assert keeper.controller.known() == {}


async def test_evidence_that_cannot_be_read_is_left_out(shelf: Shelf) -> None:
    """The rest of it decides."""
    rollout = started(shelf.clock.now)
    await shelf.put(rollout)
    for step in range(3):
        name = evidence_name(msgspec.structs.replace(rollout, step=step))
        await shelf.put_part(GROUP, name, "w1", b"\xff garbage", 600_000)
    await Keeper(shelf).rounds(60.0)
    assert (await shelf.rollout()).phase == "retired"


async def test_times_are_the_stores(shelf: Shelf) -> None:
    """A host whose wall clock jumps by days takes no step early, or late."""
    await shelf.put(started(shelf.clock.now))
    keeper = Keeper(shelf)
    for skew_s in (0.0, 1e6, -1e6):
        keeper.clock.skew_s = skew_s
        await keeper.rounds(3.0)
    assert (await shelf.rollout()).step == 0
    await keeper.rounds(2.0)
    assert (await shelf.rollout()).step == 1


async def test_what_the_configuration_does_not_have_is_left_alone(
    shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    """A rollout to a version that is gone, and one of a model that is; each is said once."""
    await shelf.put(started(shelf.clock.now))
    lone = msgspec.structs.replace(started(shelf.clock.now, "r2"), model="other", event=None)
    await shelf.put(lone)
    versions = {"one": {"pool": "p1", "weight": 1}, "three": {"pool": "p2"}}
    keeper = Keeper(shelf, config=configured(models={"m": {"versions": versions}}))
    with caplog.at_level(logging.WARNING):
        await keeper.rounds(30.0)
    assert (await shelf.rollout(), await shelf.rollout("other")) == (await shelf.rollout(), lone)
    assert (await shelf.rollout()).step == 0
    assert len([line for line in caplog.records if line.message == "a rollout cannot be looked after"]) == 2
    assert not any('model="other"' in line for line in keeper.page())


async def test_a_store_that_is_gone_is_waited_for(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is raised, it is said once, and the rollout goes on afterwards."""
    await shelf.put(started(shelf.clock.now))
    keeper = Keeper(shelf)
    await keeper.rounds(5.0)
    shelf.down = True
    with caplog.at_level(logging.WARNING):
        await keeper.rounds(30.0)
    assert len([line for line in caplog.records if line.message == "a rollout cannot be looked after"]) == 1
    shelf.down = False
    await keeper.rounds(60.0)
    assert [event.what for event in await shelf.log()] == WHOLE


async def test_how_a_canary_is_judged_can_be_read_anywhere(shelf: Shelf) -> None:
    """The acting keeper publishes it; what cannot be read is absent."""
    await shelf.put(started(shelf.clock.now))
    await Keeper(shelf).rounds(1.0)
    await shelf.put_part(GROUP, JUDGEMENTS, "broken", b"?", 60_000)
    found = await statuses(shelf)
    assert set(found) == {"m"}
    assert (found["m"].keeper, found["m"].judgement.epoch) == ("k1", "r1-0")


async def test_its_page_shows_where_a_rollout_is(shelf: Shelf) -> None:
    """Phase, step, share, who acts, events and answers; gone once the keeper does not judge it any more."""
    await shelf.put(started(shelf.clock.now, min_samples=10))
    keeper, other = Keeper(shelf), Keeper(shelf, "k2")
    await keeper.rounds(25.0)
    await other.controller.round()
    for line in (
        'warmpath_rollout_phase{model="m",phase="running"} 1.0',
        'warmpath_rollout_phase{model="m",phase="paused"} 0.0',
        'warmpath_rollout_step{model="m"} 0.0',
        'warmpath_rollout_share{model="m"} 0.05',
        'warmpath_rollout_controlled{model="m"} 1.0',
        'warmpath_rollout_overdue_seconds{model="m"} 14.5',
        'warmpath_rollout_samples{model="m",side="canary"} 0.0',
        'warmpath_rollout_events_total{model="m",what="rolled_back"} 0.0',
    ):
        assert line in keeper.page()
    assert 'warmpath_rollout_controlled{model="m"} 0.0' in other.page()
    assert not any("warmpath_rollout_samples{" in line for line in other.page())
    rolled, event = advance.abort(await shelf.rollout(), shelf.clock.now, "eve")
    await shelf.put(msgspec.structs.replace(rolled, event=event))
    await keeper.rounds(1.0)
    assert 'warmpath_rollout_events_total{model="m",what="aborted"} 1.0' in keeper.page()
    assert not any("warmpath_rollout_samples{" in line for line in keeper.page())


async def test_without_versions_nothing_is_asked(shelf: Shelf) -> None:
    """A fleet of models with one version pays nothing."""
    keeper = Keeper(shelf, config=configured(models={"m": {"pool": "p1"}}))
    await keeper.rounds(5.0)
    assert shelf.asked == 0


async def test_a_rollout_that_begins_anew_after_a_flush_is_taken(shelf: Shelf) -> None:
    """Its first revision is less than that of the one before, which is not put back over it."""
    await shelf.put(started(shelf.clock.now))
    keeper = Keeper(shelf)
    await keeper.rounds(22.0)
    shelf.flush()
    await shelf.put(started(shelf.clock.now, "r2"))
    await keeper.rounds(60.0)
    after = await shelf.rollout()
    assert (after.id, after.phase) == ("r2", "retired")


def test_documents_are_as_large_as_the_store_takes() -> None:
    """With many steps and a long reason."""
    rollout = msgspec.structs.replace(started(0.0, steps=tuple(n / 32 for n in range(1, 33))), reason="x" * 500)
    assert len(encode(rollout)) < 65_536

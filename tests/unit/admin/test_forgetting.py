"""Rollouts that are forgotten: only what is over, or cannot be read, and no traffic moves unless that is asked for."""

import asyncio

import pytest

from extproc.admin.values import Change, Forget, Promote, Start
from extproc.errors import RolloutError, StoreError, UnknownModelError, UnknownRolloutError
from extproc.fleet.rollout_documents import read
from extproc.rollout.state import decode
from extproc.state.document_store import Document
from tests.unit.admin.stage import Stage, config, stage

BAD = b'{"phase": "new"}'


async def aborted(at: Stage) -> None:
    """A rollout of `chat` to v2 that was given up at once."""
    await at.calls.start("chat", Start(to="v2"), "ann")
    await at.calls.abort("chat", Change(), "ann")


async def test_a_rollout_that_is_over_is_forgotten() -> None:
    """A last revision says so, to all who remember what was before; the audit log keeps its lines, and has one more."""
    at = await stage()
    await aborted(at)
    told = await at.calls.forget("gpt", Forget(text="tidy"), "bob")
    kept = (await at.kept()).found["chat"]
    assert (kept.revision, decode(kept.payload).phase, told.rollout.id) == (3, "forgotten", "r1")
    assert (told.event.what, told.event.by, told.event.text) == ("forgotten", "bob", "tidy")
    lines = [line.event.what for line in (await at.calls.history("chat")).events]
    assert lines == ["forgotten", "aborted", "started"]
    [status] = (await at.calls.status("chat")).statuses
    assert (status.rollout, status.governs) == (None, False)


async def test_what_is_forgotten_is_as_if_there_were_none() -> None:
    """Nothing more can be asked of it, and the next rollout begins over it, at a revision that all take for newer."""
    at = await stage()
    await aborted(at)
    await at.calls.forget("chat", Forget(), "bob")
    for again in (at.calls.forget("chat", Forget(force=True), "bob"), at.calls.abort("chat", Change(), "bob")):
        with pytest.raises(UnknownRolloutError, match="has no rollout"):
            await again
    kept = (await at.kept()).found["chat"]
    at.remembered = {"chat": read("chat", kept.revision, kept.payload)}
    await at.store.drop_document("rollouts", "chat")
    assert (await at.calls.status("chat")).statuses[0].rollout is None
    assert (await at.calls.start("chat", Start(to="v2"), "ann")).rollout.phase == "running"
    assert (await at.kept()).found["chat"].revision == kept.revision + 1


@pytest.mark.parametrize("phase", ["running", "paused", "promoted"])
@pytest.mark.parametrize("force", [True, False])
async def test_what_goes_on_is_not_forgotten(phase: str, *, force: bool) -> None:
    """Nor by force: it is aborted first."""
    at = await stage()
    await at.calls.start("chat", Start(to="v2", overrides={"steps": [100]}), "ann")
    if phase == "paused":
        await at.calls.pause("chat", Change(), "ann")
    if phase == "promoted":
        await at.calls.promote("chat", Promote(), "ann")
    with pytest.raises(RolloutError, match=f"is {phase}: abort it first"):
        await at.calls.forget("chat", Forget(force=force), "bob")
    assert decode((await at.kept()).found["chat"].payload).phase == phase


async def test_another_rollout_than_was_meant_stays() -> None:
    """As of every change."""
    at = await stage()
    await aborted(at)
    with pytest.raises(RolloutError, match="`r0` was meant, but `r1` is the last"):
        await at.calls.forget("chat", Forget(rollout="r0"), "bob")


async def test_a_promoted_version_keeps_its_traffic_until_the_file_says_so() -> None:
    """The document alone says that it has everything; by force everything goes back."""
    at = await stage()
    await at.calls.start("chat", Start(to="v2", overrides={"steps": [100]}), "ann")
    for _ in range(2):
        await at.calls.promote("chat", Promote(), "ann")
    with pytest.raises(
        RolloutError, match=r"warmpath\.yaml says otherwise: write what `warmpath rollout status` shows"
    ):
        await at.calls.forget("chat", Forget(), "bob")
    before = at.config
    at.config = config({"versions": {"v1": {"pool": "old"}, "v2": {"pool": "new", "weight": 1}}})
    assert (await at.calls.forget("chat", Forget(), "bob")).rollout.phase == "forgotten"
    at.config = before
    assert [each.share for each in (await at.calls.status("chat")).statuses[0].versions] == [1.0, 0.0]


async def test_a_canary_that_was_given_up_gets_nothing_back() -> None:
    """Where the file gives it a weight, the rollback alone keeps it at nothing."""
    at = await stage(config({"versions": {"v1": {"pool": "old", "weight": 9}, "v2": {"pool": "new", "weight": 1}}}))
    await at.calls.start("chat", Start(to="v2", overrides={"steps": [50, 100]}), "ann")
    await at.calls.abort("chat", Change(), "ann")
    with pytest.raises(RolloutError, match="says otherwise"):
        await at.calls.forget("chat", Forget(), "bob")
    await at.calls.forget("chat", Forget(force=True), "bob")
    assert [each.share for each in (await at.calls.status("chat")).statuses[0].versions] == [0.9, 0.1]


async def test_what_cannot_be_read_is_forgotten_by_force_alone() -> None:
    """It may be a newer release's. What was readable before is remembered, and is what is forgotten."""
    at = await stage()
    await at.put(BAD, 1)
    for call in (at.calls.start("chat", Start(to="v2"), "ann"), at.calls.forget("chat", Forget(), "bob")):
        with pytest.raises(StoreError, match=r"cannot be read.*`warmpath rollout forget chat --force`"):
            await call
    assert (await at.kept()).found["chat"] == Document(1, BAD)
    told = await at.calls.forget("chat", Forget(force=True), "bob")
    kept = (await at.kept()).found["chat"]
    assert (kept.revision, read("chat", 2, kept.payload).rollout) == (2, told.rollout)
    assert (await at.calls.start("chat", Start(to="v2"), "ann")).rollout.phase == "running"


@pytest.mark.parametrize("damaged", [2, 3])
async def test_what_was_known_before_it_was_damaged_is_what_is_forgotten(damaged: int) -> None:
    """A keeper remembers its second revision; the store has garbage as the same, or as a later one."""
    at = await stage()
    await aborted(at)
    good = (await at.kept()).found["chat"]
    at.remembered = {"chat": read("chat", good.revision, good.payload)}
    await at.store.drop_document("rollouts", "chat")
    await at.put(BAD, damaged)
    told = await at.calls.forget("chat", Forget(force=True), "bob")
    assert (told.rollout.id, told.rollout.canary, told.rollout.phase) == ("r1", "v2", "forgotten")
    assert (await at.kept()).found["chat"].revision == damaged + 1


async def test_what_fell_back_and_was_damaged_waits_for_a_keeper() -> None:
    """A last revision that is older than what keepers remember would be written over by them."""
    at = await stage()
    await aborted(at)
    good = (await at.kept()).found["chat"]
    at.remembered = {"chat": read("chat", good.revision, good.payload)}
    await at.store.drop_document("rollouts", "chat")
    await at.put(BAD, good.revision - 1)
    forgetting = asyncio.create_task(at.calls.forget("chat", Forget(force=True), "bob"))
    await asyncio.sleep(0.05)
    await at.put(good.payload, good.revision)
    assert (await forgetting).rollout.phase == "forgotten"
    assert (await at.kept()).found["chat"].revision == good.revision + 1


async def test_a_model_that_is_gone_from_the_file_can_be_forgotten() -> None:
    """By its own name: nobody could abort it; a wrong name is told those that are left."""
    at = await stage()
    await aborted(at)
    before = at.config
    at.config = config()
    at.config.models["talk"] = at.config.models.pop("chat")
    with pytest.raises(
        UnknownModelError, match=r"no rollout of one; the store has rollouts of models .* has not: `chat`"
    ):
        await at.calls.forget("chta", Forget(), "bob")
    assert (await at.calls.forget("chat", Forget(), "bob")).rollout.model == "chat"
    at.config = before
    await at.calls.start("chat", Start(to="v2"), "ann")
    at.config.models["talk"] = at.config.models.pop("chat")
    with pytest.raises(RolloutError, match=r"is running, and warmpath\.yaml has no such model here"):
        await at.calls.forget("chat", Forget(), "bob")
    assert (await at.calls.forget("chat", Forget(force=True), "bob")).rollout.phase == "forgotten"

"""The calls of operators, on a store in memory."""

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from extproc.admin.rollouts import RolloutCalls
from extproc.admin.values import Change, Promote, Start, Verdict
from extproc.errors import (
    BadQuestionError,
    RolloutError,
    StoreError,
    UnknownCanaryError,
    UnknownModelError,
    UnknownRolloutError,
)
from extproc.fleet.rollout_documents import read
from extproc.fleet.rollouts import JUDGEMENTS
from extproc.fleet.rollouts import Status as Judged
from extproc.rollout.gates import Judgement
from extproc.rollout.state import decode, encode
from extproc.state.document_store import Document
from tests.unit.admin.stage import POOLS, Stage, config, healthy, stage


async def started(at: Stage, **more: Any) -> Any:
    """A rollout of `chat` to v2."""
    return await at.calls.start("chat", Start(to="v2", **more), "ann")


async def test_a_start_is_kept_with_who_did_it() -> None:
    """The first revision, at the first step; the audit log has its line, and so has the answer."""
    at = await stage()
    told = await started(at, overrides={"steps": [10, 100], "hold_s": 5})
    kept = (await at.kept()).found["chat"]
    rollout = decode(kept.payload)
    assert (kept.revision, rollout) == (1, told.rollout)
    assert (rollout.id, rollout.canary, rollout.share, rollout.phase) == ("r1", "v2", 0.1, "running")
    assert (rollout.started, dict(rollout.base)) == (1_800_000_000.0, {"v1": 1.0, "v2": 0.0})
    assert told.preview[0].startswith(
        "version `v2` of model `chat` gets 10 % of new conversations now, for 5 s and some 1,000 "
    )
    [line] = (await at.calls.history("chat")).events
    assert (line.event.what, line.event.by, line.event.share) == ("started", "ann", 0.1)


async def test_a_dry_run_says_the_same_and_changes_nothing() -> None:
    """Neither a document nor a line is written."""
    at = await stage()
    told = await started(at, dry_run=True)
    assert told.dry_run
    assert told.rollout.share == 0.01
    assert (await at.kept()).found == {}
    assert (await at.calls.history("chat")).events == []


async def test_a_rollout_that_begins_at_the_end_is_judged_by_nothing_and_says_so() -> None:
    """Without a step that had a baseline rates have nothing to be compared with either."""
    at = await stage()
    [told] = [line for line in (await started(at, dry_run=True)).preview if "which rest" in line]
    assert "ttft_p50" in told
    assert "errors" not in told
    whole = await started(at, dry_run=True, overrides={"steps": [100]})
    [told] = [line for line in whole.preview if "which rest" in line]
    assert "errors, abandons, broken" in told


async def test_an_alias_names_its_model() -> None:
    """Whatever name an operator uses, the document is the model's."""
    at = await stage()
    assert (await at.calls.start("gpt", Start(to="v2"), "ann")).rollout.model == "chat"
    assert [each.model for each in (await at.calls.status("gpt")).statuses] == ["chat"]


async def test_what_is_not_there_is_named_with_what_is_near() -> None:
    """Model, version, and versions at all."""
    at = await stage()
    with pytest.raises(UnknownModelError, match="no model `chta`: did you mean `chat`"):
        await at.calls.start("chta", Start(to="v2"), "ann")
    with pytest.raises(UnknownCanaryError, match="model `chat` has no version `v3`: did you mean `v2`"):
        await at.calls.start("chat", Start(to="v3"), "ann")
    with pytest.raises(RolloutError, match="model `small` has one version alone: give it `versions`"):
        await at.calls.start("small", Start(to="v2"), "ann")
    with pytest.raises(UnknownRolloutError, match="model `chat` has no rollout: begin one"):
        await at.calls.pause("chat", Change(), "ann")


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_version_that_cannot_serve_gets_nothing(*, dry_run: bool) -> None:
    """A dry run finds out as well."""
    at = await stage()
    await at.publish(new=healthy(reachable=False))
    with pytest.raises(RolloutError, match="no endpoint of pool `new` can serve"):
        await started(at, dry_run=dry_run)
    await at.publish(new=healthy(models=("other",)))
    with pytest.raises(RolloutError, match="model `chat` is not listed"):
        await started(at, dry_run=dry_run)
    assert (await at.kept()).found == {}


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_version_that_has_everything_gets_no_more(*, dry_run: bool) -> None:
    """There is no traffic to move."""
    at = await stage(config({"versions": {"v1": {"pool": "old"}, "v2": {"pool": "new", "weight": 2}}}))
    with pytest.raises(RolloutError, match="no traffic to move"):
        await started(at, dry_run=dry_run)


@pytest.mark.parametrize("phase", ["running", "paused", "promoted"])
async def test_one_rollout_of_a_model_at_a_time(phase: str) -> None:
    """Another one waits for its end, whatever version it is to."""
    at = await stage()
    await started(at)
    if phase == "paused":
        await at.calls.pause("chat", Change(), "ann")
    if phase == "promoted":
        await at.calls.promote("chat", Promote(full=True), "ann")
        await at.calls.promote("chat", Promote(), "ann")
    assert decode((await at.kept()).found["chat"].payload).phase == phase
    for dry_run in (True, False):
        with pytest.raises(RolloutError, match=f"a rollout of model `chat` to version `v2` is {phase}"):
            await started(at, dry_run=dry_run)


async def test_after_an_abort_another_one_may_begin() -> None:
    """With an id and evidence of its own, over the document of the last."""
    at = await stage()
    await started(at)
    await at.calls.abort("chat", Change(text="not today"), "ann")
    told = await started(at)
    kept = (await at.kept()).found["chat"]
    assert (told.rollout.id, kept.revision) == ("r2", 3)
    assert [line.event.what for line in (await at.calls.history("chat")).events] == ["started", "aborted", "started"]


async def test_a_promoted_version_must_be_written_into_the_file_first() -> None:
    """Until then the document alone says that it has everything: the next one's end would give it back."""
    at = await stage()
    await started(at, overrides={"steps": [100]})
    for _ in range(2):
        await at.calls.promote("chat", Promote(), "ann")
    assert (await at.calls.status("chat")).statuses[0].governs
    with pytest.raises(RolloutError, match=r"promoted to version `v2`, and warmpath\.yaml does not say so yet"):
        await at.calls.start("chat", Start(to="v1"), "ann")
    at.config = config({"versions": {"v1": {"pool": "old"}, "v2": {"pool": "new", "weight": 1}}})
    assert (await at.calls.start("chat", Start(to="v1"), "ann")).rollout.canary == "v1"


async def test_every_change_is_made_and_written_down() -> None:
    """In the order in which it was asked for, each with its author and text."""
    at = await stage()
    await started(at)
    await at.calls.pause("chat", Change(text="look"), "bob")
    await at.calls.resume("chat", Change(), "bob")
    await at.calls.verdict("chat", Verdict(verdict="pass", text="eval 7"), "ci")
    told = await at.calls.promote("chat", Promote(), "ann")
    assert (told.rollout.step, told.rollout.share, told.event.what) == (1, 0.05, "step")
    told = await at.calls.abort("chat", Change(), "ann")
    assert (told.rollout.phase, told.rollout.share, told.rollout.earlier) == ("aborted", 0.0, ())
    lines = [(line.event.what, line.event.by, line.event.text) for line in (await at.calls.history("chat")).events]
    assert lines == [
        ("aborted", "ann", ""),
        ("step", "ann", ""),
        ("verdict", "ci", "pass: eval 7"),
        ("resumed", "bob", ""),
        ("paused", "bob", "look"),
        ("started", "ann", ""),
    ]


async def test_what_does_not_fit_is_a_conflict() -> None:
    """Another rollout, or another step, than was meant; and what the phase does not allow."""
    at = await stage()
    await started(at)
    with pytest.raises(RolloutError, match="`r0` was meant, but `r1` is the last"):
        await at.calls.abort("chat", Change(rollout="r0"), "ann")
    with pytest.raises(RolloutError, match="step 4 was judged, but the rollout is at step 1"):
        await at.calls.verdict("chat", Verdict(verdict="fail", step=3), "ci")
    with pytest.raises(RolloutError, match="is running and cannot be resumed"):
        await at.calls.resume("chat", Change(), "ann")
    for seen in (Promote(step=1), Promote(step=0, phase="paused"), Promote(phase="promoted")):
        with pytest.raises(RolloutError, match="is at step 1 and running by now: look at its status"):
            await at.calls.promote("chat", seen, "ann")
    assert (await at.calls.promote("chat", Promote(step=0, phase="running"), "ann")).rollout.step == 1
    await at.calls.abort("chat", Change(rollout="r1"), "ann")
    with pytest.raises(RolloutError, match="is aborted and cannot be promoted"):
        await at.calls.promote("chat", Promote(), "ann")


class Contended:
    """A store of which somebody else changes the rollout, each time before a change is put, `times` times."""

    def __init__(self, at: Stage, times: int) -> None:
        self._at = at
        self.left = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._at.store, name)

    async def put_document(self, group: str, name: str, document: Document) -> bool:
        """Somebody else first, then this."""
        if self.left:
            self.left -= 1
            kept = (await self._at.kept()).found["chat"]
            other = msgspec.structs.replace(decode(kept.payload), reason=f"other {self.left}")
            await self._at.put(encode(other), kept.revision + 1)
        return await self._at.store.put_document(group, name, document)


async def test_a_change_is_made_on_what_stands_when_it_is_made() -> None:
    """The controller may write in between: nothing that it wrote is lost."""
    at = await stage()
    await started(at)
    store = Contended(at, 3)
    calls = RolloutCalls(store, lambda: at.config, lambda: POOLS, dict, lambda: "r9")
    told = await calls.verdict("chat", Verdict(verdict="pass"), "ci")
    assert (told.rollout.verdict, told.rollout.reason, store.left) == ("pass", "other 0", 0)
    assert (await at.kept()).found["chat"].revision == 5


async def test_a_change_that_never_gets_its_turn_is_given_up() -> None:
    """A bounded number of tries, and an answer that says what to do."""
    at = await stage()
    await started(at)
    calls = RolloutCalls(Contended(at, 1000), lambda: at.config, lambda: POOLS, dict, lambda: "r9")
    with pytest.raises(RolloutError, match="look at its status, and try again"):
        await calls.pause("chat", Change(), "ann")


async def test_a_line_that_its_author_did_not_write_is_written_before_it_is_written_over() -> None:
    """A keeper that died between document and log: the document has the event."""
    at = await stage()
    told = await started(at)
    at.store._records.clear()
    await at.calls.pause("chat", Change(), "bob")
    assert [line.event for line in (await at.calls.history("chat")).events][1] == told.rollout.event


class Silent:
    """A store that is away for the verbs that are named."""

    def __init__(self, at: Stage, *verbs: str) -> None:
        self._at = at
        self._verbs = verbs

    def __getattr__(self, name: str) -> Any:
        async def away(*_arguments: object) -> None:
            raise StoreError("away")

        return away if name in self._verbs else getattr(self._at.store, name)


async def test_without_the_store_nothing_is_done() -> None:
    """And that is said: no call pretends."""
    at = await stage()
    calls = RolloutCalls(Silent(at, "documents"), lambda: at.config, lambda: POOLS, dict, lambda: "r9")
    for call in (
        calls.start("chat", Start(to="v2"), "ann"),
        calls.start("chat", Start(to="v2", dry_run=True), "ann"),
        calls.abort("chat", Change(), "ann"),
        calls.status(),
    ):
        with pytest.raises(StoreError):
            await call


async def test_a_change_whose_line_cannot_be_written_stands(caplog: pytest.LogCaptureFixture) -> None:
    """It is in the log of the process, and in the document, from which a keeper writes it once it can."""
    at = await stage()
    calls = RolloutCalls(Silent(at, "record"), lambda: at.config, lambda: POOLS, dict, lambda: "r9")
    with caplog.at_level(logging.INFO):
        told = await calls.start("chat", Start(to="v2"), "ann")
    kept = decode((await at.kept()).found["chat"].payload)
    assert kept.event is not None
    assert (kept.event.what, kept.event.by) == ("started", "ann")
    assert told.rollout == kept
    assert "the audit log in the store lacks a line as yet" in caplog.text
    [said] = [record for record in caplog.records if record.message == "an operator changed a rollout"]
    assert (said.__dict__["by"], said.__dict__["what"]) == ("ann", "started")


async def test_a_rollout_that_the_store_lost_can_be_aborted() -> None:
    """The keeper remembers it: a flush takes nobody's brake away."""
    at = await stage()
    await started(at)
    kept = (await at.kept()).found["chat"]
    at.remembered = {"chat": read("chat", kept.revision, kept.payload)}
    await at.store.drop_document("rollouts", "chat")
    assert (await at.calls.status("chat")).statuses[0].rollout is not None
    told = await at.calls.abort("chat", Change(), "ann")
    assert told.rollout.phase == "aborted"
    assert (await at.kept()).found["chat"].revision == kept.revision + 1
    await at.store.drop_document("rollouts", "chat")
    with pytest.raises(RolloutError, match="is running"):
        await started(at)


async def test_a_store_that_fell_back_is_not_believed() -> None:
    """Of a failover that lost the last change: what is asked is done once a keeper has put the newer document back."""
    at = await stage()
    await started(at)
    old = (await at.kept()).found["chat"]
    await at.calls.pause("chat", Change(), "ann")
    new = (await at.kept()).found["chat"]
    at.remembered = {"chat": read("chat", new.revision, new.payload)}
    await at.store.drop_document("rollouts", "chat")
    await at.put(old.payload, old.revision)
    [status] = (await at.calls.status("chat")).statuses
    assert status.rollout is not None
    assert status.rollout.phase == "paused"
    aborting = asyncio.create_task(at.calls.abort("chat", Change(), "ann"))
    await asyncio.sleep(0.05)
    assert decode((await at.kept()).found["chat"].payload).phase == "running"
    await at.put(new.payload, new.revision)
    assert (await aborting).rollout.phase == "aborted"
    assert (await at.kept()).found["chat"].revision == new.revision + 1


async def test_a_document_that_cannot_be_read_is_not_written_over() -> None:
    """It may be a newer release's."""
    at = await stage()
    await at.put(b'{"phase": "new"}', 1)
    with pytest.raises(StoreError, match="cannot be read"):
        await started(at)
    assert (await at.kept()).found["chat"].payload == b'{"phase": "new"}'


async def test_the_status_tells_shares_and_what_was_judged_of_this_step() -> None:
    """Of all models with versions; a judgement of an earlier step says nothing of this one."""
    at = await stage()
    [before] = (await at.calls.status()).statuses
    assert [(each.name, each.pool, each.share) for each in before.versions] == [("v1", "old", 1.0), ("v2", "new", 0.0)]
    assert (before.rollout, before.governs) == (None, False)
    rollout = (await started(at, overrides={"steps": [25, 100], "hold_s": 100})).rollout
    judged = Judged(keeper="k", at=1.0, judgement=Judgement(epoch=rollout.epoch, canary=7))
    await at.store.put_part("rollouts", JUDGEMENTS, "chat", msgspec.json.encode(judged), 60_000)
    at.clock.advance(30.0)
    [status] = (await at.calls.status("chat")).statuses
    assert [each.share for each in status.versions] == [0.75, 0.25]
    assert (status.governs, status.hold_left_s) == (True, 70.0)
    assert status.judgement is not None
    assert status.judgement.canary == 7
    await at.calls.promote("chat", Promote(), "ann")
    assert (await at.calls.status("chat")).statuses[0].judgement is None


async def test_who_promotes_keeps_what_the_baseline_did() -> None:
    """At 100 % there is no baseline: errors of the canary are compared with those of the steps before."""
    at = await stage()
    rollout = (await started(at)).rollout
    judgement = Judgement(epoch=rollout.epoch, before={"errors": (500, 2)})
    judged = Judged(keeper="k", at=1.0, judgement=judgement)
    await at.store.put_part("rollouts", JUDGEMENTS, "chat", msgspec.json.encode(judged), 60_000)
    told = await at.calls.promote("chat", Promote(full=True), "ann")
    assert (told.rollout.share, told.rollout.before) == (1.0, {"errors": (500, 2)})


async def test_an_aborted_rollout_gives_the_weights_back() -> None:
    """The canary has nothing; once the file has other weights, those hold."""
    at = await stage()
    await started(at)
    await at.calls.abort("chat", Change(), "ann")
    [status] = (await at.calls.status()).statuses
    assert [each.share for each in status.versions] == [1.0, 0.0]
    at.config = config({"versions": {"v1": {"pool": "old", "weight": 1}, "v2": {"pool": "new", "weight": 3}}})
    [status] = (await at.calls.status()).statuses
    assert ([each.share for each in status.versions], status.governs) == ([0.25, 0.75], False)


async def test_the_part_of_a_version_that_is_gone_goes_to_the_others() -> None:
    """In the status as in the workers: shares are of all traffic."""
    at = await stage()
    await started(at, overrides={"steps": [25, 100]})
    at.config = config({"versions": {"v1": {"pool": "old", "weight": 1}}})
    [status] = (await at.calls.status()).statuses
    assert ([each.share for each in status.versions], status.governs) == ([1.0], True)
    await at.calls.promote("chat", Promote(), "ann")
    [status] = (await at.calls.status()).statuses
    assert ([each.share for each in status.versions], status.governs) == ([1.0], False)


async def test_a_line_that_several_wrote_down_is_told_once() -> None:
    """Whoever writes over a document sees to its line, at once with others."""
    at = await stage()
    await started(at)
    [line] = await at.store.records("rollouts", "chat", 10)
    for _ in range(3):
        await at.store.record("rollouts", "chat", line.payload, 100, 0)
    await at.calls.pause("chat", Change(), "ann")
    assert [line.event.what for line in (await at.calls.history("chat")).events] == ["paused", "started"]


async def test_history_is_told_in_pages() -> None:
    """Newest first, `limit` lines at most; `before` goes on. Lines that cannot be read are left out."""
    at = await stage()
    for _ in range(3):
        await started(at)
        at.clock.advance(1.0)
        await at.calls.abort("chat", Change(), "ann")
    await at.store.record("rollouts", "chat", b"other", 100, 0)
    first = (await at.calls.history("chat", 3)).events
    assert [line.event.what for line in first] == ["aborted", "started"]
    rest = (await at.calls.history("chat", 100, first[-1].id)).events
    assert [line.event.what for line in rest] == ["aborted", "started", "aborted", "started"]


@pytest.mark.parametrize(
    ("limit", "before"),
    [(0, ""), (1001, ""), (5, "x"), (5, "1"), (5, "-1-0"), (5, "1-0\n"), (5, f"{1 << 64}-0"), (5, f"1-{1 << 64}")],
)
async def test_a_page_that_cannot_be_is_a_bad_question(limit: int, before: str) -> None:
    """Before the store is asked."""
    with pytest.raises(BadQuestionError):
        await (await stage()).calls.history("chat", limit, before)


async def test_texts_are_one_line_without_what_a_terminal_obeys() -> None:
    """They are shown to others."""
    at = await stage()
    await started(at)
    told = await at.calls.pause("chat", Change(text="a\n\x1b[2Jb\x00"), "ann")
    assert told.event.text == "a  [2Jb "


async def test_warnings_name_what_speaks_against_a_start() -> None:
    """An ill engine of either side, a shadow that is the canary, gates that cannot see, failures that stop nothing."""
    at = await stage(config({"shadow": {"version": "v2"}}))
    await at.publish(old=healthy(reachable=False))
    told = (await started(at, overrides={"on_failure": "report"})).warnings
    assert [each.partition(":")[0].partition(" is")[0] for each in told] == [
        "version `v1`",
        "version `v2`",
        "gate `broken`",
        "on_failure",
    ]

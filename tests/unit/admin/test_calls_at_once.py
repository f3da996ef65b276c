"""Calls of operators beside a controller that goes on meanwhile, and a store whose answers are lost."""

from typing import Any

import pytest

from extproc.admin.rollouts import RolloutCalls
from extproc.admin.values import Change, Promote
from extproc.errors import RolloutError, StoreError
from extproc.rollout import advance
from extproc.rollout.state import Rollout, decode, encode
from extproc.state.document_store import Document
from tests.unit.admin.stage import POOLS, Stage, stage
from tests.unit.admin.test_calls import started


class Overtaken:
    """A store in which the controller promotes the rollout before a change is put for the first time."""

    def __init__(self, at: Stage) -> None:
        self._at = at
        self._first = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._at.store, name)

    async def put_document(self, group: str, name: str, document: Document) -> bool:
        """The controller first, then this."""
        if self._first:
            self._first = False
            kept = (await self._at.kept()).found["chat"]
            further, _ = advance.promote(decode(kept.payload), 1_800_000_060.0, advance.CONTROLLER)
            await self._at.put(encode(further), kept.revision + 1)
        return await self._at.store.put_document(group, name, document)


class Mute:
    """A store that keeps what is put, and whose answer to that is lost."""

    def __init__(self, at: Stage) -> None:
        self._at = at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._at.store, name)

    async def put_document(self, group: str, name: str, document: Document) -> bool:
        """Kept, and nobody hears of it."""
        await self._at.store.put_document(group, name, document)
        raise StoreError("no answer within 1 s")


def calls_on(at: Stage, store: Any) -> RolloutCalls:
    """The calls on this store."""
    return RolloutCalls(store, lambda: at.config, lambda: POOLS, dict, lambda: "r9")


async def kept(at: Stage) -> Rollout:
    """The rollout as it stands."""
    return decode((await at.kept()).found["chat"].payload)


@pytest.mark.parametrize("steps", [[1, 5, 100], [100]])
async def test_a_step_is_not_promoted_twice_by_two(steps: list[int]) -> None:
    """Who promotes means the step that stands: not the next one too, nor the end of the old version at once."""
    at = await stage()
    await started(at, overrides={"steps": steps})
    with pytest.raises(RolloutError, match="went on meanwhile: look at its status"):
        await calls_on(at, Overtaken(at)).promote("chat", Promote(), "ann")
    after = await kept(at)
    assert (after.step, after.phase) == ((1, "running") if len(steps) > 1 else (0, "promoted"))


async def test_what_does_not_depend_on_the_step_is_done_all_the_same() -> None:
    """An abort must not be refused because the canary has just got more."""
    at = await stage()
    await started(at)
    await calls_on(at, Overtaken(at)).abort("chat", Change(), "ann")
    assert (await kept(at)).phase == "aborted"


async def test_a_change_whose_answer_is_lost_may_have_been_made() -> None:
    """And the error says so: who promoted again would go on by two steps."""
    at = await stage()
    await started(at)
    with pytest.raises(StoreError, match="it may have been made all the same: look at the status first"):
        await calls_on(at, Mute(at)).promote("chat", Promote(), "ann")
    assert (await kept(at)).step == 1

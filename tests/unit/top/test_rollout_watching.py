"""`warmpath rollout status --watch` lasts as long as the rollout, whatever becomes of a keeper meanwhile."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from extproc import rollout_command
from extproc.admin.rollouts import RolloutCalls
from extproc.errors import StoreError
from tests.unit.admin.served import serving
from tests.unit.admin.stage import POOLS, stage
from tests.unit.top.test_rollout_command import Run, run, url_of
from tests.waiting import until

__all__ = ["run"]


class Fickle:
    """A store that is away now and then."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.away = False
        self.refused = self.told = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def documents(self, group: str) -> Any:
        """As of the store, when it is there."""
        if self.away:
            self.refused += 1
            raise StoreError("away")
        self.told += 1
        return await self._store.documents(group)


async def test_a_watch_outlives_a_keeper_that_cannot_tell(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1 says that the version was given up, so a pause of the store must not end the command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rollout_command, "_EVERY_S", 0.01)
    at = await stage()
    store = Fickle(at.store)
    calls = RolloutCalls(store, lambda: at.config, lambda: POOLS, dict, lambda: "r1")
    async with serving(at, calls) as api:
        watch = ["status", "chat", "--watch", "--url", url_of(api)]
        await api.post("/chat/start", {"to": "v2"})
        waiting = asyncio.create_task(asyncio.to_thread(run, *watch))
        await until(lambda: store.told > 1)
        store.away = True
        await until(lambda: store.refused >= 3)
        store.away = False
        await api.post("/chat/promote", {"full": True})
        await api.post("/chat/promote")
        await api.post("/chat/promote")
        code, out, err = await waiting
    assert (code, out.count("is over")) == (0, 1)
    assert err.count("away") == 1


async def test_a_watch_of_what_never_answered_ends_at_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong address, or a model that there is not, is no pause."""
    monkeypatch.chdir(tmp_path)
    async with serving(await stage()) as api:
        code, _, err = await asyncio.to_thread(run, "status", "ghost", "--watch", "--url", url_of(api))
    assert (code, "no model `ghost`" in err) == (1, True)


async def test_a_watch_gives_up_what_stays_away(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while the command says what is wrong, and fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rollout_command, "_EVERY_S", 0.01)
    monkeypatch.setattr(rollout_command, "_MOST_FAILURES", 5)
    at = await stage()
    store = Fickle(at.store)
    calls = RolloutCalls(store, lambda: at.config, lambda: POOLS, dict, lambda: "r1")
    async with serving(at, calls) as api:
        await api.post("/chat/start", {"to": "v2"})
        watch = ["status", "chat", "--watch", "--url", url_of(api)]
        waiting = asyncio.create_task(asyncio.to_thread(run, *watch))
        await until(lambda: store.told > 1)
        store.away = True
        code, _, err = await waiting
    assert code == 1
    assert store.refused == 6
    assert err.endswith("warmpath: away\n")

"""Who gets the new version: as many sessions as the share says, the same at every replica, and none goes back."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from extproc.config_rollouts import Gates
from extproc.rollout.state import Plan, Rollout
from tests.acceptance.rollouts.routers import workers
from tests.acceptance.rollouts.stand import MODEL, NEW, OLD
from tests.acceptance.state.size import LONG
from tests.valkey import Valkey
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

REPLICAS = 4
SESSIONS = 10_000
LATER = SESSIONS if LONG else 1500
"""Sessions whose further turns are asked for, those of the new version all."""
PLAN = Plan(
    steps=(0.1, 0.25, 1.0),
    hold_s=600.0,
    settle_s=0.0,
    min_samples=0,
    on_failure="rollback",
    false_alarms=0.01,
    require_verdict=False,
    retire_after_s=1800.0,
    gates=Gates(),
)
FIRST = Rollout(id="r", model=MODEL, canary=NEW, base={OLD: 1.0, NEW: 0.0}, plan=PLAN, share=0.1, earlier=(0.0,))
"""10 % of the sessions; what began before it stays where it was."""
SECOND = Rollout(
    id="r", model=MODEL, canary=NEW, base={OLD: 1.0, NEW: 0.0}, plan=PLAN, step=1, share=0.25, earlier=(0.1, 0.0)
)
OVER = Rollout(id="r", model=MODEL, canary=NEW, base={OLD: 1.0, NEW: 0.0}, plan=PLAN, step=1, phase="rolled_back")


@pytest_asyncio.fixture(loop_scope="module")
async def valkey() -> AsyncIterator[Valkey]:
    """A store of its own for each test."""
    with Valkey() as running:
        yield running


async def test_ten_thousand_sessions_split_as_the_share_says(valkey: Valkey, measured: list[str]) -> None:
    """10 +- 1 % at 10 %. At 25 % no conversation changes its version, and new ones are 25 +- 2 %.

    Without Redis they stay where they are too. Each turn comes to another of four replicas than the turn before.
    """
    sessions = [f"session {number}" for number in range(SESSIONS)]
    async with workers(valkey.url, REPLICAS) as fleet:
        await fleet.use(FIRST)
        first = await fleet.versions(sessions, 0)
        share = Counter(first.values())[NEW] / SESSIONS
        on_new = [session for session in sessions if first[session] == NEW]
        on_old = [session for session in sessions if first[session] == OLD]
        those = on_new + on_old[: max(0, LATER - len(on_new))]
        await fleet.use(SECOND)
        second = await fleet.versions(those, 1)
        fresh = [f"later session {number}" for number in range(4000)]
        later = Counter((await fleet.versions(fresh, 0)).values())[NEW] / len(fresh)
        await until(lambda: all(worker.knows(those, 2) for worker in fleet.workers))
        await asyncio.to_thread(valkey.stop)
        third = await fleet.versions(those, 2)
    moved = [session for session in those if second[session] != first[session]]
    lost = [session for session in those if third[session] != first[session]]
    measured.append(
        f"{SESSIONS} sessions at 10 %: {share:.2%}; 4000 more at 25 %: {later:.2%}; of {len(those)} conversations "
        f"{len(moved)} changed their version when the share was raised, {len(lost)} when Redis was gone"
    )
    assert 0.09 <= share <= 0.11
    assert 0.23 <= later <= 0.27
    assert not moved
    assert not lost


async def test_all_replicas_choose_alike_without_asking(valkey: Valkey) -> None:
    """First turns of one session at all four replicas at once, before anybody could tell the others: one version."""
    async with workers(valkey.url, REPLICAS) as fleet:
        await fleet.use(FIRST)
        for number in range(200):
            told = await asyncio.gather(*(worker.version_of(f"s{number}", 0) for worker in fleet.workers))
            assert len(set(told)) == 1


async def test_a_rollback_leaves_nobody_on_the_new_version(valkey: Valkey) -> None:
    """Conversations that run there go back with their next turn: its answers are what was wrong."""
    sessions = [f"session {number}" for number in range(600)]
    async with workers(valkey.url, REPLICAS) as fleet:
        await fleet.use(SECOND)
        assert NEW in (await fleet.versions(sessions, 0)).values()
        await fleet.use(OVER)
        assert set((await fleet.versions(sessions, 1)).values()) == {OLD}

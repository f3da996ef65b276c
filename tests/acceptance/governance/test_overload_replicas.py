"""Queues of two replicas before the same engines: full engines, no rush, fair shares, and a replica that stops."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from extproc.envoy import api_keys
from tests.acceptance.governance.crowd import Crowd, Tally, ask, asking
from tests.acceptance.journal import Journal
from tests.acceptance.local import POOL, Engine, simulated
from tests.acceptance.state.replicas import Plan, Site, site
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

BATCH, MORE = 6, 2
"""What each engine runs at once, and what may wait there beside."""
FULL_S = 5.0
ENGINES = ("--max-num-seqs", str(BATCH), "--step-ms", "25", "--per-seq-ms", "0")


class Scene(msgspec.Struct, frozen=True):
    """A site of two replicas, its engines, and keys of two tenants."""

    site: Site
    engines: list[Engine]
    keys: dict[str, str]

    def crowd(self, tenant: str, clients: int) -> Crowd:
        """Clients of a tenant."""
        return Crowd(name=tenant, clients=clients, headers={"authorization": f"Bearer {self.keys[tenant]}"})

    async def answers(self) -> bool:
        """Whether a request is answered."""
        return (await ask(self.site.http, self.site.front.url, self.crowd("a", 1), Tally())).status == 200

    async def in_engines(self, seconds: float) -> list[int]:
        """Sequences in both engines, five times a second."""
        seen = []
        loop = asyncio.get_running_loop()
        until_s = loop.time() + seconds
        while loop.time() < until_s:
            seen.append(sum(await asyncio.gather(*(engine.live() for engine in self.engines))))
            await asyncio.sleep(0.2)
        return seen


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(journal: Journal, folder: Path) -> AsyncIterator[Scene]:
    """Two replicas of one worker each, an Envoy that spreads requests over them, two engines."""
    keys = {name: api_keys.new(secrets.token_urlsafe) for name in "ab"}
    (folder / "keys").write_text("".join(f"{api_keys.line(name, key)}\n" for name, key in keys.items()))
    sections = {
        "overload": {"action": "queue", "saturation": {"waiting": MORE}, "queue": {"max_wait_s": 60}},
        "gateway": {"auth": {"keys": str(folder / "keys"), "fail_open": True}, "message_timeout_ms": 5000},
    }
    async with (
        simulated(journal, each=2, arguments=ENGINES) as engines,
        site(journal, folder, {POOL: engines}, Plan(envoys=[[]], sections=sections)) as here,
    ):
        scene = Scene(here, engines, keys)
        await until_async(scene.answers)
        yield scene


async def test_replicas_keep_engines_full_and_share_fairly(scene: Scene, measured: list[str]) -> None:
    """Ten times as many clients get no more, engines always have work, and what the replicas send stays in bounds."""
    loop = asyncio.get_running_loop()
    async with asking(scene.site.front.url, [scene.crowd("a", 100), scene.crowd("b", 20)]) as tally:
        # Engines that show no queue get all that comes, and have to work that off first.
        await asyncio.sleep(FULL_S)
        began = loop.time()
        seen = await scene.in_engines(6.0)
        ended = loop.time()
    a, b = (tally.per_s(began, ended, name) for name in "ab")
    limit, mean = 2 * (BATCH + MORE), sum(seen) / len(seen)
    measured.append(
        f"overload, two replicas: tenants of 100 and 20 clients get {a:.1f} and {b:.1f} answers/s; sequences in both "
        f"engines (they run {2 * BATCH}, {limit} are allowed): {min(seen)} to {max(seen)}, mean {mean:.1f}"
    )
    assert set(tally.outcomes()) == {"200"}
    assert abs(a - b) <= 0.1 * max(a, b) + 1.0
    # Both replicas may see the same free place, and what an engine has finished is settled a moment later.
    assert max(seen) <= 1.25 * limit
    assert mean >= 0.8 * 2 * BATCH


async def test_a_replica_that_stops_answers_whoever_waits_there(scene: Scene) -> None:
    """Within its drain it lets through whom it can; the rest is answered 503 with the reason."""
    async with asking(scene.site.front.url, [scene.crowd("a", 100)]) as tally:
        await asyncio.sleep(2.0)
        assert await scene.site.replicas[0].stop() == 0
        await asyncio.sleep(1.0)
    assert set(tally.outcomes()) <= {"200", "503 shutting_down"}
    assert tally.outcomes()["200"] > 0

"""Twice as many requests as the engines can do, for each action: nobody gets less for it, and nothing is left of it."""

import asyncio
import copy
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from extproc.envoy import api_keys
from tests.acceptance.governance.crowd import Crowd, Tally, ask, asking
from tests.acceptance.journal import Journal
from tests.acceptance.local import POOL, Local, configuration, running, simulated, write
from tests.waiting import until, until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

BATCH = 6
ENGINES = ("--max-num-seqs", str(BATCH), "--step-ms", "25", "--per-seq-ms", "0")
WARM_S, MEASURED_S = 1.5, 3.0
FULL_S = 4.0
"""Engines that show no queue get all that comes, and some have to work that off first."""
WAIT_S = 2.0
SMALL = "small"


class Scene(msgspec.Struct, frozen=True):
    """A stack, the document of its configuration, keys of two tenants, and what it can do."""

    local: Local
    path: Path
    document: dict[str, Any]
    keys: dict[str, str]
    capacity: list[float]

    async def use(self, **overload: Any) -> None:
        """Change the section `overload` while the stack runs, and wait until it is used."""
        in_use = self.heard()
        document = copy.deepcopy(self.document)
        document["overload"] = {"queue": {"max_wait_s": WAIT_S}, **overload}
        await asyncio.to_thread(write, self.path, document)
        await until(lambda: self.heard() > in_use)

    def heard(self) -> int:
        """How often the worker took a changed configuration."""
        lines = self.local.journal.containing("the changed configuration is in use")
        return sum('"process": "worker-0"' in line for line in lines)

    def crowd(self, tenant: str = "a", clients: int = 0, **more: Any) -> Crowd:
        """Clients of a tenant."""
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return Crowd(name=tenant, clients=clients, headers=headers, **more)

    async def measure(
        self, *crowds: Crowd, seconds: float = MEASURED_S, warm_s: float = WARM_S
    ) -> tuple[Tally, float, float]:
        """Let crowds ask; what they got, and the time that counts."""
        loop = asyncio.get_running_loop()
        async with asking(self.local.url, crowds) as tally:
            await asyncio.sleep(warm_s)
            began = loop.time()
            await asyncio.sleep(seconds)
            ended = loop.time()
        await self.calm()
        return tally, began, ended

    async def answers(self) -> bool:
        """Whether a request is answered: Envoy may not have heard yet that the worker is ready."""
        return (await ask(self.local.http, self.local.url, self.crowd(), Tally())).status == 200

    async def calm(self) -> None:
        """Wait until nothing waits, runs or is charged any more."""

        async def so() -> bool:
            left = [await engine.live() for engine in self.local.engines]
            return not any(left) and not await self.local.in_flight() and not await self.queued()

        await until_async(so)

    async def queued(self) -> float:
        """Requests that wait at the worker."""
        return await self.local.metric("warmpath_queue_requests")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(journal: Journal, folder: Path) -> AsyncIterator[Scene]:
    """Two engines that run six requests each, and one of a smaller model; goodput at capacity is measured first."""
    path, keys = folder / "warmpath.yaml", {name: api_keys.new(secrets.token_urlsafe) for name in "ab"}
    (folder / "keys").write_text("".join(f"{api_keys.line(name, key)}\n" for name, key in keys.items()))
    async with (
        simulated(journal, each=2, arguments=ENGINES) as engines,
        simulated(journal, each=1, arguments=("--model", SMALL, "--step-ms", "5")) as small,
    ):
        pools = {POOL: [one.address for one in engines], SMALL: [one.address for one in small]}
        document = configuration(
            pools, gateway={"auth": {"keys": str(folder / "keys"), "fail_open": True}, "message_timeout_ms": 5000}
        )
        async with running(journal, path, document, [*engines, *small]) as local:
            scene = Scene(local, path, document, keys, [])
            await until_async(scene.answers)
            tally, began, ended = await scene.measure(scene.crowd(clients=2 * BATCH + 4))
            scene.capacity.append(tally.per_s(began, ended))
            assert set(tally.outcomes()) == {"200"}
            yield scene


async def overloaded(scene: Scene, measured: list[str], action: str) -> tuple[Tally, float]:
    """Twice the capacity for some seconds; then as much as it can do. What was asked for holds for both."""
    capacity = scene.capacity[0]
    tally, began, ended = await scene.measure(scene.crowd(per_s=2 * capacity), seconds=WAIT_S + MEASURED_S)
    during = tally.per_s(began, ended)
    after, began, ended = await scene.measure(scene.crowd(clients=2 * BATCH + 4))
    later = after.per_s(began, ended)
    measured.append(
        f"overload, {action}: {capacity:.1f} answers/s at capacity; at twice the load {during:.1f}/s, "
        f"p99 {tally.took(0.99):.2f} s, {dict(tally.outcomes())}; afterwards {later:.1f}/s"
    )
    assert during >= 0.9 * capacity
    assert later >= 0.9 * capacity
    assert set(after.outcomes()) == {"200"}
    return tally, during


async def test_rejected_requests_hear_when_to_come_again(scene: Scene, measured: list[str]) -> None:
    """429 with whole seconds from 1 to 30; the others are answered as fast as at capacity, not slower and slower."""
    await scene.use(action="reject")
    tally, _ = await overloaded(scene, measured, "reject")
    assert set(tally.outcomes()) == {"200", "429 overloaded"}
    refused = [one for one in tally.answers if one.status == 429]
    assert all(1 <= int(one.headers["retry-after"]) <= 30 for one in refused)


async def test_queued_requests_wait_no_longer_than_they_may(scene: Scene, measured: list[str]) -> None:
    """Those whose turn does not come are answered 503 after their wait; the queue's own wait is within its bound."""
    await scene.use(action="queue")
    tally, _ = await overloaded(scene, measured, "queue")
    assert set(tally.outcomes()) == {"200", "503 queue_timeout"}
    late = [one for one in tally.answers if one.status == 503]
    assert not [one for one in late if "retry-after" in one.headers]
    let_through = await scene.local.metric("warmpath_queue_wait_seconds_count")
    within = await scene.local.metric("warmpath_queue_wait_seconds_bucket", le="2.0")
    assert within == let_through > 0


async def test_fallbacks_answer_what_is_too_much(scene: Scene, measured: list[str]) -> None:
    """Everybody is answered, and who was answered by the other model is told so."""
    await scene.use(action="fallback", fallback=SMALL)
    tally, during = await overloaded(scene, measured, "fallback")
    assert set(tally.outcomes()) == {"200"}
    assert {one.headers.get("x-warmpath-fallback") for one in tally.answers} == {None, SMALL}
    assert during >= 1.6 * scene.capacity[0]


async def test_low_priority_still_moves(scene: Scene, measured: list[str]) -> None:
    """A tenant of the low class gets its tenth while the others could use all of it."""
    tenants = {"b": {"priority": 10}}
    await scene.use(
        action="queue", queue={"max_wait_s": 60, "low_share": 0.1}, tenants=tenants, saturation={"waiting": 1}
    )
    tally, began, ended = await scene.measure(
        scene.crowd("a", clients=60), scene.crowd("b", clients=60), seconds=5.0, warm_s=FULL_S
    )
    a, b = (tally.per_s(began, ended, name) for name in "ab")
    measured.append(f"overload, a normal and a low class of 60 clients each: {a:.1f} and {b:.1f} answers/s")
    assert 0.04 <= b / (a + b) <= 0.2


async def test_clients_that_leave_are_out_of_the_queue(scene: Scene) -> None:
    """A hundred clients wait and hang up: the queue is empty at once, and engines never see their requests."""
    await scene.use(action="queue", queue={"max_wait_s": 60})
    async with asking(scene.local.url, [scene.crowd(clients=130)]):

        async def many_wait() -> bool:
            return await scene.queued() >= 80

        await until_async(many_wait)

    async def none_waits() -> bool:
        return not await scene.queued()

    await until_async(none_waits)
    assert await scene.local.metric("warmpath_queue_left_total", outcome="client_left") >= 80
    await scene.calm()

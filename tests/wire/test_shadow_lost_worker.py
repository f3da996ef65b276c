"""A worker is frozen or killed while Envoy copies answers to it: clients get theirs whole, and soon."""

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from tests.waiting import until_async
from tests.wire.envoy import RunningEnvoy, running_envoy
from tests.wire.shadow_parts import PATH, Engine, Members, config_of, whole

SLOW = "n=60&size=200&gap=0.02"
LARGE = "n=400&size=8000&gap=0.002"
LIMIT_S = 10.0
"""Far above what these answers take, and half of what Envoy would wait for a worker (`message_timeout_ms`)."""


@dataclass
class Stand:
    """A gateway and its one worker, another process."""

    envoy: RunningEnvoy
    http: aiohttp.ClientSession
    worker: asyncio.subprocess.Process
    fails_open: bool

    async def ask(self, query: str) -> bytes:
        """One answer, to its end."""
        async with self.http.post(f"{self.envoy.url}{PATH}?{query}", data=b"{}") as answer:
            assert answer.status == 200
            return await answer.read()

    async def copied(self, what: str = "started") -> int:
        """Streams of copies that Envoy has begun, or that have failed."""
        page = await self.envoy.get(f"/stats?filter=ext_proc.captures.streams_{what}$")
        return int(page.rpartition(":")[2]) if ":" in page else 0


@pytest_asyncio.fixture(params=[True, False], ids=["open", "closed"])
async def stand(request: pytest.FixtureRequest) -> AsyncIterator[Stand]:
    """Every answer is copied; the gateway fails open, and does not."""
    folder = tempfile.mkdtemp(prefix="wp-")
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        engine = Engine()
        await engine.start()
        cleanup.push_async_callback(engine.stop)
        pools = {"old": engine.address, "new": engine.address}
        config = config_of(folder, pools, "compare", "buffered", most=8)
        config = msgspec.structs.replace(
            config, gateway=msgspec.structs.replace(config.gateway, fail_open=request.param)
        )
        keeper = Members(pools)
        await keeper.start(f"{folder}/keeper.sock")
        cleanup.push_async_callback(keeper.stop)
        command = (sys.executable, "-m", "tests.wire.shadow_worker", f"unix:{folder}/worker-0.sock", "buffered")
        worker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        cleanup.push_async_callback(worker.wait)
        cleanup.callback(_killed, worker)
        assert worker.stdout is not None
        assert await worker.stdout.readline() == b"ready\n"
        envoy = await cleanup.enter_async_context(running_envoy(config))
        http = await cleanup.enter_async_context(aiohttp.ClientSession())
        stand = Stand(envoy, http, worker, request.param)

        async def serves() -> bool:
            async with http.post(f"{envoy.url}{PATH}?n=1", data=b"{}") as answer:
                return answer.status == 200 and await stand.copied() > 0

        await until_async(serves)
        yield stand


def _killed(worker: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        worker.kill()


async def test_a_frozen_worker_holds_no_answer_up(stand: Stand) -> None:
    """A stream of pieces, and 3.2 MB of which it reads nothing any more: all is passed on before it is given up.

    With Envoy's own buffer of 1 MiB the large answer stood still until then.
    """
    before = await stand.copied()
    slow, large = asyncio.create_task(stand.ask(SLOW)), asyncio.create_task(stand.ask(LARGE))
    await until_async(lambda: _more(stand, before + 1))
    stand.worker.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(LIMIT_S):
        assert await large == whole(400, 8000)
        assert await stand.copied("failed") == 0
        assert await slow == whole(60, 200)


async def test_a_killed_worker_is_no_end_of_a_copied_answer(stand: Stand) -> None:
    """Where the gateway fails open: otherwise the decision's own stream ends the answer, with or without a copy."""
    before = await stand.copied()
    asked = asyncio.create_task(stand.ask(SLOW))
    await until_async(lambda: _more(stand, before))
    stand.worker.kill()
    async with asyncio.timeout(LIMIT_S):
        if stand.fails_open:
            assert await asked == whole(60, 200)
        else:
            with pytest.raises(aiohttp.ClientError):
                await asked


async def _more(stand: Stand, than: int) -> bool:
    return await stand.copied() > than

"""Case C15: Envoy closes an idle connection before the engine does, so that no request meets one that is closing."""

import asyncio
import contextlib
import re
import shutil
import tempfile
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from extproc.config import Config, Gateway, Model, Pool, Sidecar, Timeouts
from tests.ports import free_port
from tests.waiting import until_async
from tests.wire.envoy import RunningEnvoy, running_envoy
from tests.wire.standins import Keeper, Orders, Worker

ENGINE_S = 1.0
"""Keep-alive of the engine."""
PAUSES_S = (0.4, 0.6, 0.9, 1.0, 1.1, 1.3)
"""Between two requests: around what Envoy and the engine keep an idle connection for."""


async def _answer(_request: web.Request) -> web.Response:
    return web.json_response({"object": "chat.completion", "choices": []})


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[str]:
    """One that closes idle connections after `ENGINE_S`, and its address."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", _answer)
    runner = web.AppRunner(app, keepalive_timeout=ENGINE_S, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{site.port}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def running(endpoint_idle_s: float) -> AsyncIterator[RunningEnvoy]:
    """An Envoy before that engine."""
    folder = tempfile.mkdtemp(prefix="wp-")
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        address = await cleanup.enter_async_context(engine())
        config = Config(
            models={"m": Model(pool="main")},
            pools={"main": Pool(endpoints=[address])},
            timeouts=Timeouts(endpoint_idle_s=endpoint_idle_s),
            gateway=Gateway(
                listen=f"127.0.0.1:{free_port()}",
                admin=f"127.0.0.1:{free_port()}",
                sidecar=Sidecar(socket_dir=folder, workers=1),
            ),
        )
        worker, keeper = Worker(Orders(destinations=[address])), Keeper([address])
        await worker.start(f"{folder}/worker-0.sock")
        cleanup.push_async_callback(worker.stop)
        await keeper.start(f"{folder}/keeper.sock")
        cleanup.push_async_callback(keeper.stop)
        yield await cleanup.enter_async_context(running_envoy(config))


async def closed_by(envoy: RunningEnvoy, whom: str) -> int:
    """Idle connections to the engine that were closed: by Envoy (`idle_timeout`) or the engine (`destroy_remote`)."""
    page = await envoy.get(f"/stats?filter=^cluster.main.upstream_cx_{whom}$")
    found = re.search(r": (\d+)", page)
    assert found, page
    return int(found[1])


async def requests(envoy: RunningEnvoy) -> list[int]:
    """One request after each pause; their statuses."""
    statuses = []
    async with aiohttp.ClientSession() as http:
        for pause_s in PAUSES_S:
            async with http.post(f"{envoy.url}/v1/chat/completions", data=b"{}") as answer:
                statuses.append(answer.status)
            await asyncio.sleep(pause_s)
    return statuses


async def test_no_idle_connection_is_closed_by_the_engine() -> None:
    """Case C15: Envoy's limit is below the engine's: it closes every idle connection itself, and nothing is retried."""
    async with running(ENGINE_S / 2) as envoy:
        assert set(await requests(envoy)) == {200}
        assert await closed_by(envoy, "destroy_remote") == 0
        assert await closed_by(envoy, "idle_timeout") >= 4
        assert "upstream_rq_retry: 0" in await envoy.get("/stats?filter=^cluster.main.upstream_rq_retry$")


async def test_with_a_longer_limit_the_engine_closes_them() -> None:
    """Case C15: what the test above would see if Envoy kept connections for longer than the engine does."""
    async with running(4 * ENGINE_S) as envoy:
        await requests(envoy)

        async def closed() -> bool:
            return await closed_by(envoy, "destroy_remote") > 0

        await until_async(closed)


@pytest.mark.parametrize(("engine_s", "of"), [(5.0, "vLLM and SGLang, by uvicorn's default")])
def test_the_default_is_below_the_engines_keep_alive(engine_s: float, of: str) -> None:
    """Case C15: as shipped, with a second to spare for what is under way on the network."""
    assert Timeouts().endpoint_idle_s <= engine_s - 1.0, of

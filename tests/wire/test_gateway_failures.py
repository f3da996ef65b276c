"""What a real Envoy does, path by path, while no sidecar can decide: fail open or fail closed, as configured."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from extproc.config import BodyMode, Gateway
from extproc.config_gateway import GatewayRoute
from tests.waiting import until_async
from tests.wire.gateway import Running, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPEN, CLOSED = "/v1/embeddings", "/v1/chat/completions"
ROUTES = [GatewayRoute(path="/v1", fail_open=False), GatewayRoute(path=OPEN, fail_open=True)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[True, False], ids=["else open", "else closed"])
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    """A gateway whose paths below `/v1` fail closed, but for one; all others as the parameter says."""
    gateway = Gateway(fail_open=request.param, routes=ROUTES, message_timeout_ms=300)
    async with running_gateway(gateway) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(shared: Running) -> AsyncIterator[Running]:
    """The same, whole again after each test."""
    yield shared
    shared.desk.outcome, shared.desk.silent_s = None, 0.0
    await shared.sidecar.stop()
    await shared.sidecar.start()
    await until_async(shared.reaches_sidecar)


async def check(running: Running, status: int = 503, reason: str = "sidecar_unavailable") -> None:
    """The path that fails open is answered by an engine, the others are refused, and all others do as all do."""
    for path in (OPEN, f"{OPEN}/", f"{OPEN}?of=/v1/chat/completions"):
        answer = await running.ask(path=path)
        assert (answer.status, answer.reason) == (200, ""), path
        assert answer.json["endpoint"] in {engine.address for engine in running.engines}
    for path in (CLOSED, "/v1/embeddingsx", "/v1/completions", "/v1/messages"):
        assert (await running.ask(path=path)).is_refusal(status, reason), path
    others = await running.ask(path="/rerank")
    assert others.status == 200 if running.config.gateway.fail_open else others.is_refusal(status, reason)


async def test_while_it_is_dead(gateway: Running) -> None:
    """Nobody listens."""
    await gateway.sidecar.stop()
    await check(gateway)


async def test_while_it_stands_still(gateway: Running) -> None:
    """It takes requests and never answers them."""
    gateway.desk.silent_s = 30.0
    await check(gateway)


async def test_while_it_refuses(gateway: Running) -> None:
    """It listens, and knows nothing of the service."""
    await gateway.sidecar.stop()
    await gateway.sidecar.start(deaf=True)
    await until_async(gateway.reaches_sidecar)
    await check(gateway)


async def test_while_its_decisions_fail(gateway: Running) -> None:
    """A fault of ours is handled like our absence, path by path."""
    gateway.desk.outcome = RuntimeError("broken")
    await check(gateway, 500, "internal")


@pytest.mark.parametrize("body_mode", ["buffered", "duplex"])
async def test_in_both_body_modes_while_it_is_dead(body_mode: BodyMode) -> None:
    """A path's own rule does not depend on how bodies reach the sidecar."""
    async with running_gateway(Gateway(fail_open=True, body_mode=body_mode, routes=ROUTES)) as running:
        await running.sidecar.stop()

        async def noticed() -> bool:
            return not await running.stat("cluster.warmpath_workers.membership_healthy")

        # A request that a duplex sidecar has begun to take cannot go on without it.
        await until_async(noticed)
        await check(running)

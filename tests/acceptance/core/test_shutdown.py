"""The sidecar stops without a lost request."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from extproc._pb.warmpath.v1 import health_pb2
from extproc.envoy.health import READINESS
from tests.acceptance.journal import Journal
from tests.acceptance.local import CHAT, POOL, Answer, Local, chat_body, configuration, running, simulated
from tests.unit.envoy.gateway import connected
from tests.waiting import PATIENCE_S, until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

STREAMS = 20
WORKERS = 2
TOKENS = 100


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(journal: Journal, folder: Path) -> AsyncIterator[Local]:
    """Two engines behind two workers."""
    async with simulated(journal, each=2) as engines:
        document = configuration({POOL: [engine.address for engine in engines]})
        document["gateway"]["sidecar"]["workers"] = WORKERS
        document["redis"] = {"timeout_ms": 2000}  # its books tell when all streams are open
        async with running(journal, folder / "warmpath.yaml", document, engines) as started:
            yield started


async def test_open_streams_finish_when_the_sidecar_is_told_to_stop(local: Local) -> None:
    """SIGTERM with streams open: unready at once, every stream ends as it should, and later requests pass too."""
    serve = local.stack.children["sidecar"]
    body = chat_body("a long story, please", stream=True, max_tokens=TOKENS, ignore_eos=True)

    async def all_open() -> bool:
        return await local.in_flight() == STREAMS and sum([await one.live() for one in local.engines]) == STREAMS

    async def unready() -> bool:
        answer = await local.ready()
        return answer.status == 503 and answer.json["ready"] is False

    async with contextlib.AsyncExitStack() as frozen:
        # No stream can end before the sidecar was told.
        for engine in local.engines:
            await frozen.enter_async_context(engine.frozen("engine"))
        watches = [await frozen.enter_async_context(readiness(local, worker)) for worker in range(WORKERS)]
        streams = [asyncio.create_task(local.ask(CHAT, body)) for _ in range(STREAMS)]
        await until_async(all_open)
        serve.send(signal.SIGTERM)
        # The workers say it themselves, to a gateway that is connected, before they refuse anything.
        said = [(await asyncio.wait_for(watch.read(), PATIENCE_S)).status for watch in watches]
        assert said == [health_pb2.HealthCheckResponse.NOT_SERVING] * WORKERS
        await until_async(unready)
        assert serve.running
        # Nobody decides any more: Envoy sends this on by itself.
        assert (await local.ask("/v1/models", method="GET")).status == 200
    for answer in await asyncio.gather(*streams):
        assert complete(answer)
    assert await serve.wait() == 0
    assert (await local.chat("and now?")).status == 200
    assert await local.in_flight() == 0


@contextlib.asynccontextmanager
async def readiness(local: Local, worker: int) -> AsyncIterator[Any]:
    """A watch on a worker's readiness that has begun."""
    address = f"unix:{local.stack.config.gateway.sidecar.socket_dir}/worker-{worker}.sock"
    async with connected(address) as channel:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )(health_pb2.HealthCheckRequest(service=READINESS))
        first = await watch.read()
        assert first.status == health_pb2.HealthCheckResponse.SERVING
        yield watch


def complete(answer: Answer) -> bool:
    """Whether a stream came to its end with all its tokens."""
    events = answer.body.split(b"\n\n")
    return answer.status == 200 and events[-2] == b"data: [DONE]" and len(events) >= TOKENS

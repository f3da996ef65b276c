"""What a real Envoy tells of answers that do not end as they should, and whom a rollout blames for them."""

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from envoy.data.accesslog.v3 import accesslog_pb2

from extproc.config import Config, Gateway, Model, Pool, Sidecar
from extproc.envoy.access_log import served_from
from extproc.envoy.contract import Served
from extproc.rollout_learning import outcome_of, tpot_s
from tests.bad_engine import BadEngine, Behave
from tests.ports import free_port
from tests.waiting import until
from tests.wire.envoy import RunningEnvoy, running_envoy
from tests.wire.standins import Keeper, Orders, Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

STREAM: dict[str, Any] = {
    "model": "sim",
    "messages": [{"role": "user", "content": "tell"}],
    "max_tokens": 12,
    "stream": True,
    "stream_options": {"include_usage": True},
}
WHOLE = {key: value for key, value in STREAM.items() if not key.startswith("stream")}


@dataclass
class Stack:
    """An Envoy in front of one engine, with a stand-in for the sidecar that keeps what the access log tells."""

    envoy: RunningEnvoy
    http: aiohttp.ClientSession
    worker: Worker
    engine: BadEngine
    asked: int = field(default=0)

    async def ask(self, behave: Behave, body: dict[str, Any], leave_after: int | None = None) -> Served:
        """What the access log says of one request, whose client leaves after so many bytes."""
        self.asked += 1
        path = f"/v1/chat/completions?n={self.asked}"
        with contextlib.suppress(aiohttp.ClientError):
            async with self.http.post(f"{self.envoy.url}{path}", json=body, headers=behave.header()) as answer:
                got = 0
                async for piece in answer.content.iter_any():
                    got += len(piece)
                    if leave_after is not None and got >= leave_after:
                        answer.close()
                        break
        ended = accesslog_pb2.DownstreamEnd

        def mine() -> list[accesslog_pb2.HTTPAccessLogEntry]:
            entries = (entry for entry in self.worker.entries if entry.request.path == path)
            return [entry for entry in entries if entry.common_properties.access_log_type == ended]

        await until(lambda: bool(mine()))
        told: dict[str, str | float] = {"kind": "chat", "streamed": float("stream" in body), "sequences": 1.0}
        return msgspec.structs.replace(served_from(mine()[0]), metadata=told)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack() -> AsyncIterator[Stack]:
    """All of it, for the module."""
    folder = tempfile.mkdtemp(prefix="wp-")
    async with contextlib.AsyncExitStack() as stop:
        stop.callback(shutil.rmtree, folder, ignore_errors=True)
        engine = await stop.enter_async_context(BadEngine())
        keeper, worker = Keeper([engine.address]), Worker(Orders(destinations=[engine.address]))
        await keeper.start(f"{folder}/keeper.sock")
        stop.push_async_callback(keeper.stop)
        await worker.start(f"{folder}/worker-0.sock")
        stop.push_async_callback(worker.stop)
        sidecar = Sidecar(socket_dir=folder, workers=1)
        config = Config(
            models={"m": Model(pool="main")},
            pools={"main": Pool(endpoints=[engine.address])},
            gateway=Gateway(listen=f"127.0.0.1:{free_port()}", admin=f"127.0.0.1:{free_port()}", sidecar=sidecar),
        )
        envoy = await stop.enter_async_context(running_envoy(config))
        http = await stop.enter_async_context(aiohttp.ClientSession())
        yield Stack(envoy, http, worker, engine)


@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])
async def test_a_whole_answer_is_good(stack: Stack, body: dict[str, Any]) -> None:
    """With its usage."""
    served = await stack.ask(Behave(), body)
    assert (outcome_of(served, due=True), served.output_tokens) == ("ok", 12)


@pytest.mark.parametrize("how", ["reset", "close", "end"])
@pytest.mark.parametrize("at", [0, 600])
async def test_a_stream_that_is_cut_is_broken(stack: Stack, how: Any, at: int) -> None:
    """After its headers or in its middle; by a reset, an early end of the connection, or an end in good order."""
    served = await stack.ask(Behave(cut_at=at, how=how), STREAM)
    assert (served.status, served.response_bytes, served.output_tokens) == (200, at, -1)
    assert outcome_of(served, due=True) == "broken"


async def test_an_early_end_in_good_order_is_seen_only_by_usage_that_is_missing(stack: Stack) -> None:
    """Where nobody asked for usage it looks whole."""
    body = {key: value for key, value in STREAM.items() if key != "stream_options"}
    cut, whole = await stack.ask(Behave(cut_at=600, how="end"), body), await stack.ask(Behave(), body)
    assert (cut.status, cut.flags, cut.output_tokens) == (whole.status, whole.flags, whole.output_tokens)
    assert [outcome_of(each, due=False) for each in (cut, whole)] == ["ok", "ok"]


@pytest.mark.parametrize("how", ["reset", "close"])
async def test_a_whole_answer_that_is_cut_is_broken(stack: Stack, how: Any) -> None:
    """Its length told of more."""
    assert outcome_of(await stack.ask(Behave(cut_at=50, how=how), WHOLE), due=True) == "broken"
    assert outcome_of(await stack.ask(Behave(length_off=7), WHOLE), due=True) == "broken"


@pytest.mark.parametrize("body", [STREAM, WHOLE], ids=["stream", "whole"])
async def test_an_answer_without_a_token_is_broken(stack: Stack, body: dict[str, Any]) -> None:
    """It says so itself."""
    served = await stack.ask(Behave(tokens=0), body)
    assert (outcome_of(served, due=True), served.output_tokens) == ("broken", 0)


@pytest.mark.parametrize(
    ("behave", "ended"),
    [
        (Behave(hang_up=True), "failed"),
        (Behave(hang_up=True, how="close"), "failed"),
        (Behave(garbage=True), "failed"),
        (Behave(status=500), "failed"),
        (Behave(status=503), "failed"),
        (Behave(status=429), "failed"),
        (Behave(status=400), "neutral"),
    ],
    ids=["reset", "closed", "garbage", "500", "503", "429", "400"],
)
async def test_who_fails_before_the_headers(stack: Stack, behave: Behave, ended: str) -> None:
    """Broken connections, 5xx and want of room are the version's; bad requests are the client's."""
    assert outcome_of(await stack.ask(behave, STREAM), due=True) == ended


async def test_an_engine_that_is_gone_fails(stack: Stack) -> None:
    """Nobody listens."""
    async with stack.engine.stopped():
        assert outcome_of(await stack.ask(Behave(), STREAM), due=True) == "failed"


async def test_a_client_that_leaves_abandons(stack: Stack) -> None:
    """In the middle of its stream."""
    served = await stack.ask(Behave(gap_s=0.2), STREAM, leave_after=300)
    assert outcome_of(served, due=True) == "abandoned"


async def test_the_time_of_a_token_is_what_the_engine_takes(stack: Stack) -> None:
    """Without the time to the first one; a busy machine only makes it longer."""
    served = await stack.ask(Behave(first_s=0.5, gap_s=0.05), STREAM)
    assert served.ttft_s >= 0.5
    assert tpot_s(served) >= 0.045
    assert tpot_s(served) * 11 <= served.duration_s - 0.45

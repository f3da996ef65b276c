"""A real Envoy between a client and the engines of two versions, with one real worker's ext_proc service behind it."""

import asyncio
import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
from aiohttp import web
from envoy.config.endpoint.v3 import endpoint_pb2

from extproc import inner
from extproc.clock import SystemClock
from extproc.config import Config, Gateway, Model, Pool, Shadow, Sidecar, Timeouts, Version
from extproc.config_gateway import BodyMode
from extproc.config_rollouts import ShadowMode
from extproc.envoy.contract import Call, Copy, Decider, Decision
from extproc.envoy.copies import Copies
from extproc.envoy.health import Health
from extproc.envoy.processor import Limits, Processor
from extproc.envoy.server import bind, make_server, stop
from extproc.handing_on import HandingOn
from tests.ports import free_port
from tests.waiting import until_async
from tests.wire.envoy import RunningEnvoy, running_envoy
from tests.wire.standins import Keeper, _assignment

MIB = 1 << 20
PATH = "/v1/chat/completions"


@dataclass
class Got:
    """What an engine got."""

    headers: dict[str, str]
    body: bytes


class Engine:
    """Answers every POST with pieces that the query asks for: `n` pieces of `size` bytes, `gap` seconds apart.

    Attributes:
        got: requests, in order.
        wait_s: how long it takes to begin an answer.
        deaf: it takes connections and reads nothing.
        cut: it breaks its answers off.
        words: what it answers instead, as the stream of a chat; empty for pieces.
    """

    def __init__(self) -> None:
        self.address = ""
        self.got: list[Got] = []
        self.wait_s = 0.0
        self.deaf = False
        self.cut = False
        self.words: list[str] = []
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on a free port; on the same one again after `stop`."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._healthy)
        app.router.add_post("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        port = int(self.address.rpartition(":")[2] or 0)
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.address = f"127.0.0.1:{site.port}"

    async def stop(self) -> None:
        """Close the listener and every connection."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _healthy(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.deaf:
            self.got.append(Got({}, b""))
            await asyncio.sleep(3600)
        self.got.append(Got({name.lower(): value for name, value in request.headers.items()}, await request.read()))
        await asyncio.sleep(self.wait_s)
        asked = request.query
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        pieces = [piece(index, int(asked.get("size", 100))) for index in range(int(asked.get("n", 3)))]
        for each in events(self.words) if self.words else pieces:
            await answer.write(each)
            await asyncio.sleep(float(asked.get("gap", 0.0)))
            if self.cut and request.transport is not None:
                request.transport.abort()
        return answer


def events(words: Sequence[str]) -> list[bytes]:
    """A chat's stream: a chunk each word, its end, and how many tokens it had."""
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in words]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    chunks.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(words)}})
    told = [b"data: " + json.dumps({"object": "chat.completion.chunk", **each}).encode() + b"\n\n" for each in chunks]
    return [*told, b"data: [DONE]\n\n"]


def piece(index: int, size: int) -> bytes:
    """One piece of an answer."""
    return b"%08d" % index + b"." * (size - 8)


def whole(count: int, size: int) -> bytes:
    """All pieces of an answer."""
    return b"".join(piece(index, size) for index in range(count))


class Members(Keeper):
    """Serves endpoints by the name of their pool, and notes what it was asked for."""

    def __init__(self, pools: Mapping[str, str]) -> None:
        super().__init__([])
        self._pools = pools

    def members(self, name: str) -> endpoint_pb2.ClusterLoadAssignment:
        """See `Keeper`."""
        return _assignment(name, [self._pools[name]])


class Kept:
    """Waits for one copy."""

    def __init__(self) -> None:
        self.copies: list[Copy | None] = []

    def captured(self, copy: Copy | None) -> None:
        """See `Capture`."""
        self.copies.append(copy)


@dataclass
class Desk:
    """Sends every request to the old version, with what the test adds.

    Attributes:
        headers: further request headers.
        metadata: metadata of its decisions.
        decided: how many were.
    """

    headers: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str | float] = field(default_factory=dict)
    decided: int = 0
    replica: str = "r"
    asked: list[Call] = field(default_factory=list)

    async def decide(self, call: Call) -> Decision:
        """See `Decider.decide`."""
        self.decided += 1
        self.asked.append(call)
        return Decision(
            pool="old",
            charge_id=f"{self.replica}-{self.decided}",
            metadata=dict(self.metadata),
            headers=dict(self.headers),
        )

    async def served(self, decision: Decision, served: str) -> None:
        """See `Decider.served`."""

    async def settle(self, decision: Decision, served: str = "") -> None:
        """See `Decider.settle`."""


Wrap = Callable[[Desk, Copies, Config], Decider]
"""Makes what decides of a desk."""


def _as_it_is(desk: Desk, _copies: Copies, _config: Config) -> Decider:
    return desk


@dataclass
class Stand:
    """Everything that runs."""

    envoy: RunningEnvoy
    http: aiohttp.ClientSession
    workers: list["Worker"]
    old: Engine
    new: Engine
    config: Config

    @property
    def desk(self) -> Desk:
        """Who decides at the first worker."""
        return self.workers[0].desk

    @property
    def copies(self) -> Copies:
        """Copies of the first worker."""
        return self.workers[0].copies

    async def ask(
        self, query: str = "", *, body: bytes = b'{"model":"m"}', headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        """Send one request, and read its answer to the end."""
        async with self.http.post(f"{self.envoy.url}{PATH}?{query}", data=io.BytesIO(body), headers=headers) as answer:
            return answer.status, await answer.read(), {name.lower(): value for name, value in answer.headers.items()}


def config_of(
    folder: str, pools: Mapping[str, str], mode: ShadowMode, body_mode: BodyMode, most: int, workers: int = 1
) -> Config:
    """A model with two versions, of which the second is the shadow."""
    return Config(
        models={
            "m": Model(
                versions={"old": Version(pool="old", weight=1.0), "new": Version(pool="new")},
                shadow=Shadow(version="new", mode=mode, share=1.0, max_concurrent=most, timeout_s=5.0, keep="answers"),
            )
        },
        pools={name: Pool(endpoints=[address]) for name, address in pools.items()},
        timeouts=Timeouts(),
        gateway=Gateway(
            body_mode=body_mode,
            fail_open=True,
            message_timeout_ms=20_000,
            listen=f"127.0.0.1:{free_port()}",
            admin=f"127.0.0.1:{free_port()}",
            sidecar=Sidecar(socket_dir=folder, workers=workers),
        ),
    )


class Worker:
    """The services of one worker that shadows need.

    Attributes:
        copies: takes copies.
        desk: decides.
    """

    def __init__(self, index: int, config: Config, wrap: Wrap) -> None:
        self.copies = Copies(SystemClock(), grace_s=7.0)
        self.desk = Desk(replica=f"r{index}" if index else "r")
        folder = config.gateway.sidecar.socket_dir
        addresses = [f"unix:{folder}/worker-{each}.sock" for each in range(config.gateway.sidecar.workers)]
        self.handing_on = HandingOn(self.copies, self.desk.replica, _always(addresses), SystemClock())
        self._address = addresses[index]
        limits = Limits(body_mode=config.gateway.body_mode)
        self._processor = Processor(wrap(self.desk, self.copies, config), limits, self.copies)
        self.health = Health()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen, ready from the start."""

        async def ended(_told: Mapping[str, str]) -> str:
            return self.desk.replica

        others = inner.handler(bytes, None, ended, self.handing_on.taken)  # type: ignore[arg-type]
        server = make_server([self._processor.handler(), self.health.handler(), others], max_body_bytes=64 * MIB)
        bind(server, self._address)
        await server.start()
        self._server = server
        self.health.set_ready(True)

    async def stop(self) -> None:
        """Close everything."""
        if self._server is not None:
            await stop(self._server, self.health, drain_s=0.1)
        await self.handing_on.close()


def _always(addresses: Sequence[str]) -> Callable[[], Awaitable[Sequence[str]]]:
    async def resolve() -> Sequence[str]:
        return addresses

    return resolve


@contextlib.asynccontextmanager
async def running_stand(
    mode: ShadowMode, body_mode: BodyMode = "buffered", most: int = 8, workers: int = 1, wrap: Wrap = _as_it_is
) -> AsyncIterator[Stand]:
    """Run it all.

    Args:
        mode: mode of the shadow.
        body_mode: how Envoy sends bodies to the workers.
        most: `shadow.max_concurrent`.
        workers: how many.
        wrap: makes what decides of a worker's desk.
    """
    folder = tempfile.mkdtemp(prefix="wp-")
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        old, new = Engine(), Engine()
        for engine in (old, new):
            await engine.start()
            cleanup.push_async_callback(engine.stop)
        pools = {"old": old.address, "new": new.address}
        config = config_of(folder, pools, mode, body_mode, most, workers)
        keeper = Members(pools)
        await keeper.start(f"{folder}/keeper.sock")
        cleanup.push_async_callback(keeper.stop)
        staff = [Worker(index, config, wrap) for index in range(workers)]
        for worker in staff:
            await worker.start()
            cleanup.push_async_callback(worker.stop)
        envoy = await cleanup.enter_async_context(running_envoy(config))
        http = await cleanup.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        stand = Stand(envoy, http, staff, old, new, config)

        async def serves() -> bool:
            before = [worker.desk.decided for worker in staff]
            status, _, _ = await stand.ask("n=1")
            return status == 200 and [worker.desk.decided for worker in staff] != before

        await until_async(serves)
        for engine in (old, new):
            engine.got.clear()
        for worker in staff:
            worker.desk.asked.clear()
        yield stand

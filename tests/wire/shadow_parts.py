"""A real Envoy between a client and the engines of two versions, with one real worker's ext_proc service behind it."""

import asyncio
import contextlib
import io
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web
from envoy.config.endpoint.v3 import endpoint_pb2

from extproc.clock import SystemClock
from extproc.config import Config, Gateway, Model, Pool, Shadow, Sidecar, Timeouts, Version
from extproc.config_gateway import BodyMode
from extproc.config_rollouts import ShadowMode
from extproc.envoy.contract import Call, Copy, Decision
from extproc.envoy.copies import Copies
from extproc.envoy.health import Health
from extproc.envoy.processor import Limits, Processor
from extproc.envoy.server import bind, make_server, stop
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
    """

    def __init__(self) -> None:
        self.address = ""
        self.got: list[Got] = []
        self.wait_s = 0.0
        self.deaf = False
        self.cut = False
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
        for index in range(int(asked.get("n", 3))):
            await answer.write(piece(index, int(asked.get("size", 100))))
            await asyncio.sleep(float(asked.get("gap", 0.0)))
            if self.cut and request.transport is not None:
                request.transport.abort()
        return answer


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
        decided: how many were.
    """

    headers: dict[str, str] = field(default_factory=dict)
    decided: int = 0
    asked: list[Call] = field(default_factory=list)

    async def decide(self, call: Call) -> Decision:
        """See `Decider.decide`."""
        self.decided += 1
        self.asked.append(call)
        return Decision(pool="old", charge_id=f"r-{self.decided}", headers=dict(self.headers))

    async def served(self, decision: Decision, served: str) -> None:
        """See `Decider.served`."""

    async def settle(self, decision: Decision, served: str = "") -> None:
        """See `Decider.settle`."""


@dataclass
class Stand:
    """Everything that runs."""

    envoy: RunningEnvoy
    http: aiohttp.ClientSession
    desk: Desk
    copies: Copies
    old: Engine
    new: Engine
    config: Config

    async def ask(
        self, query: str = "", *, body: bytes = b'{"model":"m"}', headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        """Send one request, and read its answer to the end."""
        async with self.http.post(f"{self.envoy.url}{PATH}?{query}", data=io.BytesIO(body), headers=headers) as answer:
            return answer.status, await answer.read(), {name.lower(): value for name, value in answer.headers.items()}


def config_of(folder: str, pools: Mapping[str, str], mode: ShadowMode, body_mode: BodyMode, most: int) -> Config:
    """A model with two versions, of which the second is the shadow."""
    return Config(
        models={
            "m": Model(
                versions={"old": Version(pool="old", weight=1.0), "new": Version(pool="new")},
                shadow=Shadow(version="new", mode=mode, max_concurrent=most),
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
            sidecar=Sidecar(socket_dir=folder, workers=1),
        ),
    )


@contextlib.asynccontextmanager
async def running_stand(mode: ShadowMode, body_mode: BodyMode = "buffered", most: int = 8) -> AsyncIterator[Stand]:
    """Run it all.

    Args:
        mode: mode of the shadow.
        body_mode: how Envoy sends bodies to the worker.
        most: `shadow.max_concurrent`.
    """
    folder = tempfile.mkdtemp(prefix="wp-")
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        old, new = Engine(), Engine()
        for engine in (old, new):
            await engine.start()
            cleanup.push_async_callback(engine.stop)
        pools = {"old": old.address, "new": new.address}
        config = config_of(folder, pools, mode, body_mode, most)
        keeper = Members(pools)
        await keeper.start(f"{folder}/keeper.sock")
        cleanup.push_async_callback(keeper.stop)
        desk, copies = Desk(), Copies(SystemClock(), grace_s=7.0)
        processor = Processor(desk, Limits(body_mode=body_mode), copies)
        health = Health()
        server = make_server([processor.handler(), health.handler()], max_body_bytes=64 * MIB)
        bind(server, f"unix:{Path(folder) / 'worker-0.sock'}")
        await server.start()
        health.set_ready(True)
        cleanup.push_async_callback(stop, server, health, drain_s=0.1)
        envoy = await cleanup.enter_async_context(running_envoy(config))
        http = await cleanup.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        stand = Stand(envoy, http, desk, copies, old, new, config)

        async def serves() -> bool:
            before = desk.decided
            status, _, _ = await stand.ask("n=1")
            return status == 200 and desk.decided > before

        await until_async(serves)
        old.got.clear()
        desk.asked.clear()
        yield stand

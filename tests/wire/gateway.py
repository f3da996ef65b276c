"""A real Envoy with one real worker's services behind it, for tests of what the gateway lets in and what it answers."""

import asyncio
import contextlib
import io
import json
import re
import shutil
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from extproc.config import Config, Gateway, Model, Pool, RateLimits, Sidecar, Timeouts, split_address
from extproc.envoy.authorize import Authorizer
from extproc.envoy.contract import Call, Decision
from extproc.envoy.health import Health
from extproc.envoy.processor import Limits, Processor
from extproc.envoy.server import bind, make_server, stop
from extproc.key_file import KeyFile
from extproc.model_list import ModelList
from tests.ports import free_port
from tests.waiting import until_async
from tests.wire.envoy import RunningEnvoy, running_envoy
from tests.wire.standins import Engine, Keeper

MIB = 1 << 20
CHAT = "/v1/chat/completions"


@dataclass
class Answer:
    """An HTTP answer, read to its end; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """The body as JSON."""
        value: dict[str, Any] = json.loads(self.body)
        return value

    @property
    def reason(self) -> str:
        """Why it was refused; empty when it was not."""
        return self.headers.get("x-warmpath-reason", "")

    def is_refusal(self, status: int, reason: str) -> bool:
        """Whether it is an error in OpenAI's shape with this status and reason."""
        shape = {"message", "type", "param", "code"}
        return (
            (self.status, self.reason) == (status, reason)
            and self.headers["content-type"] == "application/json"
            and set(self.json["error"]) == shape
            and self.json["error"]["code"] == status
        )


class Desk:
    """Decides for the one pool, and remembers what it was asked.

    Attributes:
        calls: what it was asked.
        outcome: what it raises in place of a decision.
        silent_s: how long it takes.
        metadata: metadata of its decisions.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.outcome: Exception | None = None
        self.silent_s = 0.0
        self.metadata: dict[str, str | float] = {}

    async def decide(self, call: Call) -> Decision:
        """See `Decider.decide`."""
        self.calls.append(call)
        await asyncio.sleep(self.silent_s)
        if self.outcome is not None:
            raise self.outcome
        return Decision(pool="main", metadata=self.metadata)

    async def served(self, decision: Decision, served: str) -> None:
        """See `Decider.served`."""

    async def settle(self, decision: Decision, served: str = "") -> None:
        """See `Decider.settle`."""


class Outcomes:
    """Counts of the authorizer."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def asked(self, outcome: str) -> None:
        """See `authorize.Recorder`."""
        self.seen.append(outcome)


@dataclass
class Running:
    """A gateway with everything around it."""

    envoy: RunningEnvoy
    http: aiohttp.ClientSession
    config: Config
    desk: Desk
    engines: list[Engine]
    outcomes: Outcomes
    keys: KeyFile
    sidecar: "Worker"
    trust: ssl.SSLContext | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that clients use."""
        return split_address(self.config.gateway.listen)

    async def ask(
        self,
        method: str = "POST",
        path: str = CHAT,
        *,
        body: bytes | None = b"{}",
        headers: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    ) -> Answer:
        """Send one request."""
        url = f"{self.envoy.url}{path}"
        data = None if method in {"GET", "HEAD"} or body is None else io.BytesIO(body)
        async with self.http.request(method, url, data=data, headers=headers, ssl=self.trust or True) as answer:
            told = {name.lower(): value for name, value in answer.headers.items()}
            return Answer(answer.status, told, await answer.read())

    async def raw(self, sent: bytes, *, half_close: bool = False, limit_s: float = 20.0) -> bytes:
        """Send bytes on a connection of their own.

        Returns:
            One whole answer; less when the connection was closed before, or `limit_s` had passed.
        """
        reader, writer = await asyncio.open_connection(*self.address)
        got = bytearray()
        try:
            writer.write(sent)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            if half_close:
                writer.write_eof()
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(limit_s):
                    while not _is_whole(got) and (piece := await reader.read(65_536)):
                        got += piece
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        return bytes(got)

    async def stat(self, name: str) -> int:
        """One of Envoy's own counters or gauges; 0 when it is not there yet."""
        page = await self.envoy.get(f"/stats?filter=^{name.replace('.', '[.]')}$")
        found = re.search(rf"^{re.escape(name)}: (\d+)", page, re.MULTILINE)
        return int(found[1]) if found else 0

    async def reaches_sidecar(self) -> bool:
        """Whether a request sent now gets as far as the worker, whatever that does with it.

        Envoy's gauges of healthy hosts are up to a second ahead of its choice of hosts.
        """
        before = await self.stat("cluster.warmpath_workers.upstream_rq_total")
        await self.ask()
        return await self.stat("cluster.warmpath_workers.upstream_rq_total") > before

    async def memory(self) -> int:
        """Bytes that Envoy has allocated."""
        return int(json.loads(await self.envoy.get("/memory"))["allocated"])


def _is_whole(answer: bytes | bytearray) -> bool:
    head, found, body = bytes(answer).partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    return bool(found and length) and length is not None and len(body) >= int(length[1])


class Worker:
    """The services of one worker, which can be stopped and started again."""

    def __init__(self, socket: Path, desk: Desk, config: Config, authorizer: Authorizer) -> None:
        gateway = config.gateway
        limits = Limits(
            body_mode=gateway.body_mode,
            fail_open=gateway.fail_open,
            routes=tuple(gateway.routes),
        )
        self._parts = (Processor(ModelList(desk, lambda: config), limits), authorizer)
        self._address = f"unix:{socket}"
        self._cleanup = contextlib.AsyncExitStack()

    async def start(self, *, deaf: bool = False) -> None:
        """Listen, ready from the start; one that is `deaf` knows none of the services but health."""
        health = Health()
        parts = (health,) if deaf else (*self._parts, health)
        server = make_server([part.handler() for part in parts], max_body_bytes=64 * MIB)
        bind(server, self._address)
        await server.start()
        health.set_ready(True)
        self._cleanup.push_async_callback(stop, server, health, drain_s=0.1)

    async def stop(self) -> None:
        """Close every stream and stop listening."""
        await self._cleanup.aclose()


@contextlib.asynccontextmanager
async def running_gateway(
    gateway: Gateway | None = None,
    *,
    timeouts: Timeouts | None = None,
    models: Mapping[str, Model] | None = None,
    rate_limits: RateLimits | None = None,
    trust: ssl.SSLContext | None = None,
) -> AsyncIterator[Running]:
    """An Envoy between a client and two engines.

    Args:
        gateway: its section; addresses and sockets are filled in.
        timeouts: as configured.
        models: as configured.
        rate_limits: as configured.
        trust: how its client speaks TLS.
    """
    folder = Path(tempfile.mkdtemp(prefix="wp-"))
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        engines = [Engine() for _ in range(2)]
        for engine in engines:
            await engine.start()
            cleanup.push_async_callback(engine.stop)
        addresses = [engine.address for engine in engines]
        config = Config(
            models=dict(models or {"m": Model(pool="main")}),
            pools={"main": Pool(endpoints=addresses)},
            timeouts=timeouts or Timeouts(),
            rate_limits=rate_limits or RateLimits(),
            gateway=msgspec.structs.replace(
                gateway or Gateway(message_timeout_ms=20_000),  # a busy machine is no fault
                listen=f"127.0.0.1:{free_port()}",
                admin=f"127.0.0.1:{free_port()}",
                sidecar=Sidecar(socket_dir=str(folder), workers=1),
            ),
        )
        keeper = Keeper(addresses)
        await keeper.start(f"{folder}/keeper.sock")
        cleanup.push_async_callback(keeper.stop)
        path = config.gateway.auth.keys
        keys, outcomes, desk = KeyFile(Path(path) if path else None), Outcomes(), Desk()
        await keys.look()
        worker = Worker(folder / "worker-0.sock", desk, config, Authorizer(keys.clients, outcomes))
        await worker.start()
        cleanup.push_async_callback(worker.stop)
        envoy = await cleanup.enter_async_context(running_envoy(config))
        http = await cleanup.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        running = Running(envoy, http, config, desk, engines, outcomes, keys, worker, trust)
        await until_async(running.reaches_sidecar)
        desk.calls.clear()
        outcomes.seen.clear()
        yield running

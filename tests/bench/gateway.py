"""Real Envoys side by side, all before the same engines: with Warmpath's worker, with an echo server, with neither."""

import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from extproc import reload
from extproc.envoy.render import render, to_yaml
from extproc.envoy.validate import envoy_binary
from extproc.processes import Child
from tests.bench.machine import cpu_s
from tests.bench.processes import child, listening, write_config
from tests.ports import free_port
from tests.valkey import Valkey
from tests.waiting import until_async

ENGINES = 16
_OURS = ("envoy.filters.http.ext_proc", "envoy.filters.http.ai_protocol_manager")


@dataclass(frozen=True)
class Gateway:
    """One Envoy and what stands behind it.

    Attributes:
        name: `warmpath`, `echo` or `plain`; `warmpath 4` for one with four workers.
        url: of its listener.
        envoy: its process.
        sidecars: the ext_proc processes; none for a plain Envoy.
    """

    name: str
    url: str
    envoy: Child
    sidecars: Sequence[Child]

    @property
    def sidecar_cpu_s(self) -> float:
        """CPU seconds that the ext_proc processes took so far."""
        return sum(cpu_s(each.pid) for each in self.sidecars)


@contextlib.asynccontextmanager
async def gateways(names: Sequence[str]) -> AsyncIterator[list[Gateway]]:
    """Start engines and a gateway of each name; all answer when the block starts."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-")))
        socket = folder / "valkey"
        stack.enter_context(Valkey(0, "--unixsocket", str(socket)))
        _, engines = await stack.enter_async_context(listening("engine", "--ports", str(ENGINES)))
        started = []
        for name in names:
            at = folder / name
            at.mkdir()
            started.append(await stack.enter_async_context(_gateway(name, at, engines, f"unix://{socket}")))
        yield started


@contextlib.asynccontextmanager
async def _gateway(name: str, folder: Path, engines: Sequence[str], redis_url: str) -> AsyncIterator[Gateway]:
    kind, _, workers = name.partition(" ")
    gateway = {
        "listen": f"127.0.0.1:{free_port()}",
        "admin": f"127.0.0.1:{free_port()}",
        "sidecar": {
            "socket_dir": str(folder),
            "admin": f"127.0.0.1:{free_port()}",
            "workers": int(workers or 1),
        },
    }
    path = write_config(folder / "warmpath.yaml", engines, gateway, redis={"url": redis_url})
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(listening("roster", "--socket", str(folder / "keeper.sock"), *engines))
        sidecars = []
        if kind == "warmpath":
            for at in range(int(workers or 1)):
                argv = [sys.executable, "-m", "extproc", "worker", "--config", str(path), "--index", str(at)]
                ready = folder / f"worker-{at}.sock"
                sidecars.append(await stack.enter_async_context(child(f"worker {at}", argv, ready.is_socket)))
        elif kind == "echo":
            argument = str(folder / "worker-0.sock")
            echo, _ = await stack.enter_async_context(listening("echo", "--socket", argument))
            sidecars.append(echo)
        rendered = render(reload.read(path, []))
        if kind == "plain":
            _strip(rendered)
        envoy_yaml = folder / "envoy.yaml"
        envoy_yaml.write_text(to_yaml(rendered), encoding="utf-8")
        argv = [str(envoy_binary()), "-c", str(envoy_yaml), "--concurrency", "1", "--disable-hot-restart"]
        argv += ["--log-level", "error"]
        envoy = await stack.enter_async_context(child(f"envoy of {name}", argv))
        found = Gateway(name, f"http://{gateway['listen']}", envoy, sidecars)
        await _answers(found)
        yield found


def _strip(rendered: dict[str, Any]) -> None:
    """Take out what only Warmpath needs: ext_proc, token usage, and the access log to the sidecar."""
    listener = rendered["static_resources"]["listeners"][0]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [one for one in manager["http_filters"] if one["name"] not in _OURS]
    del manager["access_log"]


async def _answers(gateway: Gateway) -> None:
    async with aiohttp.ClientSession() as session:

        async def ready() -> bool:
            for process in (gateway.envoy, *gateway.sidecars):
                if not process.running:
                    raise RuntimeError(f"{process.name} ended with {process.code}")
            try:
                async with session.get(f"{gateway.url}/v1/models") as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        await until_async(ready)

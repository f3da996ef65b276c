"""The fleet under chaos: four engines, a store with Sentinels, two hosts with two workers, a keeper and an Envoy each.

The hosts are 127.0.0.1 and 127.0.0.2; both Envoys know all four workers. Everything listens on loopback, writes into
one folder, and is ended by its process id.
"""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from extproc.config import Config
from extproc.config_file import load
from extproc.envoy.render import render, to_yaml
from extproc.envoy.validate import envoy_binary
from extproc.processes import Child
from tests.chaos.run.storage import Storage
from tests.ports import free_port, free_ports
from tests.waiting import until_async

MODEL = "sim"
POOL = "main"
NUMBER = "x-request-number"
"""Request header by which a line of Envoy's log finds its request."""
ENGINES = 4
HOSTS = ("127.0.0.1", "127.0.0.2")
WORKERS = 2
"""Workers on each host."""
MISLED = 1
"""Number of the host whose clock jumps."""
_GRACE_S = 8.0
_UNPACK = Path(__file__).parents[3] / "scripts" / "debian.sh"
_LOG = {
    "number": f"%REQ({NUMBER})%",
    "served": "%UPSTREAM_REMOTE_ADDRESS%",
    "picked": "%REQ(X-GATEWAY-DESTINATION-ENDPOINT)%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "flags": "%RESPONSE_FLAGS%",
    "details": "%RESPONSE_CODE_DETAILS%",
}


class Fleet:
    """All processes. Start it with `start`, and end it with `stop` whatever happened.

    Attributes:
        folder: configurations, and what each process printed, as `<name>.log`.
        storage: the store.
        engines: processes by `ip:port`.
        sidecars: `warmpath serve` by host.
        envoys: processes by base URL.
        clock: file that says by how many seconds the clock of host `MISLED` is off; None when it cannot be misled.
    """

    def __init__(self, folder: Path, faketime: Path | None, *, alone: bool) -> None:
        """`alone` makes the store a single server; `faketime` is the library that misleads a clock."""
        self.folder = folder
        self.storage = Storage(folder, self._write, alone=alone)
        self.engines = {f"127.0.0.1:{port}": self._engine(at, port) for at, port in enumerate(free_ports(ENGINES))}
        self.clock = None if faketime is None else folder / "clock"
        ports = _Ports()
        self.configs = [self._configuration(host, ports) for host in HOSTS]
        self.sidecars = [self._sidecar(number, faketime) for number in range(len(HOSTS))]
        self.envoys = {f"http://{config.gateway.listen}": self._envoy(at) for at, config in enumerate(self.configs)}

    @property
    def config(self) -> Config:
        """Configuration of the first host."""
        return self.configs[0]

    async def start(self) -> None:
        """Start everything and wait until both Envoys know all engines and the workers are healthy to them."""
        self.mislead(0)
        await self.storage.start()
        for engine in self.engines.values():
            await engine.start()
        for sidecar in self.sidecars:
            await sidecar.start()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as http:
            for config in self.configs:
                await until_async(lambda at=config: _ready(http, at))  # type: ignore[misc]
            for at, config in enumerate(self.configs):
                await asyncio.to_thread(
                    _render, config, self._file(at, "envoy.yaml"), self.folder / f"access-{at}.json"
                )
            for envoy in self.envoys.values():
                await envoy.start()
            for config in self.configs:
                await until_async(lambda at=config: self._whole(http, at))  # type: ignore[misc]

    async def stop(self) -> None:
        """End everything, the last started first; what stands still is woken before."""
        groups: list[Sequence[Child]] = [
            list(self.envoys.values()),
            self.sidecars,
            list(self.engines.values()),
            list(reversed(self.storage.children)),
        ]
        for group in groups:
            for child in group:
                child.send(signal.SIGCONT)
            await asyncio.gather(*(child.stop(_GRACE_S) for child in group))

    def pid(self, host: int, what: str) -> int:
        """Process id of a child of `warmpath serve`, such as `worker --index 0`; 0 while there is none."""
        parent = self.sidecars[host].pid
        with contextlib.suppress(OSError):  # a process may end while it is read
            for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
                if f" {what} ".encode() in Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" "):
                    return int(child)
        return 0

    def mislead(self, seconds: int) -> None:
        """Let the clock of host `MISLED` be off by so much; it is noticed within a second."""
        if self.clock is not None:
            new = self.clock.with_suffix(".new")
            new.write_text(f"{seconds:+d}\n", encoding="utf-8")
            new.replace(self.clock)

    def accesses(self) -> list[Mapping[str, Any]]:
        """What the Envoys logged of the requests that had a number. Complete once they have ended."""
        lines = (line for at in range(len(HOSTS)) for line in (self.folder / f"access-{at}.json").open("rb"))
        return [entry for entry in map(json.loads, lines) if entry["number"]]

    async def _whole(self, http: aiohttp.ClientSession, config: Config) -> bool:
        """Whether an Envoy knows every engine and finds every worker well."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with http.get(f"http://{config.gateway.admin}/clusters") as answer:
                lines = (await answer.text()).splitlines()
            well = [line for line in lines if "::health_flags::healthy" in line]
            engines = all(any(f"::{at}::" in line for line in well) for at in self.engines)
            return engines and sum(line.startswith("warmpath_workers::") for line in well) == len(HOSTS) * WORKERS
        return False

    def _engine(self, number: int, port: int) -> Child:
        arguments = ["sim", "--port", str(port), "--exit-with-parent", "--model", MODEL]
        return Child(f"engine-{number}", [sys.executable, "-m", "extproc", *arguments], self._write)

    def _configuration(self, host: str, ports: "_Ports") -> Config:
        document = {
            "models": {MODEL: {"pool": POOL}},
            "pools": {POOL: {"endpoints": list(self.engines), "prefill_tokens_per_s": 20_000}},
            "redis": {"url": self.storage.url},
            "gateway": {
                "listen": f"127.0.0.1:{free_port()}",
                "admin": f"127.0.0.1:{free_port()}",
                "sidecar": {
                    "hosts": list(HOSTS),
                    "bind": host,
                    "workers": WORKERS,
                    "worker_port": ports.worker,
                    "keeper_port": ports.keeper,
                    "admin": f"{host}:{ports.admin}",
                    "drain_s": 2,
                },
            },
        }
        path = self._file(HOSTS.index(host), "warmpath.yaml")
        path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        return load(path)

    def _sidecar(self, number: int, faketime: Path | None) -> Child:
        command = [sys.executable, "-m", "extproc", "serve", "--config", str(self._file(number, "warmpath.yaml"))]
        misled = _misled(faketime, self.clock) if number == MISLED and faketime and self.clock else None
        return Child(f"sidecar-{number}", command, self._write, misled)

    def _envoy(self, number: int) -> Child:
        flags = ["--concurrency", "1", "--disable-hot-restart", "--file-flush-interval-msec", "500"]
        levels = ["--log-level", "warning", "--component-log-level", "misc:error"]
        command = [str(envoy_binary()), "-c", str(self._file(number, "envoy.yaml")), *flags, *levels]
        return Child(f"envoy-{number}", command, self._write)

    def _file(self, host: int, name: str) -> Path:
        return self.folder / f"{host}-{name}"

    def _write(self, name: str, line: str) -> None:
        with (self.folder / f"{name}.log").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


class _Ports:
    """Ports that are the same on every host."""

    def __init__(self) -> None:
        self.worker, *_ = free_ports(WORKERS)
        self.keeper = free_port()
        self.admin = free_port()


def _render(config: Config, path: Path, log: Path) -> None:
    """Write an Envoy configuration as `warmpath envoy` renders it, and a log of our own beside the product's."""
    rendered = render(config)
    manager = rendered["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["access_log"].append(
        {
            "name": "envoy.access_loggers.file",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
                "path": str(log),
                "log_format": {"json_format": _LOG},
            },
        }
    )
    path.write_text(to_yaml(rendered), encoding="utf-8")


def _misled(library: Path, clock: Path) -> dict[str, str]:
    """Environment of processes whose wall clock, and no other, is off by what a file says (libfaketime)."""
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "DONT_FAKE_MONOTONIC": "1",
        # Shared memory guarded by a semaphore would freeze all processes once one is killed inside.
        "FAKETIME_DISABLE_SHM": "1",
    }


async def _ready(http: aiohttp.ClientSession, config: Config) -> bool:
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with http.get(f"http://{config.gateway.sidecar.admin}/readyz") as answer:
            components = (await answer.json())["components"]
            return set(components.values()) == {"ok"}
    return False


def faketime(cache: Path) -> Path | None:
    """Debian's libfaketime, unpacked into a folder and not installed; None where it cannot be had."""

    def found() -> Path | None:
        return next((each.resolve() for each in cache.rglob("libfaketimeMT.so.1")), None)

    if (library := found()) is None:
        # What it says of a failure is of no use here: the run goes on without, and says so.
        subprocess.run([_UNPACK, str(cache), "libfaketime"], check=False, capture_output=True)
        library = found()
    return library

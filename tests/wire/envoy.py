"""A real Envoy for tests, started from a rendered configuration and always stopped."""

import asyncio
import contextlib
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from extproc.config import Config
from extproc.envoy.render import render, to_yaml, write
from extproc.envoy.validate import envoy_binary

_READY_S = 30.0
_STOP_S = 5.0


@dataclass(frozen=True)
class RunningEnvoy:
    """A started Envoy.

    Attributes:
        url: of the public listener, without a slash at the end.
        admin: of Envoy's admin page.
        pid: process id.
        log_file: what Envoy wrote.
    """

    url: str
    admin: str
    pid: int
    log_file: Path

    @property
    def log(self) -> str:
        """What Envoy has written so far."""
        return self.log_file.read_text(errors="replace")

    async def get(self, page: str) -> str:
        """Read an admin page such as `/clusters` or `/stats?filter=ext_proc`."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.admin}{page}") as answer:
            return await answer.text()


@contextlib.asynccontextmanager
async def running_envoy(
    config: Config,
    *,
    concurrency: int = 1,
    log_level: str = "warning",
    ready_s: float = _READY_S,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> AsyncIterator[RunningEnvoy]:
    """Run Envoy on the addresses of `config.gateway`, from the first ready answer until the block ends.

    Whoever serves endpoints (EDS) should be up before; without it Envoy gets ready five seconds later. `change` puts
    into the rendered configuration what a gateway of somebody else has besides.

    Raises:
        ConfigError: there is no Envoy binary.
        RuntimeError: Envoy ended or was not ready in time; the text holds the end of its log.
    """
    binary = envoy_binary()
    folder = Path(tempfile.mkdtemp(prefix="envoy-"))
    write(config, folder / "envoy.yaml")
    if change is not None:
        rendered = render(config, folder=folder)
        change(rendered)
        (folder / "envoy.yaml").write_text(to_yaml(rendered), encoding="utf-8")
    log_file = folder / "envoy.log"
    with log_file.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            str(binary),
            *("-c", str(folder / "envoy.yaml"), "--concurrency", str(concurrency), "--disable-hot-restart"),
            *("--log-level", log_level, "--drain-time-s", "1"),
            stdout=log,
            stderr=log,
        )
    envoy = RunningEnvoy(
        url=f"{'https' if config.gateway.tls.certificate else 'http'}://{config.gateway.listen}",
        admin=f"http://{config.gateway.admin}",
        pid=process.pid,
        log_file=log_file,
    )
    try:
        await _ready(envoy, process, ready_s)
        yield envoy
    finally:
        await _stop(process)
        shutil.rmtree(folder, ignore_errors=True)


async def _ready(envoy: RunningEnvoy, process: asyncio.subprocess.Process, limit_s: float) -> None:
    deadline = asyncio.get_running_loop().time() + limit_s
    async with aiohttp.ClientSession() as http:
        while asyncio.get_running_loop().time() < deadline:
            if process.returncode is not None:
                raise RuntimeError(f"Envoy ended with {process.returncode}:\n{envoy.log[-3000:]}")
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with http.get(f"{envoy.admin}/ready") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.05)
    raise RuntimeError(f"Envoy was not ready after {limit_s} s:\n{envoy.log[-3000:]}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), _STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()

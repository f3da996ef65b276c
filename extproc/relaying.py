"""The relay's process: composes a relay by the configuration, and serves until told to stop."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

from extproc import __version__, addresses, reload
from extproc.config import Config, split_address
from extproc.config_relay import HEALTH
from extproc.errors import ConfigError, WorkerError
from extproc.fitting import own_name
from extproc.govern import stages
from extproc.processes import until_stopped
from extproc.relay.asked import Asked
from extproc.relay.gateway import Gateway
from extproc.relay.limits import Limits
from extproc.relay.server import METRICS, Server
from extproc.telemetry import logs
from extproc.telemetry.relay_metrics import RelayMetrics

NAME = "relay"
"""Name of the process, in logs and metrics."""
_ASK_S = 1.0
_SHUTDOWN_S = 1.0

log = logging.getLogger(__name__)


async def run(config: Config, path: Path, settings: Sequence[str]) -> int:
    """Relay until SIGINT or SIGTERM; returns the exit code.

    Raises:
        ConfigError: the address cannot be opened.
    """
    logs.setup(config.telemetry.log_level, NAME)
    async with serving(config) as server:

        async def apply(changed: Config) -> None:
            logs.setup(changed.telemetry.log_level, NAME)
            server.take(limits_of(changed), telling(changed))

        watcher = reload.Watcher(path, settings, config, apply)
        background = [asyncio.create_task(watcher.run())]
        log.info("relay is ready", extra={"address": addresses.relay(config)})
        code = await until_stopped(background)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await server.drain(config.gateway.sidecar.drain_s)
    return code


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[Server]:
    """A relay that takes requests until the block ends. Raises ConfigError when its address cannot be opened."""
    gateway = Gateway(addresses.inner_listener(config), config.relay.stall_s)
    server = Server(
        gateway,
        limits_of(config),
        RelayMetrics(__version__),
        max_open=config.relay.max_open,
        telling=telling(config),
    )
    # A handler is cancelled when its client leaves: the engine stops generating then, not at the next write.
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    address = addresses.relay(config)
    try:
        await _listen(runner, address)
        yield server
    finally:
        await runner.cleanup()
        await gateway.close()
        if address.startswith("unix:"):
            await asyncio.to_thread(Path(address.removeprefix("unix:")).unlink, missing_ok=True)


async def _listen(runner: web.AppRunner, address: str) -> None:
    path = address.removeprefix("unix:")
    site: web.BaseSite
    if path == address:
        host, port = split_address(address)
        site = web.TCPSite(runner, host, port)
    else:
        site = web.UnixSite(runner, path)
    try:
        await site.start()
    except OSError as error:
        raise ConfigError(f"the relay cannot listen on {address}: {error.strerror}; see relay.port") from error


def limits_of(config: Config) -> Limits:
    """What the relay does and holds."""
    relay = config.relay
    silent = (
        name
        for own, model in config.models.items()
        for name in (own, *model.aliases)
        if any(config.pools[each.pool].engine == "tensorrt_llm" for each in model.by_version.values())
    )

    def request_s(asked: Asked) -> float:
        shape = stages.Shape(own_name(config, asked.model), asked.api, asked.stream, -1.0)
        return stages.limits_of(config.timeouts, shape).request_s

    return Limits(
        on_death=relay.on_death,
        max_attempts=relay.max_attempts,
        max_body=relay.max_body,
        silent=frozenset(silent),
        request_s=request_s,
    )


def telling(config: Config) -> frozenset[str]:
    """Models whose streams report usage although the client did not ask."""
    return frozenset(
        name
        for own, model in config.models.items()
        for name in (own, *model.aliases)
        if all(config.pools[each.pool].ask_usage for each in model.by_version.values())
    )


class Remote:
    """The relay of this host, as its keeper asks it. It connects when it is first used."""

    def __init__(self, config: Config) -> None:
        self._address = addresses.relay(config)
        self._session: aiohttp.ClientSession | None = None

    async def page(self) -> bytes:
        """Its metrics page. Raises WorkerError when it does not answer within a second."""
        try:
            async with self._opened().get(self._url(METRICS)) as answer:
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise WorkerError(f"a relay's metrics cannot be read: {type(error).__name__}") from error

    async def is_ready(self) -> bool:
        """Whether it takes requests; False when it does not answer within a second."""
        try:
            async with self._opened().get(self._url(HEALTH)) as answer:
                return answer.ok
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def close(self) -> None:
        """Close its connections."""
        if self._session:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            path = self._address.removeprefix("unix:")
            connector = None if path == self._address else aiohttp.UnixConnector(path)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_ASK_S))
        return self._session

    def _url(self, page: str) -> str:
        return f"http://{'relay' if self._address.startswith('unix:') else self._address}{page}"

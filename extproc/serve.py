"""`warmpath serve`: N workers and one keeper as child processes, started again when they die, stopped together."""

import asyncio
import contextlib
import logging
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from extproc import addresses, hanging, reload
from extproc.config import Config
from extproc.config_relay import HEALTH
from extproc.envoy import gateway_files
from extproc.errors import ConfigError, StackError
from extproc.processes import Child, Restarts, stop_requested

_STOP_SLACK_S = 5.0

log = logging.getLogger(__name__)


async def serve(config: Config, path: Path, settings: Sequence[str]) -> int:
    """Run until SIGINT or SIGTERM, then drain; returns the exit code.

    Args:
        config: the configuration, already checked.
        path: its file, which every child reads again.
        settings: `--set` overrides, handed to every child.

    Raises:
        ConfigError: no child could ever start: without a store, or without the folder for its socket.
    """
    _check(config)
    with _last_good(config) as last_good:
        keep = _keeping(last_good)
        await keep(config)
        overrides = [part for setting in settings for part in ("--set", setting)]
        arguments = ["--config", str(path), "--last-good", str(last_good), *overrides]
        children = [_child("keeper", ["keeper", *arguments])]
        children += [
            _child(f"worker-{index}", ["worker", "--index", str(index), *arguments])
            for index in range(config.gateway.sidecar.workers)
        ]
        relay = _child("relay", ["relay", *arguments]) if config.relay.enabled else None
        if relay:
            children.append(relay)
        watcher = reload.Watcher(path, settings, config, keep)
        return await _until_stopped(config, children, watcher, relay)


@contextlib.contextmanager
def _last_good(config: Config) -> Iterator[Path]:
    """Where the copy of the configuration in use stands: beside the sockets, which this process alone uses."""
    if folder := config.gateway.sidecar.socket_dir:
        path = Path(folder) / "last-good.yaml"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
    else:
        with tempfile.TemporaryDirectory(prefix="warmpath-serve-") as scratch:
            yield Path(scratch) / "last-good.yaml"


def _keeping(last_good: Path) -> Callable[[Config], Awaitable[None]]:
    """Takes each changed configuration and keeps a copy of it for children that start again."""

    async def keep(changed: Config) -> None:
        try:
            reload.keep(changed, last_good)
        except OSError as error:
            # An older copy is better than none, and a full disk no reason to stop following the file.
            log.warning("the configuration in use is not kept", extra={"error": error.strerror})

    return keep


async def _until_stopped(
    config: Config, children: Sequence[Child], watcher: reload.Watcher, relay: Child | None
) -> int:
    """Keep the children alive until the signal to stop; the first of them is the keeper."""
    keeping = [asyncio.create_task(_keep_alive(child)) for child in children]
    keeping.append(asyncio.create_task(watcher.run()))
    if relay:
        address = addresses.relay(config)
        keeping.append(asyncio.create_task(hanging.watch(relay, lambda: hanging.silent_at(address, HEALTH))))
    number = await stop_requested()
    log.info("stopping", extra={"signal": number.name})
    for task in keeping:
        task.cancel()
    await asyncio.gather(*keeping, return_exceptions=True)
    grace_s = config.gateway.sidecar.drain_s + _STOP_SLACK_S
    # The keeper goes last: Envoy should learn of changes while workers drain.
    await asyncio.gather(*(child.stop(grace_s) for child in children[1:]))
    await children[0].stop(_STOP_SLACK_S)
    return 0


def _check(config: Config) -> None:
    """Refuse at once what would let every child fail again and again."""
    addresses.store(config.redis)
    if config.gateway.auth.keys:
        gateway_files.check_keys(config, "the configuration")
    folder = config.gateway.sidecar.socket_dir
    if folder and not Path(folder).is_dir():
        raise ConfigError(f"gateway.sidecar.socket_dir: no folder {folder}: make it, writable for this user")


def _child(name: str, arguments: Sequence[str]) -> Child:
    return Child(name, [sys.executable, "-m", "extproc", *arguments])


async def _keep_alive(child: Child) -> None:
    restarts = Restarts()
    while True:
        born = time.monotonic()
        try:
            await child.start()
            how = _how(await child.wait())
        except StackError as error:
            how = str(error)
        wait_s = restarts.after(time.monotonic() - born)
        log.error("a process died and is started again", extra={"child": child.name, "how": how, "wait_s": wait_s})
        await asyncio.sleep(wait_s)


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"

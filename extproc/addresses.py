"""Where the sidecar's processes listen and where their store is, by the configuration: one place for both ends."""

from pathlib import Path

from extproc.config import Config, Redis, Sidecar
from extproc.errors import ConfigError
from extproc.state import where

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 -- compared, not bound


def worker(sidecar: Sidecar, index: int) -> str:
    """GRPC address that worker `index` binds: `unix:PATH` or `host:port`."""
    if sidecar.socket_dir:
        return f"unix:{Path(sidecar.socket_dir) / f'worker-{index}.sock'}"
    return f"{_host(sidecar.bind)}:{sidecar.worker_port + index}"


def keeper(sidecar: Sidecar) -> str:
    """GRPC address that the keeper binds: `unix:PATH` or `host:port`."""
    if sidecar.socket_dir:
        return f"unix:{Path(sidecar.socket_dir) / 'keeper.sock'}"
    return f"{_host(sidecar.bind)}:{sidecar.keeper_port}"


def relay(config: Config) -> str:
    """Address that the relay binds: `unix:PATH` or `host:port` of the loopback."""
    folder = config.gateway.sidecar.socket_dir
    return f"unix:{Path(folder) / 'relay.sock'}" if folder else f"127.0.0.1:{config.relay.port}"


def inner_listener(config: Config) -> str:
    """Address at which the relay reaches Envoy: `unix:PATH` or `host:port` of the loopback."""
    folder = config.gateway.sidecar.socket_dir
    return f"unix:{Path(folder) / 'inner.sock'}" if folder else config.relay.listen


def local_worker(sidecar: Sidecar, index: int) -> str:
    """GRPC address at which a process of the same host reaches worker `index`."""
    return reachable(worker(sidecar, index))


def reachable(address: str) -> str:
    """The address at which a client on this host reaches a listener: loopback for one bound to every address."""
    host, colon, port = address.rpartition(":")
    return f"{_LOOPBACK.get(host, host)}{colon}{port}"


def store(redis: Redis) -> str:
    """URL of the shared store.

    Raises:
        ConfigError: none is configured, or it cannot be read; the text never shows it, since it may hold a password.
    """
    if not redis.url:
        raise ConfigError("redis.url is missing: give a Redis URL, or use `warmpath up`, which brings a store along")
    try:
        where.parse(redis.url)
    except ConfigError as error:
        raise ConfigError(f"redis.url {error}") from None
    return redis.url


def _host(bind: str) -> str:
    return f"[{bind}]" if ":" in bind and not bind.startswith("[") else bind

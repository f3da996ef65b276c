"""The gRPC server under the services of a process: its options, its sockets, and its end without a lost request."""

import asyncio
import logging
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

import grpc

from extproc.envoy.health import Health
from extproc.errors import ConfigError

_log = logging.getLogger(__name__)

_MESSAGE_SLACK: Final = 1024 * 1024
"""Room in a message for headers, attributes and metadata beside the body."""
_SOCKET_MODE: Final = 0o660
_KEEPALIVE_MS: Final = 30_000
_KEEPALIVE_TIMEOUT_MS: Final = 10_000
_MIN_PING_INTERVAL_MS: Final = 5_000


class LongLived(Protocol):
    """A service whose streams have no end of their own."""

    def close(self) -> None:
        """End every stream."""
        ...


class Busy(Protocol):
    """A service whose streams each belong to one request."""

    async def idle(self) -> None:
        """Return once no stream is open."""
        ...

    async def settled(self) -> None:
        """Return once every ended stream has been accounted for."""
        ...


def make_server(
    handlers: Iterable[grpc.GenericRpcHandler], *, max_body_bytes: int, max_streams: int | None = None
) -> grpc.aio.Server:
    """Build a server inside the running event loop.

    Args:
        handlers: the services.
        max_body_bytes: largest body in one message; the receive limit is 1 MiB more.
        max_streams: streams open at once; a further one gets RESOURCE_EXHAUSTED, which a gateway that fails open
            passes by. None for no limit.
    """
    options = [
        ("grpc.max_receive_message_length", max_body_bytes + _MESSAGE_SLACK),
        ("grpc.max_send_message_length", -1),
        # Each worker owns its address: two that share one would hide each other's failures from the gateway.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
    ]
    quiet_disconnects()
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=max_streams)
    server.add_generic_rpc_handlers(tuple(handlers))
    return server


def bind(server: grpc.aio.Server, address: str) -> int:
    """Open `address` on a server that has not started.

    Args:
        server: the server.
        address: `host:port` (port 0 takes a free one), or `unix:` and a path: a socket file that a dead process left
            there is replaced, and only the owner and group may connect.

    Returns:
        The TCP port, or 1 for a Unix socket.

    Raises:
        ConfigError: the address cannot be opened.
    """
    path = Path(address.removeprefix("unix:")) if address.startswith("unix:") else None
    if path is not None and path.is_socket():
        _remove_left_over(path)
    mask = os.umask(0o777 & ~_SOCKET_MODE)
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {address}: in use, or not an address of this host; see gateway.sidecar"
        ) from error
    finally:
        os.umask(mask)


def _remove_left_over(path: Path) -> None:
    """Remove a socket file nobody listens on. Raises ConfigError when somebody does."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise ConfigError(f"cannot listen on {path}: another process does; give each `serve` its own socket_dir")


async def stop(
    server: grpc.aio.Server,
    health: Health,
    busy: Iterable[Busy] = (),
    long_lived: Iterable[LongLived] = (),
    *,
    drain_s: float,
    notice_s: float = 0.0,
    linger_s: float = 0.0,
) -> None:
    """Stop without losing a request: not ready, then no new streams, wait for the open ones, cancel the rest, settle.

    Args:
        server: the server.
        health: its readiness is withdrawn before anything else.
        busy: services to wait for.
        long_lived: services to end once those are idle, or the server would wait for them until the very end.
        drain_s: how long open streams may go on.
        notice_s: how long new streams are still taken once it is not ready: as long as the gateway takes to notice.
            Those that it sends meanwhile would find nobody; a gateway that does not fail open answered them with 503
            (162 of 9,200 requests over a rolling restart of two replicas, none with the wait).
        linger_s: how long the long-lived services stay after the last request, for what the gateway still has to
            tell (access-log entries are sent in batches).
    """
    busy = tuple(busy)
    health.set_ready(False)
    await asyncio.sleep(notice_s)
    stopping = asyncio.ensure_future(server.stop(drain_s))
    try:
        async with asyncio.timeout(drain_s):
            for service in busy:
                await service.idle()
            await asyncio.sleep(linger_s)
    except TimeoutError:
        _log.warning("streams still open after %.1f s are cancelled", drain_s)
    for ending in (*long_lived, health):
        ending.close()
    await stopping
    for service in busy:
        await service.settled()


class _Disconnects(logging.Filter):
    """Lowers one record: a handler that ends after its client has gone cannot send its status.

    grpcio logs that as an error with a traceback for every such stream, while it is how most lifelines end.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, grpc.aio.InternalError)


_DISCONNECTS: Final = _Disconnects()


def quiet_disconnects() -> None:
    """Keep grpcio from logging every client that leaves first; idempotent."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_DISCONNECTS)

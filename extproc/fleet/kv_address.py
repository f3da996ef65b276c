"""Addresses of KV events: who binds, what an engine may name, and what of it we connect to.

Who binds follows vLLM's own rule (`vllm/distributed/kv_events.py`): an engine whose address has a `*` or `::` binds it,
and we connect to it, for a wildcard at the engine's host. With any other address the engine connects, and the address
is ours to bind, unless it is the engine's own host: then it is what a bound free port turned out to be. An engine that
connects reaches only the host it was pointed at: where several hosts keep, let the engines bind.

What an engine tells of itself leads to its own host alone: it must not make a keeper connect to others, or bind a port,
unless the configuration names that very address.
"""

import ipaddress
from typing import Final, NamedTuple

from extproc.config import EventSettings
from extproc.errors import EngineError
from extproc.state.endpoint import Source

_WILDCARDS: Final = frozenset({"*", "::", "0.0.0.0"})  # noqa: S104 -- compared with, not bound


class Place(NamedTuple):
    """Where a subscription is to be had.

    Attributes:
        address: as ZMQ takes it.
        bind: it is ours to bind.
    """

    address: str
    bind: bool


def place(endpoint: str, host: str) -> Place:
    """Where the events are that an engine publishes.

    Args:
        endpoint: ZMQ address as the engine has it.
        host: IP address of the engine.

    Raises:
        EngineError: the address cannot be reached from another process.
    """
    if endpoint.startswith("ipc://"):
        return Place(endpoint, False)
    at, port = split(endpoint)
    if at in _WILDCARDS:
        return Place(_join(host, port), False)
    if "::" in at or (at == host and not is_loopback(host)):
        return Place(endpoint, False)
    # A name, or an address that is not ours (a service's), stands for every address of this host.
    return Place(endpoint if _is_ip(at) else f"tcp://*:{port}", True)


def replay_place(endpoint: str, host: str) -> str:
    """Address of an engine's replay socket, which it always binds. See `place`."""
    if endpoint.startswith("ipc://"):
        return endpoint
    at, port = split(endpoint)
    return _join(host if at in _WILDCARDS else at, port)


def of_rank(address: str, rank: int) -> str:
    """The address of a data-parallel rank: its port is the first one's and the rank's number (vLLM, SGLang)."""
    if not rank or not address:
        return address
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}"


def check(source: Source, host: str, settings: EventSettings) -> None:
    """See that a source is at the engine's own host, or where the configuration says.

    Args:
        source: as the engine told it, or as it was configured.
        host: IP address of the engine.
        settings: those of its pool.

    Raises:
        EngineError: it is elsewhere, or cannot be reached at all.
    """
    if source.way == "drain":
        if not source.endpoint.startswith("/"):
            raise EngineError(f"KV events at {source.endpoint[:100]!r} are no path of the engine", "unreachable")
        return
    named = ((source.endpoint, settings.endpoint, "endpoint"), (source.replay, settings.replay, "replay"))
    for address, configured, field in named:
        if address and address != of_rank(configured, source.rank) and not _is_own(address, host):
            raise EngineError(
                f"the engine at {host} names {address[:100]!r} for its KV events, which is not its own host: let it "
                f"publish to tcp://*:<port>, or name that address in the pool's events.{field}",
                "unreachable",
            )


def _is_own(address: str, host: str) -> bool:
    """Whether an address that an engine tells is at its own host."""
    at = "" if address.startswith("ipc://") else split(address)[0]
    if at in _WILDCARDS or at == host:
        return True
    return _is_ip(at) and _is_ip(host) and ipaddress.ip_address(at) == ipaddress.ip_address(host)


def split(endpoint: str) -> tuple[str, str]:
    """Host, without brackets, and port of a `tcp://` address.

    Raises:
        EngineError: it is none.
    """
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    sound = scheme == "tcp" and host and endpoint.isascii() and endpoint.isprintable() and port.isdigit()
    if not sound or not 0 < int(port[:6]) < 65_536:
        raise EngineError(
            f"KV events at {endpoint[:100]!r} cannot be reached: let the engine publish to tcp://*:<port>",
            "unreachable",
        )
    return host, port


def _join(host: str, port: str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a host is this very one, by its number."""
    return _is_ip(host) and ipaddress.ip_address(host).is_loopback

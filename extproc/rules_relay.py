"""What the section `relay` must agree on with the rest of a configuration."""

import ipaddress
from collections.abc import Iterator

from extproc.config import RELAY_CLUSTER, Config, is_ip, split_address
from extproc.config_mistakes import Mistake

_MAX_PORT = 65535
_LOOPBACK_NAMES = ("localhost",)


def relay_agrees(config: Config) -> Iterator[Mistake]:
    """The name of its cluster is free; and where it runs, Envoy shares its host and nobody else has its ports."""
    if RELAY_CLUSTER in config.pools:
        text = f"`{RELAY_CLUSTER}` is an Envoy cluster of Warmpath's own: name the pool otherwise"
        yield Mistake(f"$.pools.{RELAY_CLUSTER}", text)
    if config.relay.enabled:
        yield from _sizes_agree(config)
        if not config.gateway.sidecar.socket_dir:
            yield from _shares_the_host(config)
            yield from _ports_are_free(config)


def _sizes_agree(config: Config) -> Iterator[Mistake]:
    """A relay that takes less than the gateway would answer 413 to what passes without it."""
    relay, gateway = config.relay.max_body, config.gateway.max_body_bytes
    if relay < gateway and config.relay.paths:
        text = f"is below gateway.max_body_bytes ({gateway}), which relay.paths would then not take: raise it"
        yield Mistake("$.relay.max_body", text)


def _shares_the_host(config: Config) -> Iterator[Mistake]:
    """Whoever reaches the inner listener is believed what tenant it is."""
    for index, host in enumerate(config.gateway.sidecar.hosts):
        if not _is_loopback(host.strip("[]")):
            text = f"{host}: a relay works where Envoy and the sidecar share a host: write 127.0.0.1, or set socket_dir"
            yield Mistake(f"$.gateway.sidecar.hosts[{index}]", text)
    host = split_address(config.relay.listen)[0]
    if not is_ip(host) or not _is_loopback(host):
        yield Mistake("$.relay.listen", f"{host}: everybody could come in without a key: write 127.0.0.1 and a port")


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback if is_ip(host) else host in _LOOPBACK_NAMES


def _ports_are_free(config: Config) -> Iterator[Mistake]:
    gateway, sidecar, relay = config.gateway, config.gateway.sidecar, config.relay
    last = sidecar.worker_port + sidecar.workers - 1
    taken = {
        split_address(gateway.listen)[1]: "gateway.listen",
        split_address(gateway.admin)[1]: "gateway.admin",
        split_address(sidecar.admin)[1]: "gateway.sidecar.admin",
        sidecar.keeper_port: "gateway.sidecar.keeper_port",
        **dict.fromkeys(range(sidecar.worker_port, last + 1), "a worker"),
    }
    listen = split_address(relay.listen)[1]
    if not 1 <= listen <= _MAX_PORT:
        yield Mistake("$.relay.listen", f"{relay.listen}: a port lies between 1 and {_MAX_PORT}")
    for key, port in (("port", relay.port), ("listen", listen)):
        if port in taken:
            yield Mistake(f"$.relay.{key}", f"port {port} is taken by {taken[port]}: choose another one")
    if listen == relay.port:
        yield Mistake("$.relay.listen", "has the port of relay.port: give it another")

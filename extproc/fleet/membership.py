"""Which endpoints each pool has, as ids and as `ip:port`: configured addresses, names resolved again and again.

Rules:
- An address with an IP literal is an endpoint whose id is its `ip:port`.
- A name with one address is an endpoint whose id stays `host:port`, whatever the address becomes.
- A name with several addresses (a headless service) is one endpoint for each, with the `ip:port` as id.
- A name with IPv4 and IPv6 addresses counts by IPv4 alone: `localhost` is one engine, not two.
- A destination that two addresses of a pool lead to is one endpoint, the one configured first.
- A name that cannot be resolved keeps what it had.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from extproc.config import Config, is_ip, split_address

Pools = Mapping[str, Mapping[str, str]]
"""Destination (`ip:port`) by endpoint id, by pool."""

RESOLVE_EVERY_S = 5.0
RESOLVE_TIMEOUT_S = 3.0

_log = logging.getLogger(__name__)


class Resolver(Protocol):
    """Looks names up."""

    async def __call__(self, host: str, /) -> Sequence[str]:
        """IP addresses of a name, in any order. Raises OSError when it has none or nobody answers."""
        ...


async def system_resolver(host: str) -> Sequence[str]:
    """`Resolver` of the operating system (hosts file, DNS)."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return sorted({str(entry[4][0]) for entry in found})


class Membership:
    """The endpoints of all pools, kept current. One event loop, no threads.

    Call `apply` once before anything else, and again with each new configuration; keep `run` going beside.

    Attributes:
        version: grows by one with each change of `current()`; 0 before the first `apply`.
    """

    def __init__(self, resolve: Resolver = system_resolver, every_s: float = RESOLVE_EVERY_S) -> None:
        """Start with no pools.

        Args:
            resolve: how names are looked up.
            every_s: pause between two look-ups of all names, in seconds.
        """
        self.version = 0
        self._resolve = resolve
        self._every_s = every_s
        self._pools: Pools = MappingProxyType({})
        self._addresses: dict[str, list[str]] = {}
        self._known: dict[str, tuple[str, ...]] = {}
        self._failing: set[str] = set()
        self._changed = asyncio.Event()
        self._refreshing = asyncio.Lock()

    def current(self) -> Pools:
        """Endpoints now: read-only, and replaced, never changed, by the next version."""
        return self._pools

    async def changed(self, since: int) -> int:
        """Wait until `version` is above `since`; returns it."""
        while self.version <= since:
            await self._changed.wait()
        return self.version

    async def apply(self, config: Config) -> None:
        """Take the pools of a configuration and look their names up; the endpoints are current on return."""
        self._addresses = {name: list(pool.endpoints) for name, pool in config.pools.items()}
        await self.refresh()

    async def refresh(self) -> None:
        """Look all names up once and publish what changed."""
        async with self._refreshing:
            hosts = {split_address(address)[0] for listed in self._addresses.values() for address in listed}
            names = sorted(host for host in hosts if not is_ip(host))
            await asyncio.gather(*(self._look_up(name) for name in names))
            for gone in self._known.keys() - names:
                del self._known[gone]
            self._failing &= set(names)
            self._publish({pool: _endpoints(listed, self._known) for pool, listed in self._addresses.items()})

    async def run(self) -> None:
        """Refresh every `every_s` seconds until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.refresh()

    async def _look_up(self, name: str) -> None:
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                found = await self._resolve(name)
        except (OSError, UnicodeError) as error:
            # UnicodeError: a label longer than DNS allows. TimeoutError is an OSError.
            if name not in self._failing:
                self._failing.add(name)
                kept = self._known.get(name, ())
                _log.warning(
                    "the name of an endpoint cannot be resolved: "
                    + ("its last addresses stay" if kept else "it is left out until it can"),
                    extra={"host": name, "addresses": list(kept), "error": str(error) or type(error).__name__},
                )
            return
        self._failing.discard(name)
        self._known[name] = _preferred(found)

    def _publish(self, pools: dict[str, dict[str, str]]) -> None:
        frozen = MappingProxyType({pool: MappingProxyType(endpoints) for pool, endpoints in pools.items()})
        if frozen == self._pools and self.version:
            return
        self._pools = frozen
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()


def _preferred(found: Iterable[str]) -> tuple[str, ...]:
    """Addresses of one name in numeric order, IPv6 only when there is no IPv4."""
    parsed = {ipaddress.ip_address(text) for text in found}
    v4 = sorted(address for address in parsed if isinstance(address, ipaddress.IPv4Address))
    v6 = sorted(address for address in parsed if isinstance(address, ipaddress.IPv6Address))
    return tuple(str(address) for address in v4 or v6)


def _destination(address: str, port: int) -> str:
    parsed = ipaddress.ip_address(address)
    return f"[{parsed}]:{port}" if parsed.version == 6 else f"{parsed}:{port}"


def _endpoints(listed: Iterable[str], known: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Destination by endpoint id of one pool, by the rules of this module."""
    owners: dict[str, str] = {}
    for address in listed:
        host, port = split_address(address)
        if is_ip(host):
            destinations = [_destination(host, port)]
        else:
            destinations = [_destination(found, port) for found in known.get(host, ())]
        single_name = len(destinations) == 1 and not is_ip(host)
        for destination in destinations:
            owners.setdefault(destination, address if single_name else destination)
    return {endpoint: destination for destination, endpoint in owners.items()}

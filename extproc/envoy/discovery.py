"""Endpoint discovery (EDS) for Envoy: the members of each pool, pushed as they change. State of the world only.

A cluster's name is its pool's. Every answer holds all pools that the stream asked for, so an Envoy that reconnects
knows everything after its first answer. Versions are a digest of the content: replicas that know the same members
say the same version, and a change that does not touch a stream's pools sends nothing.
"""

import asyncio
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, Protocol

import grpc
import msgspec
from envoy.config.core.v3 import health_check_pb2
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import discovery_pb2

from extproc.config import split_address
from extproc.envoy.changes import Changes, until

_log = logging.getLogger(__name__)

SERVICE: Final = "envoy.service.endpoint.v3.EndpointDiscoveryService"
TYPE_URL: Final = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


class MemberHealth(Enum):
    """How Envoy treats an endpoint. A draining one finishes what it has and gets nothing new."""

    HEALTHY = health_check_pb2.HEALTHY
    DRAINING = health_check_pb2.DRAINING
    UNHEALTHY = health_check_pb2.UNHEALTHY


class Member(msgspec.Struct, frozen=True, gc=False):
    """One endpoint of a pool.

    Attributes:
        address: `ip:port`; a name cannot be used, since Envoy does not resolve what EDS sends.
        health: how Envoy treats it.
    """

    address: str
    health: MemberHealth = MemberHealth.HEALTHY


class Membership(Protocol):
    """Who knows the members. `changes` moves on after every change of `current`."""

    @property
    def changes(self) -> Changes:
        """What to wait on."""
        ...

    def current(self) -> Mapping[str, Sequence[Member]]:
        """Members by pool, now."""
        ...


class Roster:
    """A membership that is replaced as a whole."""

    def __init__(self, pools: Mapping[str, Sequence[Member]] | None = None) -> None:
        self._pools = dict(pools or {})
        self._changes = Changes()

    @property
    def changes(self) -> Changes:
        """See `Membership.changes`."""
        return self._changes

    def current(self) -> Mapping[str, Sequence[Member]]:
        """See `Membership.current`."""
        return self._pools

    def replace(self, pools: Mapping[str, Sequence[Member]]) -> None:
        """Take new members; nobody is woken when they are the old ones."""
        if dict(pools) != self._pools:
            self._pools = dict(pools)
            self._changes.announce()


class DiscoveryCounts(msgspec.Struct):
    """What happened since the start.

    Attributes:
        streams: streams open now.
        sent: answers sent.
        acknowledged: answers that Envoy took.
        rejected: answers that Envoy refused.
    """

    streams: int = 0
    sent: int = 0
    acknowledged: int = 0
    rejected: int = 0


class Discovery:
    """The service.

    Attributes:
        counts: what happened so far.
    """

    def __init__(self, membership: Membership) -> None:
        self.counts = DiscoveryCounts()
        self._membership = membership
        self._closing = Changes()

    def handler(self) -> grpc.GenericRpcHandler:
        """The service for a gRPC server."""
        parse = discovery_pb2.DiscoveryRequest.FromString
        serialise = discovery_pb2.DiscoveryResponse.SerializeToString
        methods = {
            "StreamEndpoints": grpc.stream_stream_rpc_method_handler(self._stream, parse, serialise),
            "FetchEndpoints": grpc.unary_unary_rpc_method_handler(self._fetch, parse, serialise),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def close(self) -> None:
        """End every stream; Envoy keeps what it has and asks elsewhere."""
        self._closing.announce()

    async def _fetch(self, request: Any, _context: Any) -> Any:
        self.counts.sent += 1
        return response(self._membership.current(), tuple(request.resource_names), nonce="")

    async def _stream(self, _requests: Any, context: Any) -> None:
        self.counts.streams += 1
        try:
            await until(self._closing, _Subscription(self._membership, self.counts, context).run())
        finally:
            self.counts.streams -= 1


class _Subscription:
    """One stream: the names it asked for, and what was last sent."""

    def __init__(self, membership: Membership, counts: DiscoveryCounts, context: Any) -> None:
        self._membership = membership
        self._counts = counts
        self._context = context
        self._names: tuple[str, ...] | None = None
        self._version = ""
        self._sent = 0

    async def run(self) -> None:
        """Serve until Envoy ends the stream. A change arrives while the next request is awaited."""
        reading = asyncio.ensure_future(self._context.read())
        try:
            while True:
                seen = self._membership.changes.version
                await self._send_if_changed()
                changed = asyncio.ensure_future(self._membership.changes.after(seen))
                try:
                    await asyncio.wait((reading, changed), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                if reading.done():
                    request = reading.result()
                    if request is grpc.aio.EOF:
                        return
                    self._take(request)
                    reading = asyncio.ensure_future(self._context.read())
        finally:
            reading.cancel()

    def _take(self, request: Any) -> None:
        """A request subscribes, acknowledges, or refuses; one that answers an older response says nothing new."""
        if request.response_nonce and request.response_nonce != str(self._sent):
            return
        if request.HasField("error_detail"):
            self._counts.rejected += 1
            _log.error("Envoy refused endpoints %s: %s", self._version, request.error_detail.message)
        elif request.response_nonce:
            self._counts.acknowledged += 1
        names = tuple(request.resource_names)
        if names != self._names:
            self._names = names
            self._version = ""

    async def _send_if_changed(self) -> None:
        """A refused version is not sent again; the next change is."""
        if self._names is None:
            return
        answer = response(self._membership.current(), self._names, nonce=str(self._sent + 1))
        if answer.version_info != self._version:
            self._sent += 1
            self._version = answer.version_info
            self._counts.sent += 1
            await self._context.write(answer)


def response(pools: Mapping[str, Sequence[Member]], names: Sequence[str], *, nonce: str) -> Any:
    """Answer for `names`, or for every pool when there are none. A name that is no pool has no members.

    A pool without members is left out: its names are not resolved yet, and an Envoy that still knows its endpoints
    from before must not forget them.
    """
    answer = discovery_pb2.DiscoveryResponse(type_url=TYPE_URL, nonce=nonce)
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(names or pools):
        if name in pools and not pools[name]:
            continue
        packed = answer.resources.add()
        packed.type_url = TYPE_URL
        packed.value = assignment(name, pools.get(name, ())).SerializeToString(deterministic=True)
        digest.update(packed.value)
    answer.version_info = digest.hexdigest()
    return answer


def assignment(name: str, members: Iterable[Member]) -> endpoint_pb2.ClusterLoadAssignment:
    """Members of one pool as Envoy reads them, in the order given."""
    load = endpoint_pb2.ClusterLoadAssignment(cluster_name=name)
    locality = load.endpoints.add()
    for member in members:
        host, port = split_address(member.address)
        endpoint = locality.lb_endpoints.add()
        endpoint.health_status = member.health.value
        endpoint.endpoint.address.socket_address.address = host
        endpoint.endpoint.address.socket_address.port_value = port
    return load

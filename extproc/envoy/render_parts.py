"""Small pieces that the renderer's files share: names, durations, addresses, packed extensions."""

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import betterproto2
from envoy_data_plane.envoy.config.cluster.v3 import OutlierDetection
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    BackoffStrategy,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    Pipe,
    RetryPolicy,
    RetryPolicyRetryHostPredicate,
    SocketAddress,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.route.v3 import HeaderMatcher, RouteMatch
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.google.protobuf import Any

from extproc.config import split_address

if TYPE_CHECKING:
    from betterproto2 import Casing

EXT_PROC = "envoy.filters.http.ext_proc"
FLOW_WINDOW = 1 << 20
"""Flow-control window of one HTTP/2 stream: a whole long prompt without a round trip, little memory a client."""


def _as_it_is(field: str) -> str:
    return field


proto_name = cast("Casing", _as_it_is)
"""Casing that keeps a field's own name: betterproto2's snake case writes `consecutive_5xx` as `consecutive_5_xx`."""


def seconds(value: float) -> datetime.timedelta:
    """A duration as the message classes take it."""
    return datetime.timedelta(seconds=value)


def milliseconds(value: float) -> datetime.timedelta:
    """A duration as the message classes take it."""
    return datetime.timedelta(milliseconds=value)


def extension(name: str, message: betterproto2.Message) -> TypedExtensionConfig:
    """Pack a message as an extension."""
    return TypedExtensionConfig(name=name, typed_config=Any.pack(message))


def socket_address(address: str) -> Address:
    """Turn `host:port` into an address."""
    host, port = split_address(address)
    return Address(socket_address=SocketAddress(address=host, port_value=port))


def pipe_address(path: str) -> Address:
    """Turn the path of a Unix socket into an address."""
    return Address(pipe=Pipe(path=path))


def grpc_service(cluster: str, retries: RetryPolicy | None = None) -> GrpcService:
    """A gRPC service behind one of our own clusters."""
    return GrpcService(
        envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=cluster, skip_envoy_headers=True), retry_policy=retries
    )


def reconnect(tries: int, longest_ms: float = 20) -> RetryPolicy:
    """Ask the next worker when one refuses the call; it has seen nothing of it then.

    Args:
        tries: tries after the first.
        longest_ms: longest back-off. Envoy (1.40) takes it for the time limit of each try, too, once the whole request
            is sent: with 20 ms, half of 60 unary calls at one moment were answered 504. Streams have no such limit.
    """
    return RetryPolicy(
        retry_on="connect-failure,refused-stream,reset-before-request",
        num_retries=tries,
        retry_back_off=BackoffStrategy(base_interval=milliseconds(5), max_interval=milliseconds(longest_ms)),
        retry_host_predicate=[
            RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts", typed_config=Any.pack(PreviousHostsPredicate())
            )
        ],
        host_selection_retry_max_attempts=5,
    )


def ejection_at_once() -> OutlierDetection:
    """Leave a host out at its first failed connection, for a second or a little more; its answers do not matter."""
    return OutlierDetection(
        interval=seconds(1),
        base_ejection_time=seconds(1),
        max_ejection_time=seconds(5),
        max_ejection_percent=100,
        enforcing_consecutive_5xx=0,
        enforcing_success_rate=0,
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure=1,
        enforcing_consecutive_local_origin_failure=100,
        enforcing_local_origin_success_rate=0,
    )


def below(path: str, headers: list[HeaderMatcher]) -> RouteMatch:
    """What finds a path and all that lies below it, among requests with such headers; every path where it is empty."""
    if bare := path.rstrip("/"):
        return RouteMatch(path_separated_prefix=bare, headers=headers)
    return RouteMatch(prefix="/", headers=headers)


def worker_addresses(hosts: Sequence[str], workers: int, first_port: int, socket_dir: str) -> list[Address]:
    """Where Envoy reaches the workers: Unix sockets when they share its host, else host x port."""
    if socket_dir:
        return [pipe_address(f"{socket_dir}/worker-{index}.sock") for index in range(workers)]
    return [
        Address(socket_address=SocketAddress(address=host.strip("[]"), port_value=first_port + index))
        for host in hosts
        for index in range(workers)
    ]


def keeper_addresses(hosts: Sequence[str], port: int, socket_dir: str) -> list[Address]:
    """Where Envoy reaches the keepers."""
    if socket_dir:
        return [pipe_address(f"{socket_dir}/keeper.sock")]
    return [Address(socket_address=SocketAddress(address=host.strip("[]"), port_value=port)) for host in hosts]

"""The section `gateway` of `warmpath.yaml`: what Envoy listens on, who may use it, and where the sidecar runs."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from extproc.config_base import Address, NotNegative, Port, Section

BodyMode = Literal["buffered", "duplex"]


class Sidecar(Section, frozen=True, kw_only=True):
    """Where the sidecar's processes listen and where Envoy finds them.

    Attributes:
        hosts: names or addresses of the hosts that run `warmpath serve`, as Envoy reaches them.
        workers: ext_proc worker processes on each host.
        bind: address the TCP listeners bind to.
        socket_dir: folder for Unix sockets `worker-<i>.sock` and `keeper.sock`; when set, Envoy and the sidecar
            share a host, `hosts` is not used and no TCP port but the admin's is opened.
        worker_port: worker i listens on `worker_port + i`.
        keeper_port: EDS for Envoy.
        admin: `host:port` of the keeper's HTTP page (`/metrics`, `/healthz`, `/readyz`).
        drain_s: how long open streams may finish after SIGTERM.
    """

    hosts: Annotated[list[str], Meta(min_length=1)] = msgspec.field(default_factory=lambda: ["127.0.0.1"])
    workers: Annotated[int, Meta(ge=1, le=128)] = 2
    bind: str = "127.0.0.1"
    socket_dir: str = ""
    worker_port: Port = 9002
    keeper_port: Port = 9102
    admin: Address = "127.0.0.1:9103"
    drain_s: NotNegative = 30.0


class Gateway(Section, frozen=True, kw_only=True):
    """What Envoy listens on and how it meets the sidecar.

    Attributes:
        listen: address of the public listener.
        admin: address of Envoy's own admin page; keep it on loopback.
        max_body_bytes: largest request body; a larger one is answered 413.
        body_mode: `buffered` holds the body until the pick; `duplex` is what the Endpoint Picker Protocol asks. It
            fails open only while no sidecar can be reached: a request that a sidecar holds cannot go on without it.
        fail_open: when no sidecar answers, Envoy picks an endpoint by hash of the session header.
        message_timeout_ms: how long Envoy waits for each answer of the sidecar.
        concurrency: worker threads of the Envoy that `warmpath up` starts; 0 is one a core. An Envoy of your own takes
            it as `--concurrency`.
        sidecar: the other side of the ext_proc stream.
    """

    listen: Address = "127.0.0.1:8080"
    admin: Address = "127.0.0.1:9901"
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 32 * 1024 * 1024
    body_mode: BodyMode = "buffered"
    fail_open: bool = True
    message_timeout_ms: Annotated[int, Meta(ge=10, le=60_000)] = 1000
    concurrency: Annotated[int, Meta(ge=0, le=256)] = 0
    sidecar: Sidecar = Sidecar()

"""The section `gateway` of `warmpath.yaml`: what Envoy listens on, who may use it, and where the sidecar runs."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from extproc.config_base import Address, NotNegative, Port, Section

BodyMode = Literal["buffered", "duplex"]
TlsVersion = Literal["1.2", "1.3"]
JWKS_CLUSTER = "warmpath_jwks"
"""Envoy cluster of the server that shows the public keys of tokens."""
RoutePath = Annotated[str, Meta(pattern=r"^/[^?#\s]*$", max_length=1024)]
"""A path without query; what lies below it belongs to it."""
ClaimName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]+$", max_length=256)]
BodyBytes = Annotated[int, Meta(ge=1024, le=1 << 30)]


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
        admin: `host:port` of the keeper's HTTP page (`/metrics`, `/healthz`, `/readyz`, `/v1/rollouts`).
        admin_token: absolute path of the file with the token that callers of the operator API must show, over HTTP and
            gRPC; read at each call. Empty: nobody may call it but who is on the same host, and only while it listens on
            loopback.
        drain_s: how long open streams may finish after SIGTERM.
    """

    hosts: Annotated[list[str], Meta(min_length=1)] = msgspec.field(default_factory=lambda: ["127.0.0.1"])
    workers: Annotated[int, Meta(ge=1, le=128)] = 2
    bind: str = "127.0.0.1"
    socket_dir: str = ""
    worker_port: Port = 9002
    keeper_port: Port = 9102
    admin: Address = "127.0.0.1:9103"
    admin_token: str = ""
    drain_s: NotNegative = 30.0


class Tls(Section, frozen=True, kw_only=True):
    """TLS of the public listener. All files are PEM, on Envoy's host, and read again when they are replaced.

    Attributes:
        certificate: absolute path of the certificate and its chain; empty for no TLS.
        key: absolute path of its private key.
        min_version: oldest version of TLS that is spoken.
        client_ca: absolute path of the authorities of clients; when set, each client must show a certificate of theirs.
    """

    certificate: str = ""
    key: str = ""
    min_version: TlsVersion = "1.2"
    client_ca: str = ""


class Jwt(Section, frozen=True, kw_only=True):
    """Tokens that clients may show in place of a key, as `Authorization: Bearer`.

    Attributes:
        jwks: public keys of the issuer: an `http(s)://` URL, read every ten minutes, or the absolute path of a file on
            Envoy's host, read at its start; empty for no tokens.
        issuer: what the claim `iss` must say.
        audiences: the claim `aud` must name one of these.
        tenant_claim: claim that names the tenant; a dot leads into a nested one. A token without it is refused.
        ca: absolute path of the authorities trusted for an `https://` URL.
    """

    jwks: str = ""
    issuer: str = ""
    audiences: list[str] = msgspec.field(default_factory=list)
    tenant_claim: ClaimName = "sub"
    ca: str = "/etc/ssl/certs/ca-certificates.crt"


class Auth(Section, frozen=True, kw_only=True):
    """Who may use the gateway: everybody, unless `keys` or `jwt.jwks` is set.

    Attributes:
        keys: absolute path, on the sidecar's hosts, of the file with names and hashes of API keys that `warmpath key`
            writes; read again when it changes. Empty for no keys.
        jwt: tokens in place of keys.
        fail_open: let everybody in while no sidecar can check keys; otherwise they are answered 503.
        forward_key: leave the client's key in the request that the engine gets.
    """

    keys: str = ""
    jwt: Jwt = Jwt()
    fail_open: bool = False
    forward_key: bool = False


class GatewayRoute(Section, frozen=True, kw_only=True):
    """Rules for one path and what lies below it; of several that match, the longest path wins.

    Attributes:
        path: the path, such as `/v1/embeddings`.
        fail_open: this path's own `gateway.fail_open`.
        max_body_bytes: this path's own largest body.
    """

    path: RoutePath
    fail_open: bool | None = None
    max_body_bytes: BodyBytes | None = None


class Gateway(Section, frozen=True, kw_only=True):
    """What Envoy listens on and how it meets the sidecar.

    Attributes:
        listen: address of the public listener.
        admin: address of Envoy's own admin page; keep it on loopback.
        tls: certificate of the public listener.
        auth: who may use it.
        max_body_bytes: largest request body; a larger one is answered 413.
        max_headers_kb: largest headers of a request in KiB, all together; larger ones are answered 431.
        max_header_count: most headers of a request; with more it is answered 431.
        receive_s: how long a client may take to send a whole request before it is answered 408; 0 for no limit. A
            request without a body must be decided within it too.
        max_connections: connections of clients at once; a further one is closed. 0 for no limit.
        max_memory_mb: heap of Envoy in MiB. From 80 % on the largest requests that are being received over HTTP/2 are
            reset, from 90 % on whatever is sent over HTTP/1 is answered 503, from 95 % on all new requests. 0 for no
            limit.
        only_known_paths: answer 404 to paths that are neither an API that Warmpath reads nor in `routes`.
        routes: paths with rules of their own.
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
    tls: Tls = Tls()
    auth: Auth = Auth()
    max_body_bytes: BodyBytes = 32 * 1024 * 1024
    max_headers_kb: Annotated[int, Meta(ge=1, le=8192)] = 60
    max_header_count: Annotated[int, Meta(ge=10, le=10_000)] = 100
    receive_s: NotNegative = 60.0
    max_connections: Annotated[int, Meta(ge=0, le=10_000_000)] = 20_000
    max_memory_mb: Annotated[int, Meta(ge=0, le=1 << 20)] = 4096
    only_known_paths: bool = False
    routes: Annotated[list[GatewayRoute], Meta(max_length=100)] = msgspec.field(default_factory=list)
    body_mode: BodyMode = "buffered"
    fail_open: bool = True
    message_timeout_ms: Annotated[int, Meta(ge=10, le=60_000)] = 1000
    concurrency: Annotated[int, Meta(ge=0, le=256)] = 0
    sidecar: Sidecar = Sidecar()

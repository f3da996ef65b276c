"""The section `relay` of `warmpath.yaml`."""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from extproc.config_base import Address, Port, Positive, Section

OnDeath = Literal["continue", "restart_before_first", "fail"]
RelayPath = Annotated[str, Meta(pattern=r"^/[^\s?#]*\Z", max_length=256)]


ASKING: Final = "x-warmpath-relay"
"""Request header by which a client asks for the relay (`1`), or declines it (`0`)."""
AVOID: Final = "x-warmpath-avoid"
"""Request header of the relay's: endpoints that were lost on the way, `ip:port[,ip:port...]`. No client may set it."""
SERVED_BY: Final = "x-warmpath-served"
"""Response header to the relay: `ip:port` of the endpoint that answers."""
HEALTH: Final = "/healthz"
"""Where Envoy asks the relay whether new requests may come: 200, or 503 while the relay stops."""


class Relay(Section, frozen=True, kw_only=True):
    """Answers that outlive the engine that gives them: chats and completions which ask for it pass through a relay.

    Envoy and the sidecar must share a host: the relay's way back into Envoy is a listener that trusts what it is told.

    Attributes:
        enabled: run the relay, and give Envoy the listener and the routes for it.
        paths: beginnings of paths whose chats and completions are relayed unasked. Anywhere else the header
            `x-warmpath-relay: 1` asks for it; `x-warmpath-relay: 0` declines it here.
        port: the relay listens on this port of the loopback address; with `gateway.sidecar.socket_dir` on `relay.sock`
            in that folder.
        listen: Envoy's inner listener, an address of the loopback; with `gateway.sidecar.socket_dir` it is `inner.sock`
            in that folder.
        on_death: what becomes of an answer whose engine dies: `continue` goes on on another engine from what was
            received; `restart_before_first` starts again elsewhere as long as nothing was sent, and fails afterwards;
            `fail` does neither.
        max_attempts: engines that one request may be sent to, the first included.
        stall_s: a stream without a byte for so long, the first included, counts as dead. Keep it above the longest wait
            for a first token.
        max_body: most bytes of a request, and of an answer that is held until it is whole. A stream of which more has
            been received goes on, but can no longer be continued.
        max_open: requests that the relay has at once; further ones are answered 429.
    """

    enabled: bool = False
    paths: Annotated[list[RelayPath], Meta(max_length=32)] = msgspec.field(default_factory=list)
    port: Port = 9104
    listen: Address = "127.0.0.1:9105"
    on_death: OnDeath = "continue"
    max_attempts: Annotated[int, Meta(ge=1, le=10)] = 3
    stall_s: Positive = 60.0
    max_body: Annotated[int, Meta(ge=1024, le=1 << 30)] = 32 * 1024 * 1024
    max_open: Annotated[int, Meta(ge=1, le=100_000)] = 1000

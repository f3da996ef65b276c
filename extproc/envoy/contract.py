"""What this room asks of the rest: someone who decides, someone who takes observations. Values only, no I/O.

The servicers know nothing of stores, profiles or policies; `router.Router` implements `Decider`, and
`worker` hands observations to whoever learns from them.
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec

DESTINATION = "x-gateway-destination-endpoint"
"""Header and `envoy.lb` metadata key of the Endpoint Picker Protocol: ordered `ip:port[,ip:port...]`."""
SUBSET = "x-gateway-destination-endpoint-subset"
"""Key in filter metadata `envoy.lb.subset_hint`: the endpoints that may be picked."""
SERVED = "x-gateway-destination-endpoint-served"
"""Key in filter metadata `envoy.lb` on the response path: the endpoint that answered."""
POOL = "x-warmpath-pool"
"""Header that Envoy's `cluster_header` route reads."""
REASON = "x-warmpath-reason"
"""Response header that names why a request was refused."""
METADATA = "warmpath"
"""Namespace of our dynamic metadata; access-log entries carry it back to us."""


HEALTH_CHECK_S = 0.5
"""How often Envoy asks a worker whether it is ready, and how long it waits for the answer."""
NOT_READY_AFTER = 2
"""Answers in a row, or answers that do not come, after which Envoy sends a worker no more streams."""


class Call(msgspec.Struct, frozen=True, gc=False):
    """One HTTP request as the ext_proc stream delivered it.

    Attributes:
        method: HTTP method, upper case.
        path: path with its query string.
        headers: lower-case names; the last of repeated values wins. Pseudo-headers are left out.
        body: whole body, already decompressed by Envoy; empty when there is none.
        subset: `ip:port` of the endpoints that may be picked; None when the gateway gave no hint.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    subset: tuple[str, ...] | None = None


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Where a request goes.

    Attributes:
        pool: pool (Envoy cluster) that serves it.
        destinations: `ip:port`, the pick first, then fallbacks in order; empty lets Envoy pick any healthy host.
        charge_id: the charge to settle at the end; empty when nothing was charged.
        metadata: flat values for our metadata namespace: no prompt, no session id.
        body: what the engine gets instead of the client's body; None hands that on as it came. It has no effect on
            a request without a body, nor where the body passes in pieces after the pick.
    """

    pool: str
    destinations: tuple[str, ...] = ()
    charge_id: str = ""
    metadata: Mapping[str, str | float] = msgspec.field(default_factory=dict)
    body: bytes | None = None


class Decider(Protocol):
    """Who picks endpoints. All methods may be called concurrently for many streams."""

    async def decide(self, call: Call) -> Decision:
        """Pick and charge. Raises `WarmpathError` to refuse the request with that error's status and reason."""
        ...

    async def served(self, decision: Decision, served: str) -> None:
        """The answer of this decision has begun: `served` is the `ip:port` that gives it. Never raises."""
        ...

    async def settle(self, decision: Decision, served: str = "") -> None:
        """The stream of this decision ended (answer complete, client gone, or Envoy gone). Never raises.

        Args:
            decision: what `decide` returned, without its body: the stream may have outlived that by minutes.
            served: `ip:port` that answered, when the data plane told; empty otherwise.
        """
        ...


class Served(msgspec.Struct, frozen=True, gc=False):
    """What Envoy's access log said of one finished request. Times in seconds; -1 where unknown.

    Attributes:
        charge_id: charge of the decision; empty when the request passed without one.
        pool: pool of the decision; Envoy's cluster name when there was none.
        destination: `ip:port` that answered last; empty when none did.
        status: HTTP status sent to the client; 0 when none was.
        attempts: tries upstream.
        flags: Envoy's response flags that were set, by their short names (`UF`, `DC`, ...).
        ttft_s: request's last byte received to first byte of the answer's body sent by the endpoint.
        duration_s: first byte of the request to the last of the answer.
        request_bytes: body bytes received from the client.
        response_bytes: body bytes sent to the client.
        prompt_tokens: as the engine's `usage` reported.
        output_tokens: as the engine's `usage` reported.
        cached_tokens: prompt tokens the engine reused; 0 when it reported usage without any.
        metadata: our decision's metadata, as it was sent.
    """

    charge_id: str = ""
    pool: str = ""
    destination: str = ""
    status: int = 0
    attempts: int = 1
    flags: tuple[str, ...] = ()
    ttft_s: float = -1.0
    duration_s: float = -1.0
    request_bytes: int = 0
    response_bytes: int = 0
    prompt_tokens: int = -1
    output_tokens: int = -1
    cached_tokens: int = -1
    metadata: Mapping[str, str | float] = msgspec.field(default_factory=dict)


class Observer(Protocol):
    """Who learns from requests."""

    def observe(self, served: Served) -> None:
        """Take one observation; called in the event loop, returns at once, never raises."""
        ...

    def tried_again(self, served: Served) -> None:
        """A request that still runs is at a further attempt; `served` is what is known of it so far.

        Called as `observe` is, again and again while it runs.
        """
        ...

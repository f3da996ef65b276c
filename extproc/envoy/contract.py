"""What this room asks of the rest: someone who decides, someone who takes observations. Values only, no I/O.

The servicers know nothing of stores, profiles or policies; `router.Router` implements `Decider`, and
`worker` hands observations to whoever learns from them.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from extproc.config_rollouts import SHADOW_CLUSTERS

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
ONCE = "x-warmpath-once"
"""Header that takes a request whose body ends in trailers, in duplex mode, to a route that tries it once only.

Envoy 1.40 keeps a body for another try, and sends one that ends in trailers twice at the first try already
(envoy#45470). Its decompressor puts trailers after each gzip body."""
KEY_HEADERS = ("authorization", "api-key", "x-api-key")
"""Request headers that clients show their key in: OpenAI's as `Bearer`, Azure's and Anthropic's."""
FALLBACK_HEADER = "x-warmpath-fallback"
"""Response header that names the model which answered in place of the one that was asked for."""
FALLBACK = "fallback"
"""Key of a decision's metadata that names the model which answers in place of the one that was asked for."""
QUEUED = "queued_ms"
"""Key of a decision's metadata: for how long the request waited until its pool had room, in milliseconds."""
VERSION_HEADER = "x-warmpath-version"
"""Request header by which testers choose a version, and response header that names the one which answers."""
MODEL = "model"
"""Key of a decision's metadata: the model by its own name, of models with several versions."""
VERSION = "version"
"""Key of a decision's metadata: the version that serves, of models with several versions."""
UNIT = "unit"
"""Key of a decision's metadata: what the version was chosen for, as `Choice.unit`."""
EPOCH = "epoch"
"""Key of a decision's metadata: the rollout and step that the version was chosen by; absent without a rollout."""
CONTINUED = "continued"
"""Key of a decision's metadata: 1 where the conversation had begun before the request; of models with several versions,
and absent otherwise."""
BRIEF = "brief"
"""Key of a decision's metadata: 1 where the client takes one token of an answer at most; of models with several
versions, and absent otherwise."""
SHADOW_HEADER = "x-warmpath-shadow"
"""Request header that names the cluster which Envoy mirrors the request to."""
CAPTURE_HEADER = "x-warmpath-capture"
"""Request header, `1`, that has Envoy send a copy of the answer to a worker."""
METADATA = "warmpath"
"""Namespace of our dynamic metadata; access-log entries carry it back to us."""
EMITTED_TAG = "emitted_s"
"""Custom tag `%EMIT_TIME(%s.%3f)%` of entries of running requests that have limits."""
SENT_TAG = "sent_us"
"""Custom tag `%COMMON_DURATION(DS_RX_BEG:US_TX_BEG:us)%`: when the endpoint of the present try got the request."""
FIRST_LIMIT = "first_token_s"
"""Key in our metadata namespace with the limit to the first token of a request that is watched."""
STALL_LIMIT = "stall_s"
"""The same with the limit on silence between tokens."""


HEALTH_CHECK_S = 0.5
"""How often Envoy asks a worker whether it is ready, and how long it waits for the answer."""
NOT_READY_AFTER = 2
"""Answers in a row, or answers that do not come, after which Envoy sends a worker no more streams."""


def shadow_cluster(pool: str) -> str:
    """Name of the Envoy cluster that requests are mirrored to which a pool gets as a shadow."""
    return f"{SHADOW_CLUSTERS}{pool}"


class Copy(msgspec.Struct, frozen=True, gc=False):
    """An answer as it passed the gateway; times in seconds since the Unix epoch, by the clock of whoever took it.

    Attributes:
        status: HTTP status.
        headers: names in lower case.
        began_at: when the headers came.
        pieces: the body's pieces in order, and when each came.
        over_at: when the last came.
        complete: whether the whole answer was seen.
    """

    status: int
    headers: Mapping[str, str]
    began_at: float
    pieces: tuple[tuple[float, bytes], ...]
    over_at: float
    complete: bool


class Capture(Protocol):
    """Who waits for a copy of an answer. Returns at once and never raises."""

    def captured(self, copy: Copy | None) -> None:
        """Take the copy; None when there will be none. Called once."""
        ...


class Line(Protocol):
    """The caller of a decision, while that waits."""

    async def hold(self, longest_s: float) -> None:
        """Ask the gateway to be patient for so long. Call it once; never raises."""
        ...

    def when_left(self, tell: Callable[[], None]) -> None:
        """Have `tell` called once nobody waits for the decision any more; at once if that is so already."""
        ...


class Call(msgspec.Struct, frozen=True, gc=False):
    """One HTTP request as the ext_proc stream delivered it.

    Attributes:
        method: HTTP method, upper case.
        path: path with its query string.
        headers: lower-case names; the last of repeated values wins. Pseudo-headers are left out.
        body: whole body, already decompressed by Envoy; empty when there is none.
        subset: `ip:port` of the endpoints that may be picked; None when the gateway gave no hint.
        line: who waits for the decision; None when nobody can be told to.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    subset: tuple[str, ...] | None = None
    line: Line | None = None


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Where a request goes.

    Attributes:
        pool: pool (Envoy cluster) that serves it.
        destinations: `ip:port`, the pick first, then fallbacks in order; empty lets Envoy pick any healthy host.
        charge_id: the charge to settle at the end; empty when nothing was charged.
        metadata: flat values for our metadata namespace: no prompt, no session id.
        body: what the engine gets instead of the client's body; None hands that on as it came. It has no effect on
            a request without a body, nor where the body passes in pieces after the pick.
        model: name that the client asked for; empty when it named none. It is not sent.
        headers: further request headers, for the gateway's own router.
        limited: the request may be ended by its charge while it runs.
        total_s: it is ended so many seconds after the decision, if the gateway has not done so before; 0 for never.
        at: when it was made, by the decider's own clock. It is not sent.
        capture: who waits for a copy of the answer; None for nobody. It is not sent: a header asks Envoy for the copy.
    """

    pool: str
    destinations: tuple[str, ...] = ()
    charge_id: str = ""
    metadata: Mapping[str, str | float] = msgspec.field(default_factory=dict)
    body: bytes | None = None
    model: str = ""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    limited: bool = False
    total_s: float = 0.0
    at: float = 0.0
    capture: Capture | None = None


class Answered(Exception):  # noqa: N818  # no error: the request is answered
    """A decider answers the request itself, with 200 and JSON.

    Attributes:
        body: of the answer.
    """

    def __init__(self, body: bytes) -> None:
        super().__init__("answered here")
        self.body = body


class Decider(Protocol):
    """Who picks endpoints. All methods may be called concurrently for many streams."""

    async def decide(self, call: Call) -> Decision:
        """Pick and charge.

        Raises:
            WarmpathError: the request is refused with this error's status and reason.
            Answered: the request is answered without an engine.
        """
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
        stage: time limit that ended it, as `govern.stages.Stage`; empty when none did.
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
    stage: str = ""


class Attempt(msgspec.Struct, frozen=True, gc=False):
    """One attempt at an endpoint that failed, whatever became of the request.

    Attributes:
        pool: Envoy's cluster, which has the pool's name.
        destination: `ip:port` that was tried; empty when Envoy had none.
        status: HTTP status that the endpoint sent; 0 when it sent none.
        flags: Envoy's response flags of the attempt, by their short names.
    """

    pool: str
    destination: str
    status: int = 0
    flags: tuple[str, ...] = ()


class Running(msgspec.Struct, frozen=True, gc=False):
    """What Envoy's access log said of a request that runs and has limits; times in seconds.

    Attributes:
        charge_id: charge of the decision.
        pool: pool of the decision.
        kind: API.
        attempt: number of the try.
        sent_bytes: bytes of the answer's body sent to the client so far.
        at: when the entry was written, by Envoy's clock, since the Unix epoch.
        age_s: how long the endpoint had the request then; -1 when it has it not yet.
        first_token_s: limit of the decision; 0 for none.
        stall_s: limit of the decision; 0 for none.
    """

    charge_id: str
    pool: str
    kind: str
    attempt: int
    sent_bytes: int
    at: float
    age_s: float
    first_token_s: float
    stall_s: float


class Watcher(Protocol):
    """Who watches requests that have limits. Methods return at once and never raise."""

    def running(self, running: Running) -> None:
        """Take one look at a request; called again and again while it runs."""
        ...

    def over(self, served: Served) -> None:
        """A request is over, whether it was watched or not."""
        ...


class Observer(Protocol):
    """Who learns from requests."""

    def observe(self, served: Served) -> None:
        """Take one observation; called in the event loop, returns at once, never raises."""
        ...

    def attempt_failed(self, attempt: Attempt) -> None:
        """An endpoint did not answer an attempt as it should; called as `observe` is."""
        ...

    def tried_again(self, served: Served) -> None:
        """A request that still runs is at a further attempt; `served` is what is known of it so far.

        Called as `observe` is, again and again while it runs.
        """
        ...

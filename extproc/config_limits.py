"""The sections `timeouts` and `retries` of `warmpath.yaml`."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from extproc.config_base import Count, ModelName, NotNegative, Positive, Section

LimitedKind = Literal["chat", "completion", "responses", "messages", "embedding", "rerank", "score", "other"]
"""`request.model.RouteKind`, which lies above this room; a test keeps the two alike."""


class TimeoutRule(Section, frozen=True, kw_only=True):
    """Limits for some requests: those that match every key of `model`, `kind` and `streamed` that is given.

    A limit that is absent is taken from the next rule that matches and has it, and at last from `timeouts` itself.

    Attributes:
        model: name that the client asks for.
        kind: API.
        streamed: whether the answer is streamed.
        headers_s: as in `timeouts`. For answers that are not streamed, only a rule with `streamed: false` sets it:
            their headers come with the whole answer.
        first_token_s: as in `timeouts`.
        first_token_ms_per_token: as in `timeouts`.
        stall_s: as in `timeouts`.
        request_s: as in `timeouts`.
    """

    model: ModelName | None = None
    kind: LimitedKind | None = None
    streamed: bool | None = None
    headers_s: NotNegative | None = None
    first_token_s: NotNegative | None = None
    first_token_ms_per_token: NotNegative | None = None
    stall_s: NotNegative | None = None
    request_s: NotNegative | None = None


class Timeouts(Section, frozen=True, kw_only=True):
    """Limits in seconds; 0 switches one off, but for `connect_s` and `endpoint_idle_s`.

    Attributes:
        connect_s: TCP connect to an endpoint.
        headers_s: silence of an endpoint before the headers of a streamed answer, at each try; past it the next
            endpoint of the list is tried.
        first_token_s: from when the endpoint got the request to the first byte of a streamed answer's body.
        first_token_ms_per_token: added to `first_token_s` for each prompt token that the endpoint has not cached.
        stall_s: silence between two tokens of a streamed answer.
        request_s: whole request, first byte in to last byte out.
        stream_idle_s: silence on a stream in either direction, whatever was sent before.
        endpoint_idle_s: how long an idle connection to an endpoint is kept; below the engine's keep-alive
            (vLLM: 5 s), or requests meet connections that the engine is closing.
        rules: limits for some models, APIs or ways to answer.
    """

    connect_s: Positive = 1.0
    headers_s: NotNegative = 0.0
    first_token_s: NotNegative = 0.0
    first_token_ms_per_token: NotNegative = 0.0
    stall_s: NotNegative = 0.0
    request_s: NotNegative = 900.0
    stream_idle_s: NotNegative = 300.0
    endpoint_idle_s: Positive = 4.0
    rules: Annotated[list[TimeoutRule], Meta(max_length=64)] = msgspec.field(default_factory=list)

    @property
    def differ(self) -> bool:
        """Whether any request has limits besides those that Envoy puts on all of them alike."""
        return bool(self.headers_s or self.first_token_s or self.stall_s or self.rules)

    @property
    def longest_request_s(self) -> float:
        """The most that a whole request may take under any rule; 0 when one of them has no limit."""
        told = [self.request_s, *(rule.request_s for rule in self.rules if rule.request_s is not None)]
        return 0.0 if 0.0 in told else max(told)


class Retries(Section, frozen=True, kw_only=True):
    """Retries by Envoy, before the first byte of an answer, on the next endpoint of the decision's list.

    Attributes:
        max: tries after the first.
        base_ms: first back-off, with jitter; it doubles from try to try.
        max_ms: longest back-off.
        budget_percent: retries of a pool under way at once, by its requests in flight. Past it a request is answered
            with what its last try got: a pool that fails as a whole must not be asked twice as much for it.
        min_concurrent: retries that the budget always allows.
        idempotency_s: a request is answered 409 while another one of its tenant runs with the same `idempotency-key`. A
            key is free when its request ends, and after so many seconds at the latest: that matters when the replica
            that had it died, so no fewer than `timeouts.request_s`. 0 to pass such keys over.
    """

    max: Annotated[int, Meta(ge=0, le=2)] = 2
    base_ms: Count = 10
    max_ms: Count = 200
    budget_percent: Annotated[float, Meta(ge=0, le=100)] = 50.0
    min_concurrent: Annotated[int, Meta(ge=0, le=100_000)] = 20
    idempotency_s: Annotated[float, Meta(ge=0, le=86_400)] = 900.0

"""The sections `timeouts` and `retries` of `warmpath.yaml`."""

from typing import Annotated

from msgspec import Meta

from extproc.config_base import Count, NotNegative, Positive, Section


class Timeouts(Section, frozen=True, kw_only=True):
    """Limits in seconds that Envoy enforces; 0 switches `request_s` and `stream_idle_s` off.

    Attributes:
        connect_s: TCP connect to an endpoint.
        request_s: whole request, first byte in to last byte out.
        stream_idle_s: silence on a stream in either direction.
        endpoint_idle_s: how long an idle connection to an endpoint is kept; below the engine's keep-alive
            (vLLM: 5 s), or requests meet connections that the engine is closing.
    """

    connect_s: Positive = 1.0
    request_s: NotNegative = 900.0
    stream_idle_s: NotNegative = 300.0
    endpoint_idle_s: Positive = 4.0


class Retries(Section, frozen=True, kw_only=True):
    """Retries by Envoy, before the first byte of an answer, on the next endpoint of the decision's list.

    Attributes:
        max: tries after the first.
        base_ms: first back-off, with jitter.
        max_ms: longest back-off.
    """

    max: Annotated[int, Meta(ge=0, le=5)] = 2
    base_ms: Count = 10
    max_ms: Count = 200

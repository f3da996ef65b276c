"""Renders limits of use as far as Envoy has a part in them: its own bucket, the question before a body, and headers."""

from envoy_data_plane.envoy.config.core.v3 import (
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    RuntimeFractionalPercent,
)
from envoy_data_plane.envoy.config.ratelimit.v3 import RateLimitServiceConfig
from envoy_data_plane.envoy.config.route.v3 import RateLimit as Descriptor
from envoy_data_plane.envoy.config.route.v3 import RateLimitAction, RateLimitActionRequestHeaders
from envoy_data_plane.envoy.extensions.filters.http.local_ratelimit.v3 import LocalRateLimit
from envoy_data_plane.envoy.extensions.filters.http.ratelimit.v3 import RateLimit
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.v3 import (
    FractionalPercent,
    FractionalPercentDenominatorType,
    HttpStatus,
    StatusCode,
    TokenBucket,
)
from envoy_data_plane.google.protobuf import Any

from extproc.config import WORKERS_CLUSTER, Config
from extproc.envoy.contract import METADATA
from extproc.envoy.rate_limit import METHOD, PATH, TENANT
from extproc.envoy.render_parts import grpc_service, milliseconds, reconnect, seconds
from extproc.govern.quota_text import HEADER_KEYS
from extproc.request.shapes import TENANT_HEADER

LOCAL_DETAILS = "local_rate_limited"
"""Response code details of a request that Envoy's own bucket refused."""
REFUSED_DETAILS = "request_rate_limited"
"""Those of one that a worker refused before its body: it wrote the answer."""
FAILED_DETAILS = "rate_limiter_error"
"""Those of one that no worker answered about."""


def local_limit_filters(config: Config) -> list[HttpFilter]:
    """Envoy's own bucket, which costs next to nothing: it comes before all that asks anybody."""
    per_s = config.rate_limits.local_requests_per_s
    if per_s is None:
        return []
    always = RuntimeFractionalPercent(
        default_value=FractionalPercent(numerator=100, denominator=FractionalPercentDenominatorType.HUNDRED)
    )
    message = LocalRateLimit(
        stat_prefix="local_limit",
        status=HttpStatus(code=StatusCode.TooManyRequests),
        token_bucket=TokenBucket(max_tokens=per_s, tokens_per_fill=per_s, fill_interval=seconds(1)),
        filter_enabled=always,
        filter_enforced=always,
    )
    return [HttpFilter(name="envoy.filters.http.local_ratelimit", typed_config=Any.pack(message))]


def before_body_filters(config: Config) -> list[HttpFilter]:
    """Ask a worker for the limits of requests that need no body; after authentication, which sets the tenant."""
    if not config.rate_limits.before_body:
        return []
    gateway = config.gateway
    message = RateLimit(
        domain=METADATA,
        rate_limit_service=RateLimitServiceConfig(
            grpc_service=grpc_service(
                WORKERS_CLUSTER, retries=reconnect(tries=2, longest_ms=gateway.message_timeout_ms)
            )
        ),
        # Envoy's default of 20 ms is as long as the worker may wait for Redis.
        timeout=milliseconds(gateway.message_timeout_ms),
        failure_mode_deny=not gateway.fail_open,
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
        disable_x_envoy_ratelimited_header=True,
        # What was taken: the access log brings it back, whatever becomes of the request.
        metadata_namespace=METADATA,
        rate_limits=[
            Descriptor(
                actions=[
                    _entry(TENANT, TENANT_HEADER),
                    _entry(METHOD, ":method"),
                    _entry(PATH, ":path"),
                ]
            )
        ],
    )
    return [HttpFilter(name="envoy.filters.http.ratelimit", typed_config=Any.pack(message))]


def _entry(key: str, header: str) -> RateLimitAction:
    """One entry of the descriptor; left out for a request without the header."""
    return RateLimitAction(
        request_headers=RateLimitActionRequestHeaders(header_name=header, descriptor_key=key, skip_if_absent=True)
    )


def quota_headers(config: Config) -> list[HeaderValueOption]:
    """Tell clients what is left, from the decision's metadata; what that does not have is not added."""
    if not config.rate_limits.rules:
        return []
    return [
        HeaderValueOption(
            header=HeaderValue(key=name, value=f"%DYNAMIC_METADATA({METADATA}:{key})%"),
            append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for key, name in HEADER_KEYS.items()
    ]

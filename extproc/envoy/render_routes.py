"""Renders the routes: the sidecar's choice of pool, the fallback without one, and retries."""

from envoy_data_plane.envoy.config.route.v3 import (
    HeaderMatcher,
    RetryPolicy,
    RetryPolicyRetryBackOff,
    RetryPolicyRetryHostPredicate,
    Route,
    RouteAction,
    RouteActionClusterNotFoundResponseCode,
    RouteActionHashPolicy,
    RouteActionHashPolicyHeader,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher
from envoy_data_plane.google.protobuf import Any

from extproc.config import Config
from extproc.envoy.contract import POOL
from extproc.envoy.render_parts import milliseconds, seconds
from extproc.request import session

_RETRY_ON = "connect-failure,refused-stream,reset,retriable-status-codes"
_HOST_ATTEMPTS = 5

MESSAGES = "-messages"
"""What the names of routes of Anthropic's Messages API end with: its answers count cached tokens apart."""
_MESSAGES_PATH = ".*/v1/messages/*"
"""Whole path without the query, as `request.shapes` reads it: behind any prefix, slashes at the end passed over."""


def routes(config: Config) -> RouteConfiguration:
    """One virtual host for every name; TLS and host names belong to whoever stands before Warmpath."""
    default_pool = next(iter(config.models.values())).pool
    picked = [HeaderMatcher(name=POOL, present_match=True)]
    return RouteConfiguration(
        name="warmpath",
        virtual_hosts=[
            VirtualHost(
                name="warmpath",
                domains=["*"],
                routes=[
                    *_routes("picked", picked, _action(config, RouteAction(cluster_header=POOL))),
                    *_routes("fallback", [], _action(config, RouteAction(cluster=default_pool))),
                ],
                request_body_buffer_limit=config.gateway.max_body_bytes,
            )
        ],
        # The pool comes from the sidecar at run time, so clusters are looked up when it is named.
        validate_clusters=False,
    )


def _routes(name: str, headers: list[HeaderMatcher], action: RouteAction) -> list[Route]:
    """The route of the Messages API, which the AI protocol manager reads in another way, and that of the others."""
    messages = RouteMatch(safe_regex=RegexMatcher(regex=_MESSAGES_PATH), headers=headers)
    return [
        Route(name=name + MESSAGES, match=messages, route=action),
        Route(name=name, match=RouteMatch(prefix="/", headers=headers), route=action),
    ]


def _action(config: Config, action: RouteAction) -> RouteAction:
    action.timeout = seconds(config.timeouts.request_s)
    action.cluster_not_found_response_code = RouteActionClusterNotFoundResponseCode.SERVICE_UNAVAILABLE
    action.retry_policy = _retries(config)
    action.hash_policy = [
        RouteActionHashPolicy(header=RouteActionHashPolicyHeader(header_name=name), terminal=True)
        for name in session.HEADERS
    ]
    return action


def _retries(config: Config) -> RetryPolicy | None:
    """Retry what no byte was answered to, on the next endpoint of the list.

    503 is in the list because vLLM and SGLang answer it when their queue is full, before any work was done:
    the next endpoint may have room. 500 and 502 are not: the engine had the request and may fail it again.
    """
    retries = config.retries
    if not retries.max:
        return None
    return RetryPolicy(
        retry_on=_RETRY_ON,
        retriable_status_codes=[503],
        num_retries=retries.max,
        retry_back_off=RetryPolicyRetryBackOff(
            base_interval=milliseconds(retries.base_ms), max_interval=milliseconds(retries.max_ms)
        ),
        retry_host_predicate=[
            RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts", typed_config=Any.pack(PreviousHostsPredicate())
            )
        ],
        # With the default of 1, retries without our header met the same dead host three times of three.
        host_selection_retry_max_attempts=_HOST_ATTEMPTS,
    )

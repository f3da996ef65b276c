"""Renders the routes: the sidecar's choice of pool, the fallback without one, and retries."""

from collections.abc import Sequence

import msgspec
from envoy_data_plane.envoy.config.core.v3 import (
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
)
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
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
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ExtProcOverrides, ExtProcPerRoute
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher
from envoy_data_plane.google.protobuf import Any

from extproc.config import Config, Gateway
from extproc.config_gateway import GatewayRoute
from extproc.envoy.contract import FALLBACK, FALLBACK_HEADER, METADATA, ONCE, POOL, VERSION, VERSION_HEADER
from extproc.envoy.render_auth import hidden_headers
from extproc.envoy.render_parts import EXT_PROC, below, milliseconds, seconds
from extproc.envoy.render_quotas import quota_headers
from extproc.envoy.render_relay import relay_routes
from extproc.envoy.render_shadow import hidden_shadow_headers, mirrored
from extproc.errors import UnknownPathError
from extproc.request import session
from extproc.request.shapes import PATHS

_RETRY_ON = "connect-failure,refused-stream,reset,retriable-status-codes"
_HOST_ATTEMPTS = 5

MESSAGES = "-messages"
"""What the names of routes of Anthropic's Messages API end with: its answers count cached tokens apart."""
_MESSAGES_CALL = HeaderMatcher(
    name=":path",
    string_match=StringMatcher(safe_regex=RegexMatcher(regex=r"[^?]*/v1/messages/*(\?.*)?")),
)
"""Its path as `request.shapes` reads it: behind any prefix, slashes at the end and the query passed over."""
_PICKED = [HeaderMatcher(name=POOL, present_match=True)]
_ONCE = HeaderMatcher(name=ONCE, present_match=True)
_KNOWN = ("/v1/models", *PATHS)
"""Paths that are served, with what lies below them: what Warmpath reads, and what goes with it."""


class Scope(msgspec.Struct, frozen=True):
    """Requests that the same rules are for.

    Attributes:
        path: path that they are at or below; empty for all others.
        rules: their own rules.
    """

    path: str = ""
    rules: GatewayRoute | None = None

    def match(self, headers: list[HeaderMatcher]) -> RouteMatch:
        """What finds them, among requests with such headers."""
        return below(self.path, headers)

    def named(self, kind: str) -> str:
        """Name of their route of some kind, such as `fallback` or `fallback /v1/embeddings`."""
        return f"{kind} {self.path}" if self.path else kind


def scopes(gateway: Gateway) -> list[Scope]:
    """Paths with rules of their own, and then all others that are served; the longest first."""
    own = {route.path.rstrip("/"): Scope(route.path, route) for route in gateway.routes}
    others = _KNOWN if gateway.only_known_paths else [""]
    served = {**{path: Scope(path) for path in others}, **own}
    return [served[path] for path in sorted(served, key=len, reverse=True)]


def routes(config: Config) -> RouteConfiguration:
    """One virtual host for every name; host names belong to whoever stands before Warmpath."""
    default_pool = next(iter(config.models.values())).main_pool
    everything = scopes(config.gateway)
    duplex = config.gateway.body_mode == "duplex" and config.retries.max > 0
    return RouteConfiguration(
        name="warmpath",
        virtual_hosts=[
            VirtualHost(
                name="warmpath",
                domains=["*"],
                routes=[
                    *relay_routes(config),
                    *(_decided(config, default_pool, everything, once=True) if duplex else []),
                    *_decided(config, default_pool, everything),
                    *([_unknown()] if config.gateway.only_known_paths else []),
                ],
                request_body_buffer_limit=config.gateway.max_body_bytes,
            )
        ],
        request_headers_to_remove=[
            *hidden_headers(config),
            *([ONCE] if duplex else []),
            *hidden_shadow_headers(config),
        ],
        response_headers_to_add=[
            _says_who_answers(FALLBACK_HEADER, FALLBACK),
            _says_who_answers(VERSION_HEADER, VERSION),
            *quota_headers(config),
        ],
        # The pool comes from the sidecar at run time, so clusters are looked up when it is named.
        validate_clusters=False,
    )


def _decided(config: Config, default_pool: str, everything: Sequence[Scope], *, once: bool = False) -> list[Route]:
    """Routes of requests with a pick, and of those without one; `once` those of `contract.ONCE`."""
    picked = _action(config, RouteAction(cluster_header=POOL))
    fallback = _action(config, RouteAction(cluster=default_pool))
    name, marked = "", list[HeaderMatcher]()
    if once:
        picked.retry_policy = fallback.retry_policy = None
        name, marked = "once ", [_ONCE]
    return [
        *(
            route
            for pool, asked, action in mirrored(config, picked)
            for scope in everything
            for route in _routes(f"{name}mirrored {pool}", scope, [*marked, *_PICKED, asked], action)
        ),
        *(route for scope in everything for route in _routes(f"{name}picked", scope, [*marked, *_PICKED], picked)),
        *(route for scope in everything for route in _routes(f"{name}fallback", scope, marked, fallback)),
    ]


def _says_who_answers(name: str, key: str) -> HeaderValueOption:
    """A header with what our metadata has under a key; left out where it has nothing.

    It names the version that answers, or the model that answers in place of the one that was asked for: an engine
    cannot say so in its stead.
    """
    return HeaderValueOption(
        header=HeaderValue(key=name, value=f"%DYNAMIC_METADATA({METADATA}:{key})%"),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _routes(kind: str, scope: Scope, headers: list[HeaderMatcher], action: RouteAction) -> list[Route]:
    """The route of the Messages API, which the AI protocol manager reads in another way, and that of the others."""
    name = scope.named(kind)
    return [
        _route(name + MESSAGES, scope, [*headers, _MESSAGES_CALL], action),
        _route(name, scope, headers, action),
    ]


def _route(name: str, scope: Scope, headers: list[HeaderMatcher], action: RouteAction) -> Route:
    route = Route(name=name, match=scope.match(headers), route=action, request_headers_to_remove=[VERSION_HEADER])
    rules = scope.rules
    if rules and rules.max_body_bytes is not None:
        route.request_body_buffer_limit = rules.max_body_bytes
    if rules and rules.fail_open is not None:
        overrides = ExtProcPerRoute(overrides=ExtProcOverrides(failure_mode_allow=rules.fail_open))
        route.typed_per_filter_config = {EXT_PROC: Any.pack(overrides)}
    return route


def _unknown() -> Route:
    """Nobody decides about paths that are not served. The answer is written by `render_replies`."""
    return Route(
        name="unknown",
        match=RouteMatch(prefix="/"),
        direct_response=DirectResponseAction(status=UnknownPathError.status),
        typed_per_filter_config={EXT_PROC: Any.pack(ExtProcPerRoute(disabled=True))},
    )


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

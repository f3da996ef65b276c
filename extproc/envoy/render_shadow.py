"""Renders what shadow traffic needs: copies of answers for a worker, and mirrored requests.

Only what the configuration asks for is rendered: `compare` needs the copies, `mirror` a cluster for each shadow's pool.
"""

import dataclasses
import math

from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    LoadBalancingPolicy,
    LoadBalancingPolicyPolicy,
    OutlierDetection,
)
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation
from envoy_data_plane.envoy.config.core.v3 import (
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
    KeepaliveSettings,
)
from envoy_data_plane.envoy.config.route.v3 import HeaderMatcher, RouteAction, RouteActionRequestMirrorPolicy
from envoy_data_plane.envoy.extensions.common.matching.v3 import ExtensionWithMatcher
from envoy_data_plane.envoy.extensions.filters.common.matcher.action.v3 import SkipFilter
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request.v3 import LeastRequest
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptions as UpstreamOptions
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptionsExplicitHttpConfig
from envoy_data_plane.envoy.type.matcher.v3 import HttpRequestHeaderMatchInput
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher as EnvoyStringMatcher
from envoy_data_plane.google.protobuf import Any
from envoy_data_plane.xds.core.v3 import TypedExtensionConfig
from envoy_data_plane.xds.type.matcher.v3 import (
    Matcher,
    MatcherMatcherList,
    MatcherMatcherListFieldMatcher,
    MatcherMatcherListPredicate,
    MatcherMatcherListPredicateSinglePredicate,
    MatcherOnMatch,
    StringMatcher,
)

from extproc.config import Config
from extproc.config_rollouts import CAPTURE_CLUSTER, ShadowMode
from extproc.envoy.contract import (
    CAPTURE_HEADER,
    DESTINATION,
    KEY_HEADERS,
    METADATA,
    ONCE,
    POOL,
    SHADOW_HEADER,
    shadow_cluster,
)
from extproc.envoy.render_parts import extension, grpc_service, seconds

CAPTURE = "warmpath.capture"
"""Name of the filter that copies answers."""
_COPY_BUFFER = 16 << 20
"""Bytes of copies that Envoy keeps for a worker that does not read. Envoy slows the engine down for whoever has used
them up: with its default of 1 MiB, a frozen worker held up an answer of 1.6 MB for 11 s (Envoy 1.40)."""
_PING_S, _PONG_S = 5, 1
"""A frozen worker is found out by then, and its copies are given up. It allows no pings that come more often."""
_MIRROR_CONNECT_S = 1.0
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_PRIVATE = (*KEY_HEADERS, "proxy-authorization", "cookie", "idempotency-key", DESTINATION, POOL, SHADOW_HEADER, ONCE)
"""Headers that a mirrored request goes without."""


def has_shadow(config: Config, mode: ShadowMode) -> bool:
    """Whether some model has a shadow of this mode."""
    return any(model.shadow is not None and model.shadow.mode == mode for model in config.models.values())


def capture_filters(config: Config) -> list[HttpFilter]:
    """The filter that copies answers to a worker, of requests that the sidecar has marked.

    It is another one than the filter that asks for decisions, since it must observe only: an answer that passes the
    other one's stream waits for the worker at each piece, and is cut where a worker that does not fail open is stuck.
    """
    if not has_shadow(config, "compare"):
        return []
    send, skip = ProcessingModeHeaderSendMode.SEND, ProcessingModeHeaderSendMode.SKIP
    observer = ExternalProcessor(
        grpc_service=grpc_service(CAPTURE_CLUSTER),
        failure_mode_allow=True,
        observability_mode=True,
        deferred_close_timeout=seconds(5),
        stat_prefix="captures",
        processing_mode=ProcessingMode(
            request_header_mode=skip,
            request_body_mode=ProcessingModeBodySendMode.NONE,
            request_trailer_mode=skip,
            response_header_mode=send,
            response_body_mode=ProcessingModeBodySendMode.STREAMED,
            response_trailer_mode=send,
        ),
        # The charge tells which request it is.
        metadata_options=MetadataOptions(forwarding_namespaces=MetadataOptionsMetadataNamespaces(untyped=[METADATA])),
    )
    marked = MatcherMatcherListPredicate(
        single_predicate=MatcherMatcherListPredicateSinglePredicate(
            input=_typed("header", HttpRequestHeaderMatchInput(header_name=CAPTURE_HEADER)),
            value_match=StringMatcher(exact="1"),
        )
    )
    skipped = MatcherOnMatch(action=_typed("skip", SkipFilter()))
    others = MatcherMatcherListFieldMatcher(predicate=MatcherMatcherListPredicate(not_matcher=marked), on_match=skipped)
    matched = ExtensionWithMatcher(
        extension_config=extension(CAPTURE, observer),
        xds_matcher=Matcher(matcher_list=MatcherMatcherList(matchers=[others])),
    )
    return [HttpFilter(name=CAPTURE, typed_config=Any.pack(matched))]


def capture_clusters(config: Config, workers: Cluster) -> list[Cluster]:
    """The cluster that copies go to; `workers` is a fresh one of the workers."""
    if not has_shadow(config, "compare"):
        return []
    workers.name = CAPTURE_CLUSTER
    if workers.load_assignment is not None:
        workers.load_assignment.cluster_name = CAPTURE_CLUSTER
    workers.per_connection_buffer_limit_bytes = _COPY_BUFFER
    workers.typed_extension_protocol_options = {
        _HTTP_OPTIONS: Any.pack(
            UpstreamOptions(
                explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
                    http2_protocol_options=Http2ProtocolOptions(
                        connection_keepalive=KeepaliveSettings(interval=seconds(_PING_S), timeout=seconds(_PONG_S))
                    )
                )
            )
        )
    }
    return [workers]


def mirrored_pools(config: Config) -> dict[str, int]:
    """Pools that requests are mirrored to, and how many each gets at once from all workers."""
    most: dict[str, int] = {}
    hosts = 1 if config.gateway.sidecar.socket_dir else len(config.gateway.sidecar.hosts)
    for model in config.models.values():
        shadow = model.shadow
        if shadow is not None and shadow.mode == "mirror" and shadow.version in model.versions:
            pool = model.versions[shadow.version].pool
            most[pool] = most.get(pool, 0) + shadow.max_concurrent * config.gateway.sidecar.workers * hosts
    return most


def mirror_cluster(config: Config, pool: Cluster, most: int) -> Cluster:
    """The cluster that a pool's mirrored requests go to.

    It has the pool's endpoints and its health checks, and nothing else in common with it: what is mirrored has its own
    limits, is tried once, and goes to whoever has least to do, since the client's own pick is in another pool.

    Args:
        config: the configuration.
        pool: a fresh cluster of the pool.
        most: mirrored requests at once.
    """
    options = _mirror_options(config, pool.name)
    pool.name = shadow_cluster(pool.name)
    pool.connect_timeout = seconds(min(_MIRROR_CONNECT_S, config.timeouts.connect_s))
    pool.load_balancing_policy = LoadBalancingPolicy(
        policies=[
            LoadBalancingPolicyPolicy(
                typed_extension_config=extension("envoy.load_balancing_policies.least_request", LeastRequest())
            )
        ]
    )
    pool.circuit_breakers = CircuitBreakers(
        thresholds=[
            CircuitBreakersThresholds(
                max_connections=most, max_pending_requests=max(1, most // 4), max_requests=most, max_retries=0
            )
        ]
    )
    pool.outlier_detection = OutlierDetection(
        interval=seconds(1),
        base_ejection_time=seconds(5),
        max_ejection_percent=100,
        enforcing_consecutive_5xx=0,
        enforcing_success_rate=0,
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure=2,
        enforcing_consecutive_local_origin_failure=100,
        enforcing_local_origin_success_rate=0,
    )
    pool.typed_extension_protocol_options = {_HTTP_OPTIONS: Any.pack(options)}
    return pool


def _mirror_options(config: Config, pool: str) -> UpstreamOptions:
    """HTTP/1 as engines speak it; a shadow that never answers must not hold its few places for as long as a client."""
    shadows = [(model.versions, model.shadow) for model in config.models.values() if model.shadow is not None]
    ours = [each.timeout_s for versions, each in shadows if versions[each.version].pool == pool]
    longest_s = min(max(ours), config.timeouts.longest_request_s or math.inf)
    return UpstreamOptions(
        common_http_protocol_options=HttpProtocolOptions(
            idle_timeout=seconds(config.timeouts.endpoint_idle_s),
            max_stream_duration=seconds(longest_s),
        ),
        explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(http_protocol_options=Http1ProtocolOptions()),
    )


def mirrored(config: Config, action: RouteAction) -> list[tuple[str, HeaderMatcher, RouteAction]]:
    """Routes of requests that are mirrored: for each pool its name, what finds them, and the action.

    The decision's header chooses the route, and each route has a cluster of its own. Were the cluster read from the
    header, an engine would get that too: Envoy (1.40) looks for it after the routes and the cluster's filters have
    removed headers, and mirrors nothing without.

    Args:
        config: the configuration.
        action: what is done with the client's own request.
    """
    found = []
    for pool in mirrored_pools(config):
        name = shadow_cluster(pool)
        policy = RouteActionRequestMirrorPolicy(
            cluster=name,
            disable_shadow_host_suffix_append=True,
            request_headers_mutations=[HeaderMutation(remove=header) for header in _PRIVATE],
        )
        asked = HeaderMatcher(name=SHADOW_HEADER, string_match=EnvoyStringMatcher(exact=name))
        found.append((pool, asked, dataclasses.replace(action, request_mirror_policies=[policy])))
    return found


def hidden_shadow_headers(config: Config) -> list[str]:
    """Request headers of shadow traffic, which no engine gets."""
    found: dict[ShadowMode, str] = {"compare": CAPTURE_HEADER, "mirror": SHADOW_HEADER}
    return [name for mode, name in found.items() if has_shadow(config, mode)]


def _typed(name: str, message: HttpRequestHeaderMatchInput | SkipFilter) -> TypedExtensionConfig:
    """An extension as matchers take it: in a message of xDS's own, which is not Envoy's."""
    return TypedExtensionConfig(name=name, typed_config=Any.pack(message))

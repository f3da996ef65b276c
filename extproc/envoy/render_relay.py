"""Renders the way to the relay: which requests take it, and the cluster that they go to."""

from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterCommonLbConfig,
    ClusterDiscoveryType,
)
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    HealthCheck,
    HealthCheckHttpHealthCheck,
    Http1ProtocolOptions,
    HttpProtocolOptions,
)
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    EndpointHealthCheckConfig,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.config.route.v3 import (
    HeaderMatcher,
    RetryPolicy,
    RetryPolicyRetryBackOff,
    RetryPolicyRetryPriority,
    Route,
    RouteAction,
    RouteMatch,
)
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ExtProcPerRoute
from envoy_data_plane.envoy.extensions.retry.priority.previous_priorities.v3 import PreviousPrioritiesConfig
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptions as UpstreamOptions
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import HttpProtocolOptionsExplicitHttpConfig
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any

from extproc.config import RELAY_CLUSTER, Config
from extproc.config_relay import ASKING, HEALTH, SERVED_BY
from extproc.envoy.render_parts import (
    EXT_PROC,
    below,
    ejection_at_once,
    milliseconds,
    pipe_address,
    seconds,
    socket_address,
)

_CALL = HeaderMatcher(
    name=":path",
    string_match=StringMatcher(safe_regex=RegexMatcher(regex=r"[^?]*/v1/(chat/)?completions/*(\?.*)?")),
)
"""Paths that the relay reads, behind any prefix; slashes at the end and the query are passed over."""
_POST = HeaderMatcher(name=":method", string_match=StringMatcher(exact="POST"))
_ASKED = HeaderMatcher(name=ASKING, string_match=StringMatcher(exact="1"))
_NOT_DECLINED = HeaderMatcher(
    name=ASKING, string_match=StringMatcher(exact="0"), invert_match=True, treat_missing_header_as_empty=True
)
_UNLIMITED = 1_000_000
_IDLE_S = 10
_HEALTH_S = 1


def relay_routes(config: Config) -> list[Route]:
    """The routes to the relay: of requests that ask for it, and of configured paths. They stand before all others."""
    if not config.relay.enabled:
        return []
    asked = _route("relay", RouteMatch(prefix="/", headers=[_ASKED, _POST, _CALL]), config)
    configured = (
        _route(f"relay {path}", below(path, [_NOT_DECLINED, _POST, _CALL]), config) for path in config.relay.paths
    )
    return [asked, *configured]


def _route(name: str, match: RouteMatch, config: Config) -> Route:
    """Nothing is decided on the way to the relay: each of its tries is, on its way back in.

    While no relay takes connections, or the one that took it is lost before it answered, the request goes straight to
    the inner listener, as if it had not asked.
    """
    return Route(
        name=name,
        match=match,
        route=RouteAction(
            cluster=RELAY_CLUSTER,
            # The model is not known here: the relay keeps to the limit that its rule sets.
            timeout=seconds(config.timeouts.longest_request_s),
            retry_policy=RetryPolicy(
                retry_on="connect-failure,refused-stream,reset",
                num_retries=1,
                retry_back_off=RetryPolicyRetryBackOff(base_interval=milliseconds(1), max_interval=milliseconds(10)),
                retry_priority=RetryPolicyRetryPriority(
                    name="envoy.retry_priorities.previous_priorities",
                    typed_config=Any.pack(PreviousPrioritiesConfig(update_frequency=1)),
                ),
            ),
        ),
        typed_per_filter_config={EXT_PROC: Any.pack(ExtProcPerRoute(disabled=True))},
        response_headers_to_remove=[SERVED_BY],
    )


def relay_clusters(config: Config) -> list[Cluster]:
    """The relay of this host, and behind it Envoy's own inner listener, for the time without one."""
    if not config.relay.enabled:
        return []
    return [
        Cluster(
            name=RELAY_CLUSTER,
            type=ClusterDiscoveryType.STATIC,
            connect_timeout=milliseconds(250),
            load_assignment=ClusterLoadAssignment(
                cluster_name=RELAY_CLUSTER,
                endpoints=[
                    _endpoint(relay_address(config), priority=0, checked=True),
                    _endpoint(inner_address(config), priority=1, checked=False),
                ],
            ),
            # Envoy's defaults let three requests at a time go the other way when the relay is lost, and 1,024 any way.
            circuit_breakers=CircuitBreakers(
                thresholds=[
                    CircuitBreakersThresholds(
                        max_connections=_UNLIMITED,
                        max_pending_requests=_UNLIMITED,
                        max_requests=_UNLIMITED,
                        max_retries=_UNLIMITED,
                    )
                ]
            ),
            common_lb_config=ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=0.0)),
            health_checks=[
                HealthCheck(
                    timeout=seconds(2 * _HEALTH_S),
                    interval=seconds(_HEALTH_S),
                    no_traffic_interval=seconds(_HEALTH_S),
                    no_traffic_healthy_interval=seconds(_HEALTH_S),
                    unhealthy_threshold=2,
                    healthy_threshold=1,
                    http_health_check=HealthCheckHttpHealthCheck(path=HEALTH),
                )
            ],
            # One failed connection is enough: the other way in serves as well, and health checks bring the relay back.
            outlier_detection=ejection_at_once(),
            typed_extension_protocol_options={
                "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": Any.pack(
                    UpstreamOptions(
                        common_http_protocol_options=HttpProtocolOptions(idle_timeout=seconds(_IDLE_S)),
                        explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
                            http_protocol_options=Http1ProtocolOptions()
                        ),
                    )
                )
            },
        )
    ]


def _endpoint(address: Address, *, priority: int, checked: bool) -> LocalityLbEndpoints:
    health = None if checked else EndpointHealthCheckConfig(disable_active_health_check=True)
    return LocalityLbEndpoints(
        priority=priority, lb_endpoints=[LbEndpoint(endpoint=Endpoint(address=address, health_check_config=health))]
    )


def relay_address(config: Config) -> Address:
    """Where the relay of this host listens."""
    folder = config.gateway.sidecar.socket_dir
    return pipe_address(f"{folder}/relay.sock") if folder else socket_address(f"127.0.0.1:{config.relay.port}")


def inner_address(config: Config) -> Address:
    """Where Envoy listens for the relay."""
    folder = config.gateway.sidecar.socket_dir
    return pipe_address(f"{folder}/inner.sock") if folder else socket_address(config.relay.listen)

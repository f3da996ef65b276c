"""Renders where Envoy connects to: one cluster a pool, the sidecar's workers, the keepers."""

from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    CircuitBreakersThresholdsRetryBudget,
    Cluster,
    ClusterCommonLbConfig,
    ClusterDiscoveryType,
    ClusterDnsLookupFamily,
    ClusterEdsClusterConfig,
    LoadBalancingPolicy,
    LoadBalancingPolicyPolicy,
    OutlierDetection,
)
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    ApiConfigSource,
    ApiConfigSourceApiType,
    ApiVersion,
    ConfigSource,
    HealthCheck,
    HealthCheckGrpcHealthCheck,
    HealthCheckHttpHealthCheck,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    KeepaliveSettings,
)
from envoy_data_plane.envoy.config.core.v3 import HttpProtocolOptions as CommonHttpOptions
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request.v3 import LeastRequest
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import (
    OverrideHost,
    OverrideHostOverrideHostSource,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.ring_hash.v3 import RingHash, RingHashHashFunction
from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin.v3 import RoundRobin
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions,
    HttpProtocolOptionsExplicitHttpConfig,
)
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any

from extproc.config import KEEPER_CLUSTER, WORKERS_CLUSTER, Breakers, Config, Retries
from extproc.envoy.contract import DESTINATION, HEALTH_CHECK_S, NOT_READY_AFTER, SERVED
from extproc.envoy.render_answers import answer_filters
from extproc.envoy.render_auth import jwks_clusters
from extproc.envoy.render_parts import (
    FLOW_WINDOW,
    ejection_at_once,
    extension,
    grpc_service,
    keeper_addresses,
    milliseconds,
    seconds,
    worker_addresses,
)
from extproc.envoy.render_relay import relay_clusters
from extproc.envoy.render_shadow import capture_clusters, mirror_cluster, mirrored_pools

_UNLIMITED = 1_000_000
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_ENDPOINT_METADATA = "envoy.lb"


def clusters(config: Config) -> list[Cluster]:
    """All clusters: the pools in the order of the file, where tokens' keys are, the relay, the workers, the keepers."""
    pools = [_pool(name, config) for name in config.pools]
    mirrors = [mirror_cluster(config, _pool(name, config), most) for name, most in mirrored_pools(config).items()]
    others = [*jwks_clusters(config), *relay_clusters(config), *mirrors, *capture_clusters(config, _workers(config))]
    return [*pools, *others, _workers(config), _keeper(config)]


def _pool(name: str, config: Config) -> Cluster:
    return Cluster(
        name=name,
        type=ClusterDiscoveryType.EDS,
        eds_cluster_config=ClusterEdsClusterConfig(
            service_name=name,
            eds_config=ConfigSource(
                resource_api_version=ApiVersion.V3,
                # Envoy opens its listener after this long even if no keeper answers; requests then get a JSON 503.
                initial_fetch_timeout=seconds(5),
                api_config_source=ApiConfigSource(
                    api_type=ApiConfigSourceApiType.GRPC,
                    transport_api_version=ApiVersion.V3,
                    set_node_on_first_message_only=True,
                    grpc_services=[grpc_service(KEEPER_CLUSTER)],
                ),
            ),
        ),
        connect_timeout=seconds(config.timeouts.connect_s),
        load_balancing_policy=_pick_or_hash(),
        # Below 1 % healthy hosts, that is none, Envoy tries them all: a fleet whose health pages all fail at
        # once is more often slow than dead.
        common_lb_config=ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=1.0)),
        # A host that discovery dropped leaves at once, not after its health checks fail as well.
        ignore_health_on_host_removal=True,
        circuit_breakers=_no_breakers(config.breakers.max_requests, config.breakers.max_pending, config.retries),
        health_checks=[_engine_health()],
        outlier_detection=_engine_outliers(config.breakers),
        typed_extension_protocol_options={
            _HTTP_OPTIONS: Any.pack(
                HttpProtocolOptions(
                    common_http_protocol_options=CommonHttpOptions(
                        idle_timeout=seconds(config.timeouts.endpoint_idle_s)
                    ),
                    explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
                        http_protocol_options=Http1ProtocolOptions()
                    ),
                    http_filters=answer_filters(),
                )
            )
        },
    )


def _pick_or_hash() -> LoadBalancingPolicy:
    """The endpoint that the sidecar named; without one, the hash of the session."""
    fallback = LoadBalancingPolicy(
        policies=[
            LoadBalancingPolicyPolicy(
                typed_extension_config=extension(
                    "envoy.load_balancing_policies.ring_hash",
                    # 4,096 points keep more than 100 a host up to 40 hosts.
                    RingHash(hash_function=RingHashHashFunction.XX_HASH, minimum_ring_size=4096),
                )
            )
        ]
    )
    override = OverrideHost(
        override_host_sources=[
            OverrideHostOverrideHostSource(header=DESTINATION),
            OverrideHostOverrideHostSource(metadata=_metadata_key(DESTINATION)),
        ],
        selected_host_key=_metadata_key(SERVED),
        fallback_policy=fallback,
    )
    return _policy("envoy.load_balancing_policies.override_host", override)


def _metadata_key(name: str) -> MetadataKey:
    return MetadataKey(key=_ENDPOINT_METADATA, path=[MetadataKeyPathSegment(key=name)])


def _policy(name: str, message: OverrideHost | LeastRequest | RoundRobin) -> LoadBalancingPolicy:
    policy = LoadBalancingPolicyPolicy(typed_extension_config=extension(name, message))
    return LoadBalancingPolicy(policies=[policy])


def _no_breakers(max_requests: int = 0, max_pending: int = 0, retries: Retries | None = None) -> CircuitBreakers:
    """Limits out of the way, but for those that are configured; 0 stands for none.

    Envoy's defaults (1,024 requests, 3 retries at a time) would refuse long streams and the retries that an
    engine's death needs; how much a pool takes on is the sidecar's decision.
    """
    return CircuitBreakers(
        thresholds=[
            CircuitBreakersThresholds(
                max_connections=_UNLIMITED,
                max_pending_requests=max_pending or _UNLIMITED,
                max_requests=max_requests or _UNLIMITED,
                max_retries=_UNLIMITED,
                retry_budget=_budget(retries) if retries else None,
            )
        ]
    )


def _budget(retries: Retries) -> CircuitBreakersThresholdsRetryBudget:
    """Retries under way at once. A retry counts until the headers of its answer have come."""
    return CircuitBreakersThresholdsRetryBudget(
        budget_percent=Percent(value=retries.budget_percent), min_retry_concurrency=retries.min_concurrent
    )


def _engine_health() -> HealthCheck:
    """An engine that answers /health with another status than 200 is out at once; a slow one after three misses.

    A busy engine's event loop can be late by a second, hence the patient timeout: connection failures and
    ejection find a dead engine long before.
    """
    return HealthCheck(
        timeout=seconds(3),
        interval=seconds(2),
        interval_jitter=milliseconds(500),
        # Without these two, an engine that was down when Envoy started is looked at once a minute.
        no_traffic_interval=seconds(2),
        no_traffic_healthy_interval=seconds(2),
        unhealthy_threshold=3,
        healthy_threshold=1,
        http_health_check=HealthCheckHttpHealthCheck(path="/health"),
    )


def _engine_outliers(breakers: Breakers) -> OutlierDetection:
    """Eject on failed connections and gateway errors only, for requests that Envoy picks an endpoint for by itself.

    What the sidecar names is not looked at: it has breakers of its own. A 500 or a 4xx is an answer to one request and
    says nothing of the engine; 503 may mean a full queue, so it takes ten in a row.
    """
    return OutlierDetection(
        interval=seconds(1),
        base_ejection_time=seconds(breakers.open_s),
        max_ejection_time=seconds(max(breakers.open_s, breakers.max_open_s)),
        max_ejection_percent=round(100 * breakers.max_open_share),
        enforcing_consecutive_5xx=0,
        enforcing_success_rate=0,
        enforcing_failure_percentage=0,
        consecutive_gateway_failure=10,
        enforcing_consecutive_gateway_failure=100,
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure=2,
        enforcing_consecutive_local_origin_failure=100,
        enforcing_local_origin_success_rate=0,
    )


def _workers(config: Config) -> Cluster:
    sidecar = config.gateway.sidecar
    addresses = worker_addresses(sidecar.hosts, sidecar.workers, sidecar.worker_port, sidecar.socket_dir)
    cluster = _sidecar_cluster(WORKERS_CLUSTER, addresses)
    # Streams live as long as requests do, so counting them spreads better than taking turns.
    cluster.load_balancing_policy = _policy("envoy.load_balancing_policies.least_request", LeastRequest())
    # `readiness` goes off first when a worker stops, so no new stream meets a closing socket. Until
    # a frozen worker is found out, every request that it gets waits `message_timeout_ms` and goes without a pick: with
    # one second here instead of a half, half as many more did (two hosts, workers killed and frozen for 90 s).
    cluster.health_checks = [
        HealthCheck(
            timeout=seconds(HEALTH_CHECK_S),
            interval=seconds(HEALTH_CHECK_S),
            no_traffic_interval=seconds(HEALTH_CHECK_S),
            no_traffic_healthy_interval=seconds(HEALTH_CHECK_S),
            unhealthy_threshold=NOT_READY_AFTER,
            healthy_threshold=1,
            grpc_health_check=HealthCheckGrpcHealthCheck(service_name="readiness", authority=WORKERS_CLUSTER),
        )
    ]
    # One failed connection is enough: the next worker is as good, and health checks bring the lost one back.
    cluster.outlier_detection = ejection_at_once()
    return cluster


def _keeper(config: Config) -> Cluster:
    sidecar = config.gateway.sidecar
    cluster = _sidecar_cluster(KEEPER_CLUSTER, keeper_addresses(sidecar.hosts, sidecar.keeper_port, sidecar.socket_dir))
    cluster.load_balancing_policy = _policy("envoy.load_balancing_policies.round_robin", RoundRobin())
    return cluster


def _sidecar_cluster(name: str, addresses: list[Address]) -> Cluster:
    on_this_host = addresses[0].pipe is not None
    return Cluster(
        name=name,
        type=ClusterDiscoveryType.STATIC if on_this_host else ClusterDiscoveryType.STRICT_DNS,
        # `localhost` is ::1 first for many resolvers, while the sidecar listens on 127.0.0.1.
        dns_lookup_family=ClusterDnsLookupFamily.V4_PREFERRED,
        connect_timeout=milliseconds(250) if on_this_host else seconds(1),
        load_assignment=ClusterLoadAssignment(
            cluster_name=name,
            endpoints=[
                LocalityLbEndpoints(
                    lb_endpoints=[LbEndpoint(endpoint=Endpoint(address=address)) for address in addresses]
                )
            ],
        ),
        # No healthy host fails at once, and fail-open takes over; the default would try dead ones in turn.
        common_lb_config=ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=0.0)),
        circuit_breakers=_no_breakers(),
        typed_extension_protocol_options={
            _HTTP_OPTIONS: Any.pack(
                HttpProtocolOptions(
                    explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
                        http2_protocol_options=Http2ProtocolOptions(
                            initial_stream_window_size=FLOW_WINDOW,
                            initial_connection_window_size=16 * FLOW_WINDOW,
                            # Finds a host that vanished without closing its connections.
                            connection_keepalive=KeepaliveSettings(interval=seconds(10), timeout=seconds(5)),
                        )
                    )
                )
            )
        },
    )

"""Renders who may use the gateway: API keys, which the sidecar checks, and JSON Web Tokens, which Envoy checks.

Either way the tenant is a header that this side sets; what a client says of it was removed before. The client's key or
token goes no further than here unless `gateway.auth.forward_key` says so.
"""

from urllib.parse import urlsplit

from envoy_data_plane.envoy.config.cluster.v3 import Cluster, ClusterDiscoveryType, ClusterDnsLookupFamily
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    ApiVersion,
    DataSource,
    HttpUri,
    SocketAddress,
    TransportSocket,
)
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.config.rbac.v3 import Permission, Policy, Principal, RbacAction
from envoy_data_plane.envoy.config.rbac.v3 import Rbac as Rules
from envoy_data_plane.envoy.config.route.v3 import HeaderMatcher, RouteMatch
from envoy_data_plane.envoy.extensions.filters.http.ext_authz.v3 import ExtAuthz
from envoy_data_plane.envoy.extensions.filters.http.jwt_authn.v3 import (
    JwksAsyncFetch,
    JwtAuthentication,
    JwtClaimToHeader,
    JwtHeader,
    JwtProvider,
    JwtRequirement,
    JwtRequirementOrList,
    RemoteJwks,
    RequirementRule,
)
from envoy_data_plane.envoy.extensions.filters.http.rbac.v3 import Rbac
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CommonTlsContext,
    SubjectAltNameMatcher,
    SubjectAltNameMatcherSanType,
    UpstreamTlsContext,
)
from envoy_data_plane.envoy.type.matcher.v3 import ListStringMatcher, StringMatcher
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Any, Empty

from extproc.config import WORKERS_CLUSTER, Config, is_ip
from extproc.config_gateway import JWKS_CLUSTER, Jwt
from extproc.envoy.contract import KEY_HEADERS
from extproc.envoy.render_parts import grpc_service, milliseconds, reconnect, seconds
from extproc.request.shapes import TENANT_HEADER

_PROVIDER = "clients"
_JWKS_TIMEOUT_S = 5
_JWKS_KEEP_S = 600


def auth_filters(config: Config) -> list[HttpFilter]:
    """The filters that let a request in, first to last; none where everybody may come in."""
    auth = config.gateway.auth
    filters = []
    if auth.jwt.jwks:
        filters.append(_filter("envoy.filters.http.jwt_authn", _tokens(config)))
    if auth.keys:
        filters.append(_filter("envoy.filters.http.ext_authz", _keys(config)))
    elif auth.jwt.jwks:
        filters.append(_filter("envoy.filters.http.rbac", _somebody()))
    return filters


def hidden_headers(config: Config) -> list[str]:
    """Request headers that the engine does not get."""
    auth = config.gateway.auth
    return list(KEY_HEADERS) if (auth.keys or auth.jwt.jwks) and not auth.forward_key else []


def jwks_clusters(config: Config) -> list[Cluster]:
    """The cluster that public keys come from; none when they come from a file."""
    jwt = config.gateway.auth.jwt
    url = urlsplit(jwt.jwks)
    host = url.hostname
    if not host:
        return []
    endpoint = Endpoint(address=Address(socket_address=SocketAddress(address=host, port_value=_port(jwt.jwks))))
    return [
        Cluster(
            name=JWKS_CLUSTER,
            type=ClusterDiscoveryType.STRICT_DNS,
            dns_lookup_family=ClusterDnsLookupFamily.V4_PREFERRED,
            connect_timeout=seconds(_JWKS_TIMEOUT_S),
            load_assignment=ClusterLoadAssignment(
                cluster_name=JWKS_CLUSTER,
                endpoints=[LocalityLbEndpoints(lb_endpoints=[LbEndpoint(endpoint=endpoint)])],
            ),
            transport_socket=_trusting(jwt, host) if url.scheme == "https" else None,
        )
    ]


def _port(url: str) -> int:
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def _trusting(jwt: Jwt, host: str) -> TransportSocket:
    """TLS to the server of the public keys: its certificate must be of a known authority, and for its name."""
    kind = SubjectAltNameMatcherSanType
    name = SubjectAltNameMatcher(
        san_type=kind.IP_ADDRESS if is_ip(host) else kind.DNS, matcher=StringMatcher(exact=host)
    )
    trusted = CertificateValidationContext(trusted_ca=DataSource(filename=jwt.ca), match_typed_subject_alt_names=[name])
    context = UpstreamTlsContext(
        common_tls_context=CommonTlsContext(validation_context=trusted), sni="" if is_ip(host) else host
    )
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=Any.pack(context))


def _tokens(config: Config) -> JwtAuthentication:
    """Tokens in `Authorization: Bearer`. Where keys are taken too, what is no good token may still be a good key."""
    auth = config.gateway.auth
    required = JwtRequirement(provider_name=_PROVIDER)
    if auth.keys:
        either = [required, JwtRequirement(allow_missing_or_failed=Empty())]
        required = JwtRequirement(requires_any=JwtRequirementOrList(requirements=either))
    return JwtAuthentication(
        providers={_PROVIDER: _provider(auth.jwt, forward=auth.forward_key)},
        rules=[RequirementRule(match=RouteMatch(prefix="/"), requires=required)],
    )


def _provider(jwt: Jwt, *, forward: bool) -> JwtProvider:
    remote = urlsplit(jwt.jwks).scheme in {"http", "https"}
    provider = JwtProvider(
        issuer=jwt.issuer,
        audiences=list(jwt.audiences),
        require_expiration=True,
        forward=forward,
        # Named, or a token would be looked for in the query as well, where logs keep it.
        from_headers=[JwtHeader(name="Authorization", value_prefix="Bearer ")],
        claim_to_headers=[JwtClaimToHeader(header_name=TENANT_HEADER, claim_name=jwt.tenant_claim)],
    )
    if remote:
        provider.remote_jwks = RemoteJwks(
            http_uri=HttpUri(uri=jwt.jwks, cluster=JWKS_CLUSTER, timeout=seconds(_JWKS_TIMEOUT_S)),
            cache_duration=seconds(_JWKS_KEEP_S),
            # Fetched before they are needed, and Envoy listens even while they cannot be had: keys still work.
            async_fetch=JwksAsyncFetch(fast_listener=True),
        )
    else:
        # Read once: with `watched_directory`, a file that was moved over it was not read in a minute (1.40).
        provider.local_jwks = DataSource(filename=jwt.jwks)
    return provider


def _keys(config: Config) -> ExtAuthz:
    """The sidecar compares hashes: Envoy's own filter for keys wants them in the clear, in its configuration."""
    timeout_ms = config.gateway.message_timeout_ms
    service = grpc_service(WORKERS_CLUSTER, retries=reconnect(tries=2, longest_ms=timeout_ms))
    service.timeout = milliseconds(timeout_ms)
    names = [*KEY_HEADERS, TENANT_HEADER]
    return ExtAuthz(
        grpc_service=service,
        transport_api_version=ApiVersion.V3,
        failure_mode_allow=config.gateway.auth.fail_open,
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
        allowed_headers=ListStringMatcher(patterns=[StringMatcher(exact=name) for name in names]),
        # Two headers of one name stay two values: joined, neither would be a key.
        encode_raw_headers=True,
    )


def _somebody() -> Rbac:
    """A good token is not enough: it must name a tenant."""
    named = HeaderMatcher(name=TENANT_HEADER, present_match=True)
    policy = Policy(permissions=[Permission(any=True)], principals=[Principal(header=named)])
    return Rbac(rules=Rules(action=RbacAction.ALLOW, policies={"tenant": policy}))


def _filter(name: str, message: JwtAuthentication | ExtAuthz | Rbac) -> HttpFilter:
    return HttpFilter(name=name, typed_config=Any.pack(message))

"""Renders the public listener and its HTTP connection manager."""

from pathlib import Path

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as Mutation
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.config.core.v3 import (
    Http2ProtocolOptions,
    HttpProtocolOptions,
    HttpProtocolOptionsHeadersWithUnderscoresAction,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerCodecType,
    HttpConnectionManagerHcmAccessLogOptions,
    HttpConnectionManagerPathWithEscapedSlashesAction,
    HttpConnectionManagerServerHeaderTransformation,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import HeaderMutation
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
from envoy_data_plane.google.protobuf import Any

from extproc.config import Config
from extproc.config_relay import AVOID
from extproc.envoy.contract import CAPTURE_HEADER, DESTINATION, METADATA, ONCE, POOL, REASON, SHADOW_HEADER
from extproc.envoy.render_filters import ATTEMPTS_EVERY_S, access_logs, http_filters
from extproc.envoy.render_parts import FLOW_WINDOW, extension, seconds, socket_address
from extproc.envoy.render_replies import local_replies
from extproc.envoy.render_routes import routes
from extproc.envoy.render_tls import transport_socket
from extproc.request.shapes import PRIORITY_HEADER, TENANT_HEADER

FORGEABLE = (POOL, TENANT_HEADER, REASON, AVOID, ONCE, SHADOW_HEADER, CAPTURE_HEADER)
"""Internal headers that a client may not set; those that begin with `DESTINATION` go as well."""

_HEADERS_TIMEOUT_S = 10
READ_BUFFER = 64 * 1024


def listener(config: Config, folder: Path | None = None) -> Listener:
    """The one listener that clients reach; `folder` is where the files of `render_tls.secrets` lie."""
    return Listener(
        name="public",
        address=socket_address(config.gateway.listen),
        # Request bodies have their own limit on the route. This is what is read at once, and what a slow reader of
        # an answer holds in memory; times 1,032 it is also what one read of a gzip bomb can become.
        per_connection_buffer_limit_bytes=READ_BUFFER,
        filter_chains=[
            FilterChain(
                transport_socket=transport_socket(config, folder),
                filters=[
                    Filter(name="envoy.filters.network.http_connection_manager", typed_config=Any.pack(manager(config)))
                ],
            )
        ],
    )


def manager(config: Config) -> HttpConnectionManager:
    """How requests of clients are read, decided and answered."""
    timeouts, gateway = config.timeouts, config.gateway
    return HttpConnectionManager(
        stat_prefix="public",
        codec_type=HttpConnectionManagerCodecType.AUTO,
        route_config=routes(config),
        http_filters=http_filters(config),
        access_log=access_logs(config),
        access_log_options=HttpConnectionManagerHcmAccessLogOptions(
            access_log_flush_interval=seconds(ATTEMPTS_EVERY_S)
        ),
        local_reply_config=local_replies(config),
        early_header_mutation_extensions=[_strip_forged_headers(config)],
        common_http_protocol_options=HttpProtocolOptions(
            # First byte in to last byte out: the route's own timeout starts only once the request has arrived.
            # A rule that allows more than the rest is kept within by the route's alone.
            max_stream_duration=seconds(longest_s) if (longest_s := timeouts.longest_request_s) else None,
            # Codex names its session in `session_id`.
            headers_with_underscores_action=HttpProtocolOptionsHeadersWithUnderscoresAction.ALLOW,
            max_headers_count=gateway.max_header_count,
        ),
        max_request_headers_kb=gateway.max_headers_kb,
        http2_protocol_options=Http2ProtocolOptions(
            max_concurrent_streams=1000,
            initial_stream_window_size=FLOW_WINDOW,
            initial_connection_window_size=4 * FLOW_WINDOW,
        ),
        stream_idle_timeout=seconds(timeouts.stream_idle_s),
        request_headers_timeout=seconds(_HEADERS_TIMEOUT_S),
        request_timeout=seconds(gateway.receive_s) if gateway.receive_s else None,
        use_remote_address=True,
        normalize_path=True,
        merge_slashes=True,
        # Model names such as `org%2Fname` are part of paths.
        path_with_escaped_slashes_action=HttpConnectionManagerPathWithEscapedSlashesAction.KEEP_UNCHANGED,
        # The answer does not tell which engine software wrote it.
        server_header_transformation=HttpConnectionManagerServerHeaderTransformation.OVERWRITE,
        server_name=METADATA,
        always_set_request_id_in_response=True,
    )


def _strip_forged_headers(config: Config) -> TypedExtensionConfig:
    """Remove what only Warmpath may say, before any filter or route reads it."""
    names = FORGEABLE if config.overload.client_priority else (*FORGEABLE, PRIORITY_HEADER)
    by_name = [Mutation(remove=name) for name in names]
    by_prefix = Mutation(remove_on_match=HeaderMutationRemoveOnMatch(key_matcher=StringMatcher(prefix=DESTINATION)))
    return extension(
        "envoy.http.early_header_mutation.header_mutation", HeaderMutation(mutations=[*by_name, by_prefix])
    )

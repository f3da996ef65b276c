"""Renders the inner listener: the way from the relay back in, which nobody else can reach."""

import msgspec
from envoy_data_plane.envoy.config.core.v3 import HeaderValue, HeaderValueOption, HeaderValueOptionHeaderAppendAction
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.google.protobuf import Any

from extproc.config import Config, Relay
from extproc.config_relay import SERVED_BY
from extproc.envoy.render_filters import AI_PROTOCOL_MANAGER, http_filters
from extproc.envoy.render_listener import READ_BUFFER, manager
from extproc.envoy.render_parts import EXT_PROC
from extproc.envoy.render_relay import inner_address
from extproc.envoy.render_routes import routes
from extproc.envoy.render_shadow import CAPTURE

_FILTERS = (EXT_PROC, CAPTURE, AI_PROTOCOL_MANAGER, "envoy.filters.http.router")
"""Who may come in, how much, and what a body is packed in: all that was settled on the public listener."""


def inner_listeners(config: Config) -> list[Listener]:
    """The listener, when there is a relay.

    It trusts the headers that the public one set, the tenant's above all: it is a Unix socket or on the loopback.
    """
    if not config.relay.enabled:
        return []
    direct = msgspec.structs.replace(config, relay=Relay())
    inner = manager(direct)
    inner.stat_prefix = "inner"
    inner.http_filters = [one for one in http_filters(direct) if one.name in _FILTERS]
    inner.early_header_mutation_extensions = []
    # Addresses and ids of the client's request are those that the public listener noted.
    inner.use_remote_address = False
    inner.preserve_external_request_id = True
    inner.skip_xff_append = True
    served = HeaderValueOption(
        header=HeaderValue(key=SERVED_BY, value="%UPSTREAM_REMOTE_ADDRESS%"),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )
    inner.route_config = routes(direct)
    inner.route_config.response_headers_to_add.append(served)
    return [
        Listener(
            name="inner",
            address=inner_address(config),
            per_connection_buffer_limit_bytes=READ_BUFFER,
            # Clients are counted where they come in.
            ignore_global_conn_limit=True,
            filter_chains=[
                FilterChain(
                    filters=[Filter(name="envoy.filters.network.http_connection_manager", typed_config=Any.pack(inner))]
                )
            ],
        )
    ]

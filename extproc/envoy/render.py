"""Renders Envoy's whole static configuration from `warmpath.yaml`.

Built from typed messages, so that a misspelt field fails here and not in Envoy. Importing them takes about a
second: workers and the keeper never import this module.
"""

from typing import Any as Json
from typing import cast

import yaml
from betterproto2 import Casing
from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources
from envoy_data_plane.envoy.config.core.v3 import Node

from extproc.config import Config
from extproc.envoy.render_clusters import clusters
from extproc.envoy.render_filters import AI_PROTOCOL_MANAGER, AI_PROTOCOL_MESSAGES, AI_PROTOCOL_SETTINGS
from extproc.envoy.render_listener import listener
from extproc.envoy.render_notes import HEADER, annotate
from extproc.envoy.render_parts import socket_address
from extproc.envoy.render_routes import MESSAGES


def render(config: Config, *, node_id: str = "warmpath") -> dict[str, Json]:
    """Build Envoy's bootstrap as plain values in proto3's JSON form, snake case.

    Args:
        config: the checked configuration.
        node_id: name under which this Envoy asks for endpoints.
    """
    bootstrap = Bootstrap(
        node=Node(id=node_id, cluster="warmpath"),
        admin=Admin(address=socket_address(config.gateway.admin)),
        static_resources=BootstrapStaticResources(listeners=[listener(config)], clusters=clusters(config)),
    )
    rendered: dict[str, Json] = bootstrap.to_dict(casing=cast("Casing", _proto_name))
    manager = rendered["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    [filter_] = [one for one in manager["http_filters"] if one["name"] == AI_PROTOCOL_MANAGER]
    filter_["typed_config"].update(AI_PROTOCOL_SETTINGS)
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        if route["name"].endswith(MESSAGES):
            route["typed_per_filter_config"] = {AI_PROTOCOL_MANAGER: AI_PROTOCOL_MESSAGES}
    return rendered


def _proto_name(field: str) -> str:
    """The field's own name: betterproto2's snake case writes `consecutive_5xx` as `consecutive_5_xx`."""
    return field


def to_yaml(rendered: dict[str, Json]) -> str:
    """Write what `render` returned as commented YAML."""
    text = yaml.dump(rendered, Dumper=_NoAliases, sort_keys=False, width=110, allow_unicode=True)
    return HEADER + annotate(text)


class _NoAliases(yaml.SafeDumper):
    """Writes equal parts out instead of pointing at the first."""

    def ignore_aliases(self, _data: Json) -> bool:
        """See PyYAML."""
        return True

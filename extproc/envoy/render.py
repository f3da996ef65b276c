"""Renders Envoy's whole static configuration from `warmpath.yaml`.

Built from typed messages, so that a misspelt field fails here and not in Envoy. Importing them takes about a
second: workers and the keeper never import this module.
"""

from pathlib import Path
from typing import Any as Json

import yaml
from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources
from envoy_data_plane.envoy.config.core.v3 import Node

from extproc.config import Config
from extproc.envoy.render_clusters import clusters
from extproc.envoy.render_filters import AI_PROTOCOL_MANAGER, AI_PROTOCOL_MESSAGES, AI_PROTOCOL_SETTINGS
from extproc.envoy.render_inner import inner_listeners
from extproc.envoy.render_listener import listener
from extproc.envoy.render_notes import HEADER, annotate
from extproc.envoy.render_overload import overload_manager
from extproc.envoy.render_parts import proto_name, socket_address
from extproc.envoy.render_routes import MESSAGES
from extproc.envoy.render_tls import secrets


def render(config: Config, *, node_id: str = "warmpath", folder: Path | None = None) -> dict[str, Json]:
    """Build Envoy's bootstrap as plain values in proto3's JSON form, snake case.

    Args:
        config: the checked configuration.
        node_id: name under which this Envoy asks for endpoints.
        folder: absolute path of where the files of `render_tls.secrets` lie; `write` puts them there.

    Raises:
        ConfigError: `gateway.tls` is set and there is no folder.
    """
    bootstrap = Bootstrap(
        node=Node(id=node_id, cluster="warmpath"),
        admin=Admin(address=socket_address(config.gateway.admin), ignore_global_conn_limit=True),
        static_resources=BootstrapStaticResources(
            listeners=[listener(config, folder), *inner_listeners(config)], clusters=clusters(config)
        ),
        overload_manager=overload_manager(config.gateway),
    )
    rendered: dict[str, Json] = bootstrap.to_dict(casing=proto_name)
    for one in rendered["static_resources"]["listeners"]:
        _read_usage(one["filter_chains"][0]["filters"][0]["typed_config"])
    return rendered


def _read_usage(manager: dict[str, Json]) -> None:
    """Put into a listener what its message classes have no fields for yet."""
    [filter_] = [one for one in manager["http_filters"] if one["name"] == AI_PROTOCOL_MANAGER]
    filter_["typed_config"].update(AI_PROTOCOL_SETTINGS)
    for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
        if route["name"].endswith(MESSAGES):
            route.setdefault("typed_per_filter_config", {})[AI_PROTOCOL_MANAGER] = AI_PROTOCOL_MESSAGES


def write(config: Config, output: Path) -> None:
    """Write Envoy's configuration, and beside it the files that it names. Raises OSError when that fails."""
    folder = output.absolute().parent
    for name, text in secrets(config).items():
        (folder / name).write_text(text, encoding="utf-8")
    output.write_text(to_yaml(render(config, folder=folder)), encoding="utf-8")


def to_yaml(rendered: dict[str, Json]) -> str:
    """Write what `render` returned as commented YAML."""
    text = yaml.dump(rendered, Dumper=_NoAliases, sort_keys=False, width=110, allow_unicode=True)
    return HEADER + annotate(text)


class _NoAliases(yaml.SafeDumper):
    """Writes equal parts out instead of pointing at the first."""

    def ignore_aliases(self, _data: Json) -> bool:
        """See PyYAML."""
        return True

"""Writes the folder `envoy/`: the whole rendered configuration, and one commented file a concern.

The single files are for those who keep an Envoy configuration of their own and want one part of this one.

    python -m extproc.envoy.render_files docker/warmpath.yaml envoy
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any as Json

import yaml

from extproc.config_file import load
from extproc.envoy.render import render, to_yaml
from extproc.envoy.render_notes import annotate

Rendered = dict[str, Json]
Part = tuple[str, Callable[[Rendered], Json]]


def _listener(rendered: Rendered) -> Json:
    return rendered["static_resources"]["listeners"][0]


def _manager(rendered: Rendered) -> Json:
    return _listener(rendered)["filter_chains"][0]["filters"][0]["typed_config"]


def _of_manager(*keys: str) -> Callable[[Rendered], Json]:
    return lambda rendered: {key: _manager(rendered)[key] for key in keys}


def _filter(name: str) -> Callable[[Rendered], Json]:
    return lambda rendered: [one for one in _manager(rendered)["http_filters"] if one["name"] == name]


def _cluster(index: int) -> Callable[[Rendered], Json]:
    return lambda rendered: [rendered["static_resources"]["clusters"][index]]


def _body_limit(rendered: Rendered) -> Json:
    host = _manager(rendered)["route_config"]["virtual_hosts"][0]
    return {
        "per_connection_buffer_limit_bytes": _listener(rendered)["per_connection_buffer_limit_bytes"],
        "request_body_buffer_limit": host["request_body_buffer_limit"],
    }


def _request_limits(rendered: Rendered) -> Json:
    manager = _manager(rendered)
    return {
        "max_request_headers_kb": manager["max_request_headers_kb"],
        "common_http_protocol_options": {
            "max_headers_count": manager["common_http_protocol_options"]["max_headers_count"]
        },
        "request_headers_timeout": manager["request_headers_timeout"],
        "request_timeout": manager["request_timeout"],
    }


PARTS: Mapping[str, Part] = {
    "forged-headers": (
        "Field of the HTTP connection manager: what only Warmpath may say is removed first of all.",
        _of_manager("early_header_mutation_extensions"),
    ),
    "body-limit": (
        "Fields of the listener and of the virtual host: a large body is held, a small buffer a connection is enough.",
        _body_limit,
    ),
    "request-limits": (
        "Fields of the HTTP connection manager: headers, and the time that a request may take to arrive.",
        _request_limits,
    ),
    "overload": (
        "Field of the bootstrap: connections and memory of all clients together.",
        lambda rendered: {"overload_manager": rendered["overload_manager"]},
    ),
    "decompression": (
        "HTTP filter before ext_proc: sidecar and engine see plain JSON.",
        _filter("envoy.filters.http.decompressor"),
    ),
    "ext-proc": (
        "HTTP filter: the sidecar. It needs the cluster of workers-cluster.yaml.",
        _filter("envoy.filters.http.ext_proc"),
    ),
    "token-usage": (
        "HTTP filter before the router: token usage of answers becomes metadata of the access log.",
        _filter("envoy.filters.http.ai_protocol_manager"),
    ),
    "access-log": (
        "Fields of the HTTP connection manager: finished requests, and running ones that are tried anew.",
        _of_manager("access_log", "access_log_options"),
    ),
    "error-answers": (
        "Field of the HTTP connection manager: Envoy's own errors as JSON.",
        _of_manager("local_reply_config"),
    ),
    "routes": (
        "Field of the HTTP connection manager: the sidecar's pool, the fallback without a sidecar, retries.",
        _of_manager("route_config"),
    ),
    "pool-cluster": ("A cluster a pool, named like it.", _cluster(0)),
    "workers-cluster": ("The cluster of ext_proc and access log.", _cluster(-2)),
    "keeper-cluster": ("The cluster of endpoint discovery.", _cluster(-1)),
}


def files(rendered: Rendered) -> dict[str, str]:
    """Names and contents of the folder's files."""
    written = {"envoy.yaml": to_yaml(rendered)}
    for name, (note, pick) in PARTS.items():
        text = yaml.safe_dump(pick(rendered), sort_keys=False, width=110, allow_unicode=True)
        written[f"{name}.yaml"] = f"# {note}\n{annotate(text)}"
    return written


def main(config: str, folder: str) -> None:
    """Write every file."""
    for name, text in files(render(load(Path(config)))).items():
        (Path(folder) / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

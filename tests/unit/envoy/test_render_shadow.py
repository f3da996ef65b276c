"""What is rendered for shadows: only what the configuration asks for, and what Envoy takes."""

from typing import Any

import msgspec
import pytest

from extproc.config import Config
from extproc.config_file import loads
from extproc.config_rollouts import CAPTURE_CLUSTER
from extproc.envoy.render import render, to_yaml
from extproc.envoy.render_shadow import CAPTURE, has_shadow, mirrored_pools
from extproc.envoy.validate import envoy_binary, validate


def config(mode: str = "", body_mode: str = "buffered", relay: bool = False, hosts: str = "[localhost]") -> Config:
    """A model with two versions, the second of which is a shadow of this mode."""
    shadow = f"shadow: {{version: new, mode: {mode}, max_concurrent: 6}}" if mode else ""
    return loads(
        f"models:\n  m:\n    versions: {{old: {{pool: old, weight: 1}}, new: {{pool: new}}}}\n    {shadow}\n"
        'pools: {old: {endpoints: ["10.0.0.1:80"]}, new: {endpoints: ["10.0.0.2:80"]}}\n'
        f"gateway: {{body_mode: {body_mode}, sidecar: {{workers: 2, hosts: {hosts}}}}}\n"
        f"relay: {{enabled: {str(relay).lower()}}}\n"
    )


def clusters(rendered: dict[str, Any]) -> dict[str, Any]:
    """Clusters by name."""
    return {each["name"]: each for each in rendered["static_resources"]["clusters"]}


def managers(rendered: dict[str, Any]) -> list[dict[str, Any]]:
    """HTTP connection managers of all listeners."""
    return [
        each["filter_chains"][0]["filters"][0]["typed_config"] for each in rendered["static_resources"]["listeners"]
    ]


def test_nothing_is_rendered_unasked() -> None:
    """Without a shadow there is no filter, cluster or route for one."""
    rendered = render(config())
    assert set(clusters(rendered)) == {"old", "new", "warmpath_workers", "warmpath_keeper"}
    [manager] = managers(rendered)
    assert CAPTURE not in [each["name"] for each in manager["http_filters"]]
    assert "request_mirror_policies" not in to_yaml(rendered)


def test_copies_go_to_a_cluster_of_their_own() -> None:
    """It has the workers' addresses and health checks, and a larger buffer; the filter stands behind the decision's."""
    rendered = render(config("compare", relay=True))
    found = clusters(rendered)
    own, workers = found[CAPTURE_CLUSTER], found["warmpath_workers"]
    assert own["health_checks"] == workers["health_checks"]
    assert own["load_assignment"]["endpoints"] == workers["load_assignment"]["endpoints"]
    assert own["per_connection_buffer_limit_bytes"] == 16 << 20
    for manager in managers(rendered):
        names = [each["name"] for each in manager["http_filters"]]
        assert names.index(CAPTURE) == names.index("envoy.filters.http.ext_proc") + 1
        assert "x-warmpath-capture" in manager["route_config"]["request_headers_to_remove"]
    assert not has_shadow(config("compare"), "mirror")


@pytest.mark.parametrize(("hosts", "most"), [("[localhost]", 12), ("[a, b, c]", 36)])
def test_what_is_mirrored_has_limits_of_its_own(hosts: str, most: int) -> None:
    """As many at once as all workers together may send; no retries, and other endpoints than the client's pick."""
    told = config("mirror", hosts=hosts)
    assert mirrored_pools(told) == {"new": most}
    rendered = render(told)
    own = clusters(rendered)["warmpath_shadow_new"]
    [limits] = own["circuit_breakers"]["thresholds"]
    assert (limits["max_requests"], limits["max_pending_requests"]) == (most, most // 4)
    assert own["eds_cluster_config"]["service_name"] == "new"
    [policy] = own["load_balancing_policy"]["policies"]
    assert policy["typed_extension_config"]["name"].endswith("least_request")
    [manager] = managers(rendered)
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    mirrored = [each for each in routes if "request_mirror_policies" in each["route"]]
    assert {each["name"] for each in mirrored} == {"mirrored new", "mirrored new-messages"}
    picked = next(index for index, each in enumerate(routes) if each["name"].startswith("picked"))
    assert max(routes.index(each) for each in mirrored) < picked
    assert "x-warmpath-shadow" in manager["route_config"]["request_headers_to_remove"]


@pytest.mark.parametrize(("shadow_s", "request_s", "longest"), [(40, 900, "40s"), (300, 20, "20s"), (300, 0, "300s")])
def test_a_shadow_that_never_answers_holds_no_place_for_good(shadow_s: float, request_s: float, longest: str) -> None:
    """Mirrored requests end after the shadow's own time, and with the longest of a client's at the latest."""
    told = config("mirror")
    model = told.models["m"]
    assert model.shadow is not None
    shadow = msgspec.structs.replace(model.shadow, timeout_s=shadow_s)
    told = msgspec.structs.replace(
        told,
        models={"m": msgspec.structs.replace(model, shadow=shadow)},
        timeouts=msgspec.structs.replace(told.timeouts, request_s=request_s),
    )
    [options] = clusters(render(told))["warmpath_shadow_new"]["typed_extension_protocol_options"].values()
    assert options["common_http_protocol_options"]["max_stream_duration"] == longest


@pytest.mark.parametrize("mode", ["mirror", "compare"])
@pytest.mark.parametrize("body_mode", ["buffered", "duplex"])
@pytest.mark.parametrize("relay", [False, True])
def test_envoy_takes_it(mode: str, body_mode: str, relay: bool) -> None:
    """The real binary reads it all."""
    validate(to_yaml(render(config(mode, body_mode, relay))), envoy_binary())

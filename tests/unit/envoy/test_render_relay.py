"""The way to the relay and back, as it is rendered; `tests/acceptance/governance` has how it behaves."""

from typing import Any

import pytest

from extproc.config_file import loads
from extproc.envoy.render import render, to_yaml
from extproc.envoy.validate import envoy_binary, validate

SMALL = 'models: {m: {pool: p}}\npools: {p: {endpoints: ["10.0.0.1:8000"]}}\n'
ON = "relay: {enabled: true, paths: [/a/v1, /]}\n"
UNIX = "gateway: {sidecar: {socket_dir: /run/wp}}\n"
GUARDED = (
    "gateway: {auth: {keys: /etc/wp/keys.yaml}}\n"
    "rate_limits: {rules: [{tenant: '*', requests_per_minute: 5}], before_body: true, local_requests_per_s: 9}\n"
)


def rendered(more: str) -> dict[str, Any]:
    """The bootstrap's static resources."""
    found: dict[str, Any] = render(loads(SMALL + more))["static_resources"]
    return found


def manager(listener: dict[str, Any]) -> dict[str, Any]:
    """The connection manager of a listener."""
    found: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def routes(listener: dict[str, Any]) -> list[dict[str, Any]]:
    """The routes of a listener, in order."""
    found: list[dict[str, Any]] = manager(listener)["route_config"]["virtual_hosts"][0]["routes"]
    return found


def test_without_a_relay_nothing_of_it_is_rendered() -> None:
    """One listener, no cluster, no route, and its settings change nothing."""
    off = rendered("relay: {enabled: false, paths: [/v1]}\n")
    assert off == rendered("")
    assert [one["name"] for one in off["listeners"]] == ["public"]
    assert "warmpath_relay" not in str(off)


def test_the_routes_to_the_relay_stand_first_and_decide_nothing() -> None:
    """By header anywhere, by path unless declined; the sidecar is asked on the way back in."""
    public, _ = rendered(ON)["listeners"]
    asked, below, everywhere, *others = routes(public)
    assert [one["name"] for one in (asked, below, everywhere)] == ["relay", "relay /a/v1", "relay /"]
    assert not any(one["route"].get("cluster") == "warmpath_relay" for one in others)
    for one in (asked, below, everywhere):
        assert one["route"]["cluster"] == "warmpath_relay"
        assert one["typed_per_filter_config"]["envoy.filters.http.ext_proc"]["disabled"] is True
    assert below["match"]["path_separated_prefix"] == "/a/v1"
    assert everywhere["match"]["prefix"] == "/"


def test_the_way_to_the_relay_lasts_as_long_as_any_rule_allows() -> None:
    """A model whose rule allows more than the rest must not be cut off for being relayed; the relay keeps the limit."""
    public, _ = rendered(ON + "timeouts: {request_s: 60, rules: [{model: m, request_s: 600}]}\n")["listeners"]
    assert [one["route"]["timeout"] for one in routes(public)[:3]] == ["600s"] * 3


def test_all_that_a_lost_relay_had_not_begun_to_answer_goes_straight_at_once() -> None:
    """Envoy would let three requests at a time be sent anew, and none that the relay had taken."""
    resources = rendered(ON)
    retry = routes(resources["listeners"][0])[0]["route"]["retry_policy"]
    assert retry["retry_on"].split(",") == ["connect-failure", "refused-stream", "reset"]
    [cluster] = [one for one in resources["clusters"] if one["name"] == "warmpath_relay"]
    [limits] = cluster["circuit_breakers"]["thresholds"]
    assert {name for name, most in limits.items() if most >= 1_000_000} == {
        "max_connections",
        "max_pending_requests",
        "max_requests",
        "max_retries",
    }


def test_the_inner_listener_decides_and_nothing_else() -> None:
    """Keys, limits and forged headers were seen to outside; who the client is must not be lost."""
    public, inner = rendered(ON + GUARDED)["listeners"]
    outside = [one["name"] for one in manager(public)["http_filters"]]
    assert {"envoy.filters.http.ext_authz", "envoy.filters.http.ratelimit"} <= set(outside)
    assert [one["name"] for one in manager(inner)["http_filters"]] == [
        "envoy.filters.http.ext_proc",
        "envoy.filters.http.ai_protocol_manager",
        "envoy.filters.http.router",
    ]
    assert "early_header_mutation_extensions" not in manager(inner)
    assert not manager(inner).get("use_remote_address")
    assert not any(one["name"].startswith("relay") for one in routes(inner))
    [manage] = [one for one in manager(inner)["http_filters"] if "ai_protocol" in one["name"]]
    assert "token_usage" in manage["typed_config"]["response_handling"]


def test_the_relays_headers_are_no_clients() -> None:
    """What the relay tells the sidecar is removed from requests that come in, and what Envoy tells it from answers."""
    public, inner = rendered(ON)["listeners"]
    [stripping] = manager(public)["early_header_mutation_extensions"]
    assert {"remove": "x-warmpath-avoid"} in stripping["typed_config"]["mutations"]
    assert all(one["response_headers_to_remove"] == ["x-warmpath-served"] for one in routes(public)[:3])
    told = manager(inner)["route_config"]["response_headers_to_add"]
    assert {"x-warmpath-served"} <= {one["header"]["key"] for one in told}


@pytest.mark.parametrize(
    ("more", "relay", "inner"),
    [
        ("", {"address": "127.0.0.1", "port_value": 9104}, {"address": "127.0.0.1", "port_value": 9105}),
        (UNIX, {"path": "/run/wp/relay.sock"}, {"path": "/run/wp/inner.sock"}),
    ],
)
def test_the_relay_comes_first_and_the_inner_listener_stands_in(
    more: str, relay: dict[str, Any], inner: dict[str, Any]
) -> None:
    """Envoy's own listener takes over while no relay answers; health checks are for the relay alone."""
    resources = rendered(ON + more)
    [cluster] = [one for one in resources["clusters"] if one["name"] == "warmpath_relay"]
    first, second = cluster["load_assignment"]["endpoints"]
    places = [next(iter(one["lb_endpoints"][0]["endpoint"]["address"].values())) for one in (first, second)]
    assert places == [relay, inner]
    assert (first.get("priority", 0), second["priority"]) == (0, 1)
    assert second["lb_endpoints"][0]["endpoint"]["health_check_config"]["disable_active_health_check"] is True
    [_, listener] = resources["listeners"]
    assert next(iter(listener["address"].values())) == inner


@pytest.mark.parametrize("more", ["", UNIX, GUARDED, "timeouts: {request_s: 0}\n", "retries: {max: 0}\n"])
def test_envoy_accepts_it(more: str) -> None:
    """With whatever else is set."""
    validate(to_yaml(render(loads(SMALL + ON + more))), envoy_binary())

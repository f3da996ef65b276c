"""The rendered Envoy configuration: what of `warmpath.yaml` ends up where. `tests/wire` has its behaviour."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.config_file import load, loads
from extproc.envoy.render import render, to_yaml
from extproc.envoy.render_files import files
from extproc.envoy.render_notes import NOTES, annotate
from extproc.request import session

ROOT = Path(__file__).parents[3]
TWO_POOLS = """
models: {big: {pool: large}, small: {pool: mini}}
pools:
  mini: {endpoints: ["10.0.0.1:8000"]}
  large: {endpoints: ["10.0.0.2:8000"]}
"""


def rendered(more: str = "") -> dict[str, Any]:
    """Render two pools and some more settings."""
    return render(loads(TWO_POOLS + more))


def manager(whole: dict[str, Any]) -> dict[str, Any]:
    """The HTTP connection manager."""
    filters = whole["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    found: dict[str, Any] = filters[0]["typed_config"]
    return found


def routes(whole: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Actions of the routes by name."""
    [host] = manager(whole)["route_config"]["virtual_hosts"]
    return {one["name"]: one["route"] for one in host["routes"]}


def cluster(whole: dict[str, Any], name: str) -> dict[str, Any]:
    """A cluster by name."""
    [found] = [one for one in whole["static_resources"]["clusters"] if one["name"] == name]
    assert isinstance(found, dict)
    return found


def addresses(whole: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Addresses of a cluster that is written out."""
    [locality] = cluster(whole, name)["load_assignment"]["endpoints"]
    return [one["endpoint"]["address"] for one in locality["lb_endpoints"]]


def ext_proc(whole: dict[str, Any]) -> dict[str, Any]:
    """The ext_proc filter."""
    [found] = [one for one in manager(whole)["http_filters"] if one["name"] == "envoy.filters.http.ext_proc"]
    settings: dict[str, Any] = found["typed_config"]
    return settings


def test_the_folder_envoy_is_what_is_rendered() -> None:
    """`envoy/` is generated: python -m extproc.envoy.render_files docker/warmpath.yaml envoy."""
    wanted = files(render(load(ROOT / "docker" / "warmpath.yaml")))
    assert {path.name: path.read_text() for path in (ROOT / "envoy").glob("*.yaml")} == wanted


def test_every_note_is_written_and_changes_no_value() -> None:
    """Comments explain what is there: none is lost, and none becomes part of a value."""
    whole = render(load(ROOT / "docker" / "warmpath.yaml"))
    text = to_yaml(whole)
    assert [note for note in NOTES.values() if f"# {note}\n" not in text] == []
    assert yaml.safe_load(text) == whole


def test_a_note_stands_above_its_line_with_its_indent() -> None:
    """Only the first line that begins so is annotated."""
    assert annotate("a:\n  b: 1\n  b: 2\n", {"b: ": "why"}) == "a:\n  # why\n  b: 1\n  b: 2\n"


def test_every_pool_is_a_cluster_and_the_first_models_pool_is_the_fallback() -> None:
    """The order of `models` decides where requests go without a sidecar, not that of `pools`."""
    whole = rendered()
    names = [one["name"] for one in whole["static_resources"]["clusters"]]
    assert names == ["mini", "large", "warmpath_workers", "warmpath_keeper"]
    assert routes(whole)["fallback"]["cluster"] == "large"
    assert routes(whole)["picked"]["cluster_header"] == "x-warmpath-pool"


def test_usage_of_the_messages_api_is_read_in_its_own_way() -> None:
    """Each route has a twin in front of it for that API alone, which does the same otherwise."""
    [host] = manager(rendered())["route_config"]["virtual_hosts"]
    assert [one["name"] for one in host["routes"]] == ["picked-messages", "picked", "fallback-messages", "fallback"]
    for messages, other in zip(host["routes"][::2], host["routes"][1::2], strict=True):
        assert messages["route"] == other["route"]
        *headers, path_header = messages["match"]["headers"]
        assert headers == other["match"].get("headers", [])
        [settings] = messages["typed_per_filter_config"].values()
        assert settings["response"] == {"llm_protocol": "ANTHROPIC_MESSAGES"}
        assert "typed_per_filter_config" not in other
        assert path_header["name"] == ":path"
        path = re.compile(path_header["string_match"]["safe_regex"]["regex"])
        for one in ("/v1/messages", "/team/v1/messages/", "/v1/messages?beta=true"):
            assert path.fullmatch(one)
        for one in ("/v1/chat/completions", "/v1/messages/count_tokens", "/v1/chat?of=/v1/messages"):
            assert not path.fullmatch(one)


def test_the_fallback_hashes_the_session_headers_that_the_sidecar_reads() -> None:
    """Same headers, same order: a session keeps its endpoint's neighbours when the sidecar dies."""
    hashed = [one["header"]["header_name"] for one in routes(rendered())["fallback"]["hash_policy"]]
    assert hashed == list(session.HEADERS)


def test_workers_and_keeper_are_reached_over_sockets_on_one_host() -> None:
    """With `socket_dir` no TCP port is used."""
    whole = rendered("gateway: {sidecar: {socket_dir: /run/wp, workers: 2}}")
    pipes = [one["pipe"]["path"] for one in addresses(whole, "warmpath_workers")]
    assert pipes == ["/run/wp/worker-0.sock", "/run/wp/worker-1.sock"]
    assert addresses(whole, "warmpath_keeper") == [{"pipe": {"path": "/run/wp/keeper.sock"}}]


def test_workers_and_keepers_of_every_host_are_reached_over_tcp() -> None:
    """Hosts times workers, worker i on `worker_port + i`; one keeper a host."""
    whole = rendered("gateway: {sidecar: {hosts: [a, b], workers: 2, worker_port: 7000, keeper_port: 7100}}")
    reached = [tuple(one["socket_address"].values()) for one in addresses(whole, "warmpath_workers")]
    assert reached == [("a", 7000), ("a", 7001), ("b", 7000), ("b", 7001)]
    assert [tuple(one["socket_address"].values()) for one in addresses(whole, "warmpath_keeper")] == [
        ("a", 7100),
        ("b", 7100),
    ]


@pytest.mark.parametrize(("mode", "body"), [("buffered", "BUFFERED"), ("duplex", "FULL_DUPLEX_STREAMED")])
def test_every_body_mode_keeps_the_lifeline_and_the_answers_away(mode: str, body: str) -> None:
    """Response trailers are asked for, response headers and bodies are not."""
    chosen = ext_proc(rendered(f"gateway: {{body_mode: {mode}, fail_open: false}}"))["processing_mode"]
    assert chosen["request_body_mode"] == body
    assert (chosen["response_header_mode"], chosen["response_trailer_mode"]) == ("SKIP", "SEND")
    assert chosen.get("response_body_mode", "NONE") == "NONE"


def test_failing_closed_and_the_message_timeout_are_explicit() -> None:
    """Envoy's defaults (fail closed, 200 ms) are never relied on."""
    chosen = ext_proc(rendered("gateway: {fail_open: false, message_timeout_ms: 2500}"))
    assert not chosen.get("failure_mode_allow", False)
    assert chosen["message_timeout"] == "2.500s"
    assert ext_proc(rendered())["failure_mode_allow"] is True


def test_only_limits_of_stages_have_running_requests_told() -> None:
    """Without one, Envoy writes entries of requests at a further attempt alone, and no tag that nobody reads."""
    for more, told in (("", False), ("timeouts: {stall_s: 5}", True), ("timeouts: {rules: [{headers_s: 1}]}", True)):
        ended, running = (
            one for one in manager(rendered(more))["access_log"] if one["name"] == "envoy.access_loggers.http_grpc"
        )
        expression = running["filter"]["and_filter"]["filters"][1]["extension_filter"]["typed_config"]["expression"]
        assert expression.startswith("upstream.request_attempt_count > 1")
        assert ("stall_s" in expression, "first_token_s" in expression) == (told, told)
        tags = [one["tag"] for one in ended["typed_config"]["common_config"]["custom_tags"]]
        assert tags == ["first_body_us", *(["emitted_s", "sent_us"] if told else [])]
        assert ended["typed_config"] == running["typed_config"], "two loggers would tell two workers"
        rules = ext_proc(rendered(more))["mutation_rules"]
        assert rules.get("allow_envoy", False) == told


def test_the_longest_time_of_any_rule_bounds_streams() -> None:
    """Envoy's limit on all streams lets through what a rule allows; the route's is the default."""
    whole = rendered("timeouts: {request_s: 60, rules: [{request_s: 90}]}")
    assert manager(whole)["common_http_protocol_options"]["max_stream_duration"] == "90s"
    assert routes(whole)["picked"]["timeout"] == "60s"
    unlimited = rendered("timeouts: {request_s: 60, rules: [{request_s: 0}]}")
    assert "max_stream_duration" not in manager(unlimited)["common_http_protocol_options"]


def test_retries_have_a_budget() -> None:
    """Of pools alone: the sidecar's own clusters are retried otherwise."""
    whole = rendered("retries: {budget_percent: 30, min_concurrent: 7}")
    [limits] = cluster(whole, "large")["circuit_breakers"]["thresholds"]
    assert limits["retry_budget"] == {"budget_percent": {"value": 30.0}, "min_retry_concurrency": 7}
    assert "retry_budget" not in cluster(whole, "warmpath_workers")["circuit_breakers"]["thresholds"][0]


def test_zero_retries_leave_no_retry_policy() -> None:
    """A policy with zero retries would still buffer bodies for them."""
    assert "retry_policy" not in routes(rendered("retries: {max: 0}"))["picked"]
    assert routes(rendered("retries: {max: 2}"))["picked"]["retry_policy"]["num_retries"] == 2


def test_zero_timeouts_switch_limits_off() -> None:
    """0 must be written where Envoy's default is another value, and left out where absence means none."""
    whole = rendered("timeouts: {request_s: 0, stream_idle_s: 0}")
    assert manager(whole)["stream_idle_timeout"] == "0s"
    assert routes(whole)["picked"]["timeout"] == "0s"
    assert "max_stream_duration" not in manager(whole)["common_http_protocol_options"]


def test_idle_connections_to_engines_end_before_the_engines_end_them() -> None:
    """VLLM closes idle connections after 5 s; a request must not meet one that is closing."""
    options = cluster(rendered(), "large")["typed_extension_protocol_options"]
    [settings] = options.values()
    assert settings["common_http_protocol_options"]["idle_timeout"] == "4s"


@pytest.mark.parametrize("module", ["extproc.worker", "extproc.keeper", "extproc.envoy.server"])
def test_the_request_path_never_imports_the_typed_configuration(module: str) -> None:
    """The message classes take over a second to import and belong to rendering alone."""
    program = f"import sys, {module}; sys.exit(any(name.startswith('envoy_data_plane') for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

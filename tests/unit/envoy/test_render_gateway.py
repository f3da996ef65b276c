"""The section `gateway` as Envoy gets it: what is on, what is off, and what the real Envoy accepts of it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.config_file import loads
from extproc.envoy.render import render, write
from extproc.envoy.render_files import files
from extproc.envoy.render_tls import secrets
from extproc.envoy.validate import check
from extproc.errors import ConfigError
from tests.certificates import Authority

BASE = 'models: {m: {pool: p}}\npools: {p: {endpoints: ["10.0.0.1:8000"]}}\n'
JWT = "jwt: {jwks: 'https://issuer.example/jwks', issuer: i, audiences: [a]}"


def rendered(gateway: str = "{}", folder: Path | None = None) -> dict[str, Any]:
    """The whole configuration with this section."""
    return render(loads(f"{BASE}gateway: {gateway}\n"), folder=folder)


def manager(whole: dict[str, Any]) -> dict[str, Any]:
    """The HTTP connection manager."""
    [chain] = whole["static_resources"]["listeners"][0]["filter_chains"]
    found: dict[str, Any] = chain["filters"][0]["typed_config"]
    return found


def filters(whole: dict[str, Any]) -> list[str]:
    """Short names of the HTTP filters, in order."""
    return [one["name"].rpartition(".")[2] for one in manager(whole)["http_filters"]]


def test_whoever_asks_for_nothing_gets_nothing() -> None:
    """Without the new keys no filter is added, no cluster, no TLS, and no header is taken from the engine."""
    whole = rendered()
    assert filters(whole) == ["decompressor", "ext_proc", "ai_protocol_manager", "router"]
    assert "transport_socket" not in whole["static_resources"]["listeners"][0]["filter_chains"][0]
    assert [one["name"] for one in whole["static_resources"]["clusters"]] == [
        "p",
        "warmpath_workers",
        "warmpath_keeper",
    ]
    assert "request_headers_to_remove" not in manager(whole)["route_config"]
    assert secrets(loads(BASE)) == {}
    assert "overload_manager" not in rendered("{max_connections: 0, max_memory_mb: 0}")
    assert "request_timeout" not in manager(rendered("{receive_s: 0}"))


@pytest.mark.parametrize(
    ("auth", "names"),
    [
        ("{keys: /etc/keys}", ["ext_authz"]),
        (f"{{{JWT}}}", ["jwt_authn", "rbac"]),
        (f"{{keys: /etc/keys, {JWT}}}", ["jwt_authn", "ext_authz"]),
    ],
)
def test_whoever_comes_in_is_known_before_anything_is_read(auth: str, names: list[str]) -> None:
    """Authentication stands first: no body is unpacked or held for somebody who may not come in."""
    whole = rendered(f"{{auth: {auth}}}")
    assert filters(whole)[: len(names) + 1] == [*names, "decompressor"]
    assert manager(whole)["route_config"]["request_headers_to_remove"] == ["authorization", "api-key", "x-api-key"]


def test_the_sidecar_is_shown_keys_and_nothing_else() -> None:
    """It sees no cookie, no other header, and no body when it is asked who somebody is."""
    [asked] = [one for one in manager(rendered("{auth: {keys: /etc/keys}}"))["http_filters"] if "authz" in one["name"]]
    shown = [one["exact"] for one in asked["typed_config"]["allowed_headers"]["patterns"]]
    assert shown == ["authorization", "api-key", "x-api-key", "x-warmpath-tenant"]
    assert "with_request_body" not in asked["typed_config"]
    assert not asked["typed_config"].get("failure_mode_allow")


def test_public_keys_are_fetched_from_whom_the_url_names() -> None:
    """The certificate must be of a known authority, and for that host."""
    whole = rendered(f"{{auth: {{{JWT}}}}}")
    [cluster] = [one for one in whole["static_resources"]["clusters"] if one["name"] == "warmpath_jwks"]
    [locality] = cluster["load_assignment"]["endpoints"]
    address = locality["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
    assert (address["address"], address["port_value"]) == ("issuer.example", 443)
    tls = cluster["transport_socket"]["typed_config"]
    assert tls["sni"] == "issuer.example"
    trusted = tls["common_tls_context"]["validation_context"]
    assert trusted["trusted_ca"]["filename"] == "/etc/ssl/certs/ca-certificates.crt"
    assert [one["matcher"]["exact"] for one in trusted["match_typed_subject_alt_names"]] == ["issuer.example"]


def test_tls_names_files_that_are_written_beside_the_configuration(tmp_path: Path) -> None:
    """Key material is in neither: Envoy reads it where the configuration says, again and again."""
    section = "{tls: {certificate: /etc/c.pem, key: /etc/c.key, client_ca: /etc/ca.pem, min_version: '1.3'}}"
    write(loads(f"{BASE}gateway: {section}\n"), tmp_path / "envoy.yaml")
    assert {path.name for path in tmp_path.iterdir()} == {
        "envoy.yaml",
        "warmpath-certificate.yaml",
        "warmpath-clients.yaml",
    }
    [secret] = yaml.safe_load((tmp_path / "warmpath-certificate.yaml").read_text())["resources"]
    assert secret["tls_certificate"]["private_key"] == {"filename": "/etc/c.key"}
    whole = yaml.safe_load((tmp_path / "envoy.yaml").read_text())
    tls = whole["static_resources"]["listeners"][0]["filter_chains"][0]["transport_socket"]["typed_config"]
    assert tls["require_client_certificate"] is True
    common = tls["common_tls_context"]
    assert common["alpn_protocols"] == ["h2", "http/1.1"]
    assert common["tls_params"]["tls_minimum_protocol_version"] == "TLSv1_3"
    [named] = common["tls_certificate_sds_secret_configs"]
    path = named["sds_config"]["path_config_source"]["path"]
    assert path == str(tmp_path / "warmpath-certificate.yaml")


def test_tls_on_standard_output_says_what_to_do() -> None:
    """A configuration that names files which nobody wrote would not start."""
    with pytest.raises(ConfigError, match="--output FILE"):
        rendered("{tls: {certificate: /etc/c.pem, key: /etc/c.key}}")


def test_routes_are_tried_longest_first() -> None:
    """Envoy takes the first that matches."""
    whole = rendered("{routes: [{path: /v1, fail_open: false}, {path: /v1/embeddings, max_body_bytes: 2048}]}")
    [host] = manager(whole)["route_config"]["virtual_hosts"]
    names = [one["name"] for one in host["routes"] if "picked" not in one["name"] and "messages" not in one["name"]]
    assert names == ["fallback /v1/embeddings", "fallback /v1", "fallback"]
    by_name = {one["name"]: one for one in host["routes"]}
    overrides = by_name["fallback /v1"]["typed_per_filter_config"]["envoy.filters.http.ext_proc"]["overrides"]
    assert overrides == {"failure_mode_allow": False}
    assert by_name["picked /v1/embeddings"]["request_body_buffer_limit"] == 2048
    assert "typed_per_filter_config" not in by_name["fallback"]


def checked(tmp_path: Path, gateway: str) -> str:
    """The error of `warmpath check`; empty when all is well."""
    path = tmp_path / "warmpath.yaml"
    path.write_text(f"{BASE}gateway: {gateway}\n")
    return check(path).error


def test_the_real_envoy_accepts_all_of_it(tmp_path: Path) -> None:
    """TLS with clients' certificates, keys and tokens, routes, a closed list of paths, and every limit."""
    authority = Authority(tmp_path)
    pair = authority.issue("127.0.0.1")
    (tmp_path / "keys").write_text("")
    tls = f"{{certificate: {pair.certificate}, key: {pair.key}, client_ca: {authority.file}}}"
    jwt = f"{{jwks: 'https://i.example/k', issuer: i, audiences: [a], ca: {authority.file}}}"
    auth = f"{{keys: {tmp_path}/keys, jwt: {jwt}}}"
    more = "only_known_paths: true, routes: [{path: /x, fail_open: false, max_body_bytes: 2048}], max_headers_kb: 8192"
    assert checked(tmp_path, f"{{tls: {tls}, auth: {auth}, {more}}}") == ""


@pytest.mark.parametrize(
    ("gateway", "told"),
    [
        (
            "{tls: {certificate: FOLDER/none, key: GOOD.key}}",
            "gateway.tls.certificate: FOLDER/none cannot be read (No such",
        ),
        ("{tls: {certificate: GOOD.pem, key: FOLDER}}", "gateway.tls.key: FOLDER cannot be read (Is a directory)"),
        (
            "{tls: {certificate: GOOD.pem, key: OTHER.key}}",
            "OTHER.key are no pair of certificate and key in PEM (KEY_VALUES",
        ),
        ("{tls: {certificate: FOLDER/text, key: GOOD.key}}", "FOLDER/text and GOOD.key are no pair"),
        (
            "{tls: {certificate: GOOD.key, key: GOOD.pem}}",
            "gateway.tls: the certificate is in GOOD.pem, the file of the key: swap certificate and key",
        ),
        (
            "{tls: {certificate: GOOD.pem, key: GOOD.key, client_ca: FOLDER/text}}",
            "client_ca: FOLDER/text holds no certificate",
        ),
        ("{auth: {keys: FOLDER/none}}", "gateway.auth.keys: FOLDER/none: cannot be read (No such file"),
        ("{auth: {keys: FOLDER/none}}", "make it with `warmpath key NAME --file FOLDER/none`"),
        ("{auth: {keys: FOLDER/text}}", "gateway.auth.keys: FOLDER/text:1: no name and hash"),
        (
            "{auth: {jwt: {jwks: FOLDER/none, issuer: i, audiences: [a]}}}",
            "gateway.auth.jwt.jwks: FOLDER/none cannot be read",
        ),
        ("{auth: {jwt: {jwks: FOLDER/text, issuer: i, audiences: [a]}}}", "Envoy refuses the rendered configuration"),
        (
            "{auth: {jwt: {jwks: 'https://i/k', ca: FOLDER/none, issuer: i, audiences: [a]}}}",
            "gateway.auth.jwt.ca: FOLDER/none cannot be read",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_told_with_its_place(tmp_path: Path, gateway: str, told: str) -> None:
    """Before Envoy or a worker finds out."""
    pair, other = Authority(tmp_path, "good").issue("127.0.0.1"), Authority(tmp_path, "other").issue("127.0.0.1")
    (tmp_path / "text").write_text("buy milk\n")
    places = {"GOOD": str(pair.key.with_suffix("")), "OTHER": str(other.key.with_suffix("")), "FOLDER": str(tmp_path)}
    for name, place in places.items():
        gateway, told = gateway.replace(name, place), told.replace(name, place)
    error = checked(tmp_path, gateway)
    assert told in error
    assert error.startswith((f"{tmp_path}/warmpath.yaml: ", "Envoy refuses"))


def test_the_parts_for_those_with_an_envoy_of_their_own_have_no_secrets() -> None:
    """Without TLS there is none to write, and the single files need none."""
    assert not [name for name in files(rendered()) if "certificate" in name]

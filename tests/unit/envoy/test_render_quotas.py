"""Limits of use in the rendered configuration: nothing of them by default, and each in its place."""

from typing import Any

from extproc.envoy.contract import METADATA
from extproc.govern.quota_text import HEADER_KEYS
from tests.unit.envoy.test_render import manager, rendered

AUTH = "gateway: {auth: {keys: /keys}}\n"
RULES = "rules: [{tenant: '*', requests_per_minute: 10}]"


def filters(whole: dict[str, Any]) -> list[str]:
    """Names of the HTTP filters, in order."""
    return [one["name"].removeprefix("envoy.filters.http.") for one in manager(whole)["http_filters"]]


def told(whole: dict[str, Any]) -> dict[str, str]:
    """Response headers that are added to every answer."""
    added = manager(whole)["route_config"]["response_headers_to_add"]
    return {one["header"]["key"]: one["header"]["value"] for one in added}


def test_without_rules_envoy_knows_nothing_of_limits() -> None:
    """No filter, and no header to be made for each answer."""
    plain = rendered()
    assert not {"ratelimit", "local_ratelimit"} & set(filters(plain))
    assert not set(told(plain)) & set(HEADER_KEYS.values())


def test_limits_are_told_from_the_decisions_metadata() -> None:
    """One header for each key; those of a decision that lacks the key are empty, which Envoy leaves out."""
    whole = rendered(f"rate_limits: {{{RULES}}}")
    assert {name: told(whole)[name] for name in HEADER_KEYS.values()} == {
        name: f"%DYNAMIC_METADATA({METADATA}:{key})%" for key, name in HEADER_KEYS.items()
    }
    assert not any(one.get("keep_empty_value") for one in manager(whole)["route_config"]["response_headers_to_add"])


def test_envoys_own_bucket_comes_first_and_the_service_after_the_tenant_is_known() -> None:
    """The one spares all others their work; the other needs what authentication sets, and comes before the body."""
    whole = rendered(AUTH + f"rate_limits: {{before_body: true, local_requests_per_s: 50, {RULES}}}")
    order = filters(whole)
    assert order[0] == "local_ratelimit"
    assert order.index("ext_authz") < order.index("ratelimit") < order.index("ext_proc")
    service = next(one for one in manager(whole)["http_filters"] if one["name"].endswith(".ratelimit"))["typed_config"]
    assert service.get("failure_mode_deny", False) is False
    assert service["timeout"] == "1s"
    assert service["metadata_namespace"] == METADATA
    # Each try has the whole time, see `render_parts.reconnect`.
    retry = service["rate_limit_service"]["grpc_service"]["retry_policy"]
    assert retry["retry_back_off"]["max_interval"] == "1s"


def test_the_service_fails_as_the_gateway_does() -> None:
    """Without a worker requests go on, or are refused where the gateway fails closed."""
    whole = rendered(f"gateway: {{fail_open: false}}\nrate_limits: {{before_body: true, {RULES}}}")
    service = next(one for one in manager(whole)["http_filters"] if one["name"].endswith(".ratelimit"))["typed_config"]
    assert service["failure_mode_deny"] is True

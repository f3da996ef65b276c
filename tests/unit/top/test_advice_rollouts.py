"""What `warmpath check` warns of in versions, shadows, rollouts and the operators' way in."""

from pathlib import Path

import pytest

from extproc import advice
from extproc.config_file import loads
from extproc.errors import ConfigError

POOLS = """
pools:
  a: {endpoints: ["10.0.0.1:8000"], ask_usage: true}
  b: {endpoints: ["10.0.0.2:8000"], ask_usage: true}
"""
VERSIONS = "v1: {pool: a, weight: 1}, v2: {pool: b}"


def warnings(model: str = "", more: str = "", pools: str = POOLS, versions: str = VERSIONS) -> list[str]:
    """Warnings of a model with two versions, with these keys and sections beside."""
    return advice.warnings(loads(f"models: {{m: {{versions: {{{versions}}}{model}}}}}{pools}{more}"))


def test_versions_and_a_shadow_are_meant() -> None:
    """Whoever changes nothing else is not warned."""
    assert warnings() == []
    assert warnings(", shadow: {version: v2}") == []
    assert warnings(", shadow: {version: v2, mode: compare, keep: all, folder: /x, refusals: [sorry]}") == []


@pytest.mark.parametrize(
    ("model", "more", "told"),
    [
        (", shadow: {version: v1}", "", "models.m.shadow.version: `v1` has weight 1"),
        (", shadow: {version: v2, keep: all}", "", "models.m.shadow.keep: has no effect while mode is mirror"),
        (", shadow: {version: v2, folder: /x}", "", "models.m.shadow.folder: has no effect"),
        (", shadow: {version: v2, refusals: [sorry]}", "", "models.m.shadow.refusals: has no effect"),
        (
            ", shadow: {version: v2, embed_url: 'http://x', embed_model: e}",
            "",
            "models.m.shadow.embed_url: has no effect",
        ),
        (", shadow: {version: v2, timeout_s: 9}", "", "models.m.shadow.timeout_s: has no effect"),
        (", shadow: {version: v2, max_results: 9}", "", "models.m.shadow.max_results: has no effect"),
        (", shadow: {version: v2, keep_s: 9}", "", "models.m.shadow.keep_s: has no effect"),
        (", shadow: {version: v2, mode: compare, embed_model: e}", "", "models.m.shadow.embed_model: has no effect"),
        (", shadow: {version: v2, share: 0}", "", "models.m.shadow.share: is 0"),
        (", split_by: request", "", "models.m.split_by: request: turns of one conversation"),
        (", split_by: tenant", "", "models.m.split_by: tenant, but gateway.auth has neither"),
        ("", "rollouts: {min_samples: 0}", "rollouts.min_samples: is 0"),
        ("", "rollouts: {hold_s: 10}", "rollouts.hold_s: 10 is not above settle_s (10)"),
        ("", "rollouts: {on_failure: report}", "rollouts.on_failure: is report"),
        ("", "rollouts: {testers: [acme]}", "rollouts.testers: gateway.auth has neither"),
        ("", "gateway: {sidecar: {admin: '0.0.0.0:9103'}}", "gateway.sidecar.admin_token: is empty"),
    ],
)
def test_each_oddity_is_told_with_its_place(model: str, more: str, told: str) -> None:
    """One warning, that begins with where to look."""
    [found] = warnings(model, more)
    assert found.startswith(told)


@pytest.mark.parametrize(
    "more",
    ["rollouts: {testers: ['*']}", "rollouts: {hold_s: 10.1}", "gateway: {sidecar: {admin: 'localhost:9103'}}"],
)
def test_what_makes_sense_is_not_warned_of(more: str) -> None:
    """At the very limit, and testers that are everybody."""
    assert warnings(more=more) == []


@pytest.mark.parametrize(
    "other", ["{pool: b, served_as: next}", "{pool: b, adapter: {name: tuned}}"], ids=["name", "adapter"]
)
def test_a_mirrored_body_names_a_model_that_both_versions_know(other: str) -> None:
    """Envoy sends the body that the client's engine gets; where both answers are compared, a worker makes another."""
    versions = f"v1: {{pool: a, weight: 1}}, v2: {other}"
    [told] = warnings(", shadow: {version: v2}", versions=versions)
    assert told.startswith(
        "models.m.shadow.mode: mirror sends what engines of `v1` get, and these know the model as `m`"
    )
    assert warnings(", shadow: {version: v2, mode: compare}", versions=versions) == []


def test_pools_that_do_not_ask_for_usage_are_named() -> None:
    """With the gate off there is nothing to see."""
    pools = POOLS.replace(", ask_usage: true}", "}", 1)
    [told] = warnings(pools=pools)
    assert told.startswith("rollouts.gates.broken: of model m")
    assert told.endswith("in the pools a")
    assert warnings(more="rollouts: {gates: {broken: {enabled: false}}}", pools=pools) == []


def test_what_versions_run_on() -> None:
    """Different engines, an adapter that only some engines could find, and a single version."""
    pools = POOLS.replace("a: {", "a: {engine: vllm, ").replace("b: {", "b: {engine: sglang, ")
    [told] = warnings(pools=pools)
    assert told.startswith("models.m.versions: run on different engines (sglang, vllm)")
    [told] = warnings(versions="v1: {pool: a, weight: 1}, v2: {pool: b, adapter: {name: x, id: 1}}")
    assert told.startswith("models.m.versions.v2.adapter: has one of `id` and `path`")
    assert warnings(versions="v1: {pool: a, weight: 1}, v2: {pool: b, adapter: {name: x}}") == []
    [told] = warnings(versions="v1: {pool: a, weight: 1}")
    assert told.startswith("models.m.versions: there is one alone")


def test_a_token_must_be_one_and_nobodys_else(tmp_path: Path) -> None:
    """A file that is missing or too short is refused by `check`; one that every user may read is warned of."""
    token = tmp_path / "token"
    section = f"gateway: {{sidecar: {{admin: '0.0.0.0:9103', admin_token: {token}}}}}"
    with pytest.raises(ConfigError, match=r"admin_token: .*cannot be read \(No such file"):
        warnings(more=section)
    token.write_text("short")
    with pytest.raises(ConfigError, match="shorter than 16 characters"):
        warnings(more=section)
    token.write_text("0123456789abcdef")
    token.chmod(0o640)
    assert warnings(more=section) == []
    token.chmod(0o644)
    [told] = warnings(more=section)
    assert told.startswith("gateway.sidecar.admin_token: every user of this host")

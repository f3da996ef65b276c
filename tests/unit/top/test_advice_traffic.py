"""What `warmpath check` warns of in keys, tenants, the relay, overload and breakers: allowed, and hardly meant."""

from pathlib import Path

import pytest

from extproc import advice
from extproc.config_file import loads
from extproc.envoy import api_keys

BASE = """\
models: {m: {pool: p}, n: {pool: p}, big: {pool: q}}
pools:
  p: {endpoints: ["10.0.0.1:8000"]POOL}
  q: {endpoints: ["10.0.0.2:8000"]}
"""


def warnings(text: str, pool: str = "") -> list[str]:
    """Warnings of a configuration with these sections, and these settings of pool `p`."""
    return advice.warnings(loads(BASE.replace("POOL", pool and f", {pool}") + text))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "rate_limits: {rules: [{tenant: acme, tokens_per_day: 9}, {tenant: '*', tokens_per_day: 5}]}",
            "rate_limits.rules[0].tenant: gateway.auth has neither keys nor jwt",
        ),
        ("overload: {tenants: {acme: {weight: 2}}}", "overload.tenants.acme: gateway.auth has neither keys nor jwt"),
        ("gateway: {auth: {fail_open: true}}", "gateway.auth.fail_open: has no effect without gateway.auth.keys"),
        ("relay: {paths: [/v1]}", "relay.paths: nothing is relayed while relay.enabled is false"),
        ("relay: {enabled: true, paths: [/v1, /v1/embeddings]}", "relay.paths[1]: nothing below /v1/embeddings"),
        ("relay: {enabled: true, paths: [/v1/chat/completions/x]}", "relay.paths[0]: nothing below"),
        ("relay: {enabled: true, paths: [/chat/completions]}", "relay.paths[0]: nothing below /chat/completions"),
        (
            "relay: {enabled: true, stall_s: 30}\ntimeouts: {first_token_s: 30}",
            "relay.stall_s: 30 is not above timeouts.first_token_s (30)",
        ),
        (
            "relay: {enabled: true}\ntimeouts: {rules: [{model: m, stall_s: 90}]}",
            "relay.stall_s: 60 is not above timeouts.stall_s (90)",
        ),
        ("overload: {fallback: m}", "overload.fallback: has no effect while overload.action is pass"),
        (
            "retries: {idempotency_s: 899}",
            "retries.idempotency_s: 899 is below what a request may take (900, timeouts.request_s)",
        ),
        ("breakers: {open_s: 61}", "breakers.max_open_s: 60 is below open_s (61)"),
    ],
)
def test_each_oddity_is_told_with_its_place(text: str, told: str) -> None:
    """One warning, that begins with where to look and says what is wrong."""
    [found] = warnings(text)
    assert found.startswith(told)


@pytest.mark.parametrize(
    "text",
    [
        "gateway: {auth: {jwt: {jwks: 'https://i/k', issuer: i, audiences: [a]}}}\noverload: {tenants: {acme: {}}}",
        "rate_limits: {rules: [{tokens_per_day: 9}]}",
        "relay: {enabled: true, paths: [/, /v1, /team, /v1/chat, /v1/chat/completions/, /a/v1/completions, /v10]}",
        "relay: {enabled: true, stall_s: 31}\ntimeouts: {first_token_s: 30}",
        "relay: {stall_s: 3}\ntimeouts: {first_token_s: 30}",
        "overload: {action: fallback, fallback: m}",
        "retries: {idempotency_s: 0}",
        "breakers: {open_s: 60}",
    ],
)
def test_what_makes_sense_is_not_warned_of(text: str) -> None:
    """At the very limit, and where what is named is in use."""
    assert warnings(text) == []


def test_a_tenant_is_one_that_the_file_of_keys_names(tmp_path: Path) -> None:
    """A name that nobody has is a slip of the pen, but for `*`; the nearest one is offered."""
    keys = tmp_path / "keys"
    keys.write_text(f"{api_keys.line('acme', 'wp-1')}\n{api_keys.line('zeta', 'wp-2')}\n")
    rules = "[{tenant: acme, tokens_per_day: 9}, {tenant: '*', tokens_per_day: 9}, {tenant: acne, tokens_per_day: 9}]"
    auth = f"gateway: {{auth: {{keys: {keys}}}}}\n"
    assert warnings(f"{auth}rate_limits: {{rules: {rules}}}") == [
        f"rate_limits.rules[2].tenant: the file of keys ({keys}) has no client `acne`: did you mean `acme`?"
    ]
    assert warnings(f"{auth}overload: {{tenants: {{zeta: {{}}}}}}") == []
    keys.write_text("")
    [told] = warnings(f"{auth}overload: {{tenants: {{zeta: {{}}}}}}")
    assert told.endswith("has no client `zeta`: it names nobody")


def test_a_fallback_to_the_only_pool_is_none() -> None:
    """The pool that serves the fallback takes all requests itself: with one pool nobody falls back."""
    alone = 'models: {m: {pool: p}, n: {pool: p}}\npools: {p: {endpoints: ["10.0.0.1:8000"]}}\n'
    [told] = advice.warnings(loads(f"{alone}overload: {{action: fallback, fallback: n}}"))
    assert told.startswith("overload.fallback: no pool falls back to n")


def test_a_pools_own_fallback_needs_its_action() -> None:
    """Whether the action is its own or the section's; the section's fallback is used by a pool with an action alone."""
    [told] = warnings("", "overload: {fallback: big}")
    assert told.startswith("pools.p.overload.fallback: has no effect while its action is pass")
    assert warnings("", "overload: {action: fallback, fallback: big}") == []
    assert warnings("overload: {fallback: big}", "overload: {action: fallback}") == []


def test_events_without_anybody_who_reads_them_are_told() -> None:
    """Estimated profiles listen to no engine."""
    [told] = warnings("", "events: {endpoint: 'tcp://*:5557'}")
    assert told.startswith("pools.p.events: nobody reads KV events while profiles are estimated")
    assert warnings("", "profiles: auto, events: {endpoint: 'tcp://*:5557'}") == []

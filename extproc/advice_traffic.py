"""What is allowed in the rules of traffic and still hardly meant: further warnings of `warmpath check`."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from extproc.config import Config, EventSettings
from extproc.config_mistakes import nearest
from extproc.config_quotas import EACH
from extproc.envoy import api_keys
from extproc.relay.asked import PATHS
from extproc.rules_overload import rules_in

_VERSION: Final = "/v1"


def warnings(config: Config) -> Iterator[str]:
    """One line each, that names the place, the reason and the remedy.

    Reads the file of API keys, where one is named. Raises ConfigError when that cannot be used.
    """
    keys = config.gateway.auth.keys
    yield from _tenants(config, set(api_keys.load(Path(keys)).values()) if keys else set())
    yield from _authentication(config)
    yield from _relay(config)
    yield from _fallback(config)
    yield from _lasting(config)
    yield from _events(config)


def _tenants(config: Config, clients: Collection[str]) -> Iterator[str]:
    """Rules for tenants that no request can have."""
    auth = config.gateway.auth
    rules = config.rate_limits.rules
    named = {f"rate_limits.rules[{at}].tenant": rule.tenant for at, rule in enumerate(rules) if rule.tenant is not None}
    named |= {f"overload.tenants.{name}": name for name in config.overload.tenants}
    if not auth.keys and not auth.jwt.jwks:
        for place in list(named)[:1]:
            yield (
                f"{place}: gateway.auth has neither keys nor jwt, so all clients are one tenant, that of no name: set "
                "one of them"
            )
    elif not auth.jwt.jwks:
        for place, name in named.items():
            if name != EACH and name not in clients:
                remedy = nearest(name, clients, "it names") if clients else "it names nobody"
                yield f"{place}: the file of keys ({auth.keys}) has no client `{name}`: {remedy}"


def _authentication(config: Config) -> Iterator[str]:
    auth = config.gateway.auth
    if auth.fail_open and not auth.keys:
        yield "gateway.auth.fail_open: has no effect without gateway.auth.keys: tokens are checked without a sidecar"


def _relay(config: Config) -> Iterator[str]:
    """Paths that are never relayed, and a patience that ends before the limits that it should come after."""
    relay, timeouts = config.relay, config.timeouts
    if not relay.enabled:
        if relay.paths:
            yield "relay.paths: nothing is relayed while relay.enabled is false: set it to true"
        return
    for at, path in enumerate(relay.paths):
        if not _may_be_relayed(path):
            yield f"relay.paths[{at}]: nothing below {path} is ever relayed: that can be {' and '.join(PATHS)} alone"
    for name in ("first_token_s", "stall_s"):
        limit_s = max([getattr(timeouts, name), *(getattr(rule, name) or 0.0 for rule in timeouts.rules)])
        if relay.stall_s <= limit_s:
            yield (
                f"relay.stall_s: {relay.stall_s:g} is not above timeouts.{name} ({limit_s:g}): the relay gives an "
                "engine up before that limit tells its breaker: raise it"
            )


def _may_be_relayed(path: str) -> bool:
    """Whether a path that is relayed can lie at this one or below it."""
    bare = path.rstrip("/")
    _, version, rest = bare.rpartition(_VERSION)
    if version and rest[:1] in ("", "/"):
        return any(f"{known}/".startswith(f"{version}{rest}/") for known in PATHS)
    return not bare.endswith("completions")


def _fallback(config: Config) -> Iterator[str]:
    """A model that answers in place of others, and never has to."""
    acting = {pool: rules_in(config, pool).action == "fallback" for pool in config.pools}
    section = config.overload
    falls = [pool for pool, acts in acting.items() if acts and config.pools[pool].overload.fallback is None]
    if section.fallback and section.action != "fallback" and not falls:
        yield f"overload.fallback: has no effect while overload.action is {section.action}: write `action: fallback`"
    elif section.fallback and section.action == "fallback" and not any(acting.values()):
        yield (
            f"overload.fallback: no pool falls back to {section.fallback}: the pool that serves it takes all requests "
            "itself: name a model of another pool"
        )
    for pool, settings in config.pools.items():
        if settings.overload.fallback and not acting[pool]:
            told = f"has no effect while its action is {rules_in(config, pool).action}: write `action: fallback`"
            yield f"pools.{pool}.overload.fallback: {told}"


def _lasting(config: Config) -> Iterator[str]:
    """Times that should outlast others."""
    kept_s, longest_s = config.retries.idempotency_s, config.timeouts.longest_request_s
    if 0.0 < kept_s < longest_s:
        yield (
            f"retries.idempotency_s: {kept_s:g} is below what a request may take ({longest_s:g}, timeouts.request_s): "
            "its key is free before it ends, and a second one runs beside it: raise it"
        )
    breakers = config.breakers
    if breakers.open_s > breakers.max_open_s:
        yield (
            f"breakers.max_open_s: {breakers.max_open_s:g} is below open_s ({breakers.open_s:g}), which is what counts "
            "then: raise it, or lower open_s"
        )


def _events(config: Config) -> Iterator[str]:
    for name, pool in config.pools.items():
        if pool.profiles == "estimated" and pool.events != EventSettings():
            yield f"pools.{name}.events: nobody reads KV events while profiles are estimated: write `profiles: auto`"

"""What the sections of a configuration must agree on, once each value is right by itself."""

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

import msgspec

from extproc.config import KEEPER_CLUSTER, WORKERS_CLUSTER, Config, ModelAdapter, is_ip, split_address
from extproc.config_gateway import JWKS_CLUSTER
from extproc.config_mistakes import Mistake, first_mistake, nearest
from extproc.errors import ConfigError
from extproc.request.volatile import rules_of
from extproc.rules_gateway import gateway_agrees
from extproc.rules_limits import breakers_tell_slow_from_quick, limits_agree
from extproc.rules_overload import fallbacks_lead_on, waits_fit
from extproc.rules_quotas import quotas_agree
from extproc.rules_relay import relay_agrees
from extproc.rules_rollouts import shadow_clusters_are_free, versions_agree
from extproc.state import where
from extproc.tokens import settings

_MAX_PORT = 65535
# Linux keeps 108 bytes for the path of a Unix socket, the last of them a zero.
_MAX_SOCKET_PATH = 107


def checked(plain: Any, place: Callable[[str], str]) -> Config:
    """The configuration that plain values stand for.

    Args:
        plain: mappings, lists and scalars, as YAML gives them.
        place: names, for an error, where a path such as `$.gateway.listen` was given.

    Raises:
        ConfigError: a value is wrong by itself, or contradicts another.
    """
    if mistake := first_mistake(plain, Config):
        raise ConfigError(f"{place(mistake.path)}: {mistake.text}")
    config = msgspec.convert(plain, Config)
    if mistake := first_contradiction(config):
        raise ConfigError(f"{place(mistake.path)}: {mistake.text}")
    return config


def first_contradiction(config: Config) -> Mistake | None:
    """The first rule that the configuration breaks, or None."""
    rules: tuple[Callable[[Config], Iterator[Mistake]], ...] = (
        _models_name_pools,
        versions_agree,
        shadow_clusters_are_free,
        _adapters_are_told_apart,
        _pool_names_are_free,
        _endpoints_are_addresses,
        _addresses_differ,
        _hosts_have_no_port,
        _ports_fit,
        _sockets_fit,
        _redis_url_reads,
        _back_off_grows,
        _volatile_rules_compile,
        _token_sources_are_there,
        fallbacks_lead_on,
        waits_fit,
        gateway_agrees,
        limits_agree,
        breakers_tell_slow_from_quick,
        quotas_agree,
        relay_agrees,
    )
    return next((mistake for rule in rules for mistake in rule(config)), None)


def _models_name_pools(config: Config) -> Iterator[Mistake]:
    for name, model in config.models.items():
        for version, each in model.by_version.items():
            path = f"$.models.{name}.versions.{version}.pool" if version else f"$.models.{name}.pool"
            if not each.pool:
                yield Mistake(path, "is missing: name the pool that serves it, or its `versions`")
            elif each.pool not in config.pools:
                yield Mistake(path, f"no pool `{each.pool}`: {nearest(each.pool, config.pools, 'pools are')}")


def _adapters_are_told_apart(config: Config) -> Iterator[Mistake]:
    """An adapter's number enters the hash of its blocks: two adapters of one number would share a cache."""
    numbered: dict[tuple[str, int], str] = {}
    ids: dict[tuple[str, str], int] = {}
    for path, pool, adapter in _adapters(config):
        if config.pools[pool].engine == "tensorrt_llm":
            if not adapter.path:
                yield Mistake(f"{path}.path", "is missing: TensorRT-LLM finds an adapter's weights by it")
            if not adapter.id:
                yield Mistake(f"{path}.id", "is missing: TensorRT-LLM knows adapters by number; give each another one")
        if ids.setdefault((pool, adapter.name), adapter.id) != adapter.id:
            yield Mistake(f"{path}.id", f"adapter `{adapter.name}` has another id in another model: give it the same")
        if adapter.id and numbered.setdefault((pool, adapter.id), adapter.name) != adapter.name:
            other = numbered[pool, adapter.id]
            yield Mistake(f"{path}.id", f"{adapter.id} is adapter `{other}` in this pool: give each adapter its own")


def _adapters(config: Config) -> Iterator[tuple[str, str, ModelAdapter]]:
    """Path, pool and value of every adapter."""
    for name, model in config.models.items():
        for version, each in model.by_version.items():
            if each.adapter is not None:
                place = f".versions.{version}" if version else ""
                yield f"$.models.{name}{place}.adapter", each.pool, each.adapter


def _pool_names_are_free(config: Config) -> Iterator[Mistake]:
    for name in config.pools:
        if name in {WORKERS_CLUSTER, KEEPER_CLUSTER, JWKS_CLUSTER}:
            yield Mistake(f"$.pools.{name}", f"`{name}` is an Envoy cluster of Warmpath's own: name the pool otherwise")


def _endpoints_are_addresses(config: Config) -> Iterator[Mistake]:
    for name, pool in config.pools.items():
        seen: set[str] = set()
        for index, address in enumerate(pool.endpoints):
            path = f"$.pools.{name}.endpoints[{index}]"
            yield from _port_in_range(path, address)
            if address in seen:
                yield Mistake(path, f"{address} is listed twice: keep one")
            seen.add(address)


def _port_in_range(path: str, address: str) -> Iterator[Mistake]:
    if not 1 <= split_address(address)[1] <= _MAX_PORT:
        yield Mistake(path, f"{address}: a port lies between 1 and {_MAX_PORT}")


def _addresses_differ(config: Config) -> Iterator[Mistake]:
    gateway = config.gateway
    yield from _port_in_range("$.gateway.sidecar.admin", gateway.sidecar.admin)
    for key, address in (("listen", gateway.listen), ("admin", gateway.admin)):
        path = f"$.gateway.{key}"
        yield from _port_in_range(path, address)
        if not is_ip(split_address(address)[0]):
            yield Mistake(path, f"{address}: Envoy listens on an IP address, not a name: write 127.0.0.1 or 0.0.0.0")
    if _clash(gateway.listen, gateway.admin):
        yield Mistake("$.gateway.admin", "is taken by gateway.listen: give it another port")


def _clash(one: str, other: str) -> bool:
    """Whether two listeners would want the same port of the same address."""
    (host, port), (other_host, other_port) = split_address(one), split_address(other)
    everywhere = {"0.0.0.0", "::"}  # noqa: S104 -- compared, not bound
    return port == other_port and (host == other_host or bool({host, other_host} & everywhere))


def _hosts_have_no_port(config: Config) -> Iterator[Mistake]:
    for index, host in enumerate(config.gateway.sidecar.hosts):
        if not host or (":" in host and not is_ip(host.strip("[]"))):
            path = f"$.gateway.sidecar.hosts[{index}]"
            yield Mistake(path, f"found {host!r}: write a host without a port: worker_port and keeper_port say those")


def _ports_fit(config: Config) -> Iterator[Mistake]:
    sidecar = config.gateway.sidecar
    if sidecar.socket_dir:
        return
    last = sidecar.worker_port + sidecar.workers - 1
    if last > _MAX_PORT:
        yield Mistake("$.gateway.sidecar.worker_port", f"{sidecar.workers} workers would end at port {last}: lower it")
    admin_port = split_address(sidecar.admin)[1]
    for key, port in (("keeper_port", sidecar.keeper_port), ("admin", admin_port)):
        if sidecar.worker_port <= port <= last:
            taken = f"{sidecar.worker_port} to {last}"
            yield Mistake(f"$.gateway.sidecar.{key}", f"port {port} is a worker's ({taken}): move one of them")
    if admin_port == sidecar.keeper_port:
        yield Mistake("$.gateway.sidecar.admin", "has the port of gateway.sidecar.keeper_port: give it another")


def _sockets_fit(config: Config) -> Iterator[Mistake]:
    sidecar = config.gateway.sidecar
    if not sidecar.socket_dir:
        return
    path = "$.gateway.sidecar.socket_dir"
    longest = f"{sidecar.socket_dir}/worker-{sidecar.workers - 1}.sock"
    if not PurePosixPath(sidecar.socket_dir).is_absolute():
        yield Mistake(path, f"found {sidecar.socket_dir!r}: write an absolute path; Envoy runs in another folder")
    if len(longest.encode()) > _MAX_SOCKET_PATH:
        yield Mistake(path, f"{longest} is longer than the {_MAX_SOCKET_PATH} bytes of a socket's path: shorten it")


def _redis_url_reads(config: Config) -> Iterator[Mistake]:
    if config.redis.url is None:
        return
    try:
        where.parse(config.redis.url)
    except ConfigError as error:
        yield Mistake("$.redis.url", str(error))


def _back_off_grows(config: Config) -> Iterator[Mistake]:
    if config.retries.max_ms < config.retries.base_ms:
        yield Mistake("$.retries.max_ms", "below retries.base_ms: raise it or lower base_ms")


def _volatile_rules_compile(config: Config) -> Iterator[Mistake]:
    try:
        rules_of(config.routing.volatile)
    except ConfigError as error:
        # The error begins with the rule's place below `routing.volatile`.
        place, _, what = str(error).partition(" ")
        remedy = ": correct it, or write a backslash in front of what is meant literally" if "pattern" in place else ""
        yield Mistake(f"$.routing.volatile.{place}", f"{what}{remedy}")


def _token_sources_are_there(config: Config) -> Iterator[Mistake]:
    for name, pool in config.pools.items():
        if pool.engine == "tensorrt_llm" and pool.tokens.source == "engine":
            remedy = "use `local` with tokens.tokenizer, or `render` with tokens.url"
            yield Mistake(f"$.pools.{name}.tokens.source", f"engine: TensorRT-LLM tells no token ids: {remedy}")
        if mistake := settings.mistake(pool.tokens):
            key, text = mistake
            yield Mistake(f"$.pools.{name}.tokens.{key}", text)

"""`warmpath.yaml` as typed, frozen values, and the rules that tie its sections together.

Reading the file, and turning mistakes into errors with a place and a remedy, is `config_file`. Defaults are
written once, here, on the fields.
"""

import ipaddress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from extproc.config_base import Address, ModelName, Name, NotNegative, Positive, Section
from extproc.config_breakers import Breakers
from extproc.config_gateway import BodyMode, Gateway, Sidecar
from extproc.config_limits import Retries, Timeouts
from extproc.config_overload import Overload
from extproc.config_pools import (
    EngineKind,
    EventSettings,
    Model,
    PolicyName,
    Pool,
    ProfileMode,
    TokenSettings,
)
from extproc.config_quotas import RateLimits
from extproc.config_relay import Relay
from extproc.config_rollouts import ModelAdapter, Rollouts, Shadow, Version

__all__ = [
    "KEEPER_CLUSTER",
    "RELAY_CLUSTER",
    "WORKERS_CLUSTER",
    "Address",
    "BodyMode",
    "Breakers",
    "Config",
    "EngineKind",
    "EventSettings",
    "Gateway",
    "LogLevel",
    "Model",
    "ModelAdapter",
    "Name",
    "Overload",
    "PolicyName",
    "Pool",
    "ProfileMode",
    "RateLimits",
    "Redis",
    "Relay",
    "Retries",
    "Rollouts",
    "Routing",
    "Section",
    "SessionSettings",
    "Shadow",
    "Sidecar",
    "Telemetry",
    "Timeouts",
    "TokenSettings",
    "Version",
    "Volatile",
    "VolatileRule",
    "is_ip",
    "split_address",
]

LogLevel = Literal["debug", "info", "warning", "error"]

WORKERS_CLUSTER = "warmpath_workers"
"""Envoy cluster of the ext_proc and access-log workers; every pool is a cluster of its own name beside it."""
KEEPER_CLUSTER = "warmpath_keeper"
"""Envoy cluster of the keepers, which serve endpoint discovery."""
RELAY_CLUSTER = "warmpath_relay"
"""Envoy cluster of the relay, when there is one."""


class Redis(Section, frozen=True, kw_only=True):
    """The store that all replicas share.

    Attributes:
        url: `redis://`, `rediss://` (TLS) or `unix://` URL of a Redis or Valkey; with Sentinel
            `redis+sentinel://[user:password@]host:port,host:port/name/database`, of a cluster
            `redis+cluster://[user:password@]host:port,host:port`, with TLS `rediss+sentinel://` and
            `rediss+cluster://`. `warmpath serve` needs one; `warmpath up` starts an embedded Valkey when there is none.
        timeout_ms: deadline of one call; past it the decision is made on local knowledge.
        key_prefix: first part of every key.
        lease_ms: charges of a dead replica vanish after this long.
        hold_ms: work that one process does for the whole fleet, such as reading an engine, goes to another one when its
            holder has been silent for this long.
        feed_cap: entries kept in each pool's feed; fewer when they are large, 64 MiB in all.
    """

    url: Annotated[str, Meta(pattern=r"^(rediss?(\+(sentinel|cluster))?|unix)://")] | None = None
    timeout_ms: Annotated[int, Meta(ge=1, le=5000)] = 20
    key_prefix: Name = "warmpath"
    lease_ms: Annotated[int, Meta(ge=1000, le=15_000)] = 15_000
    hold_ms: Annotated[int, Meta(ge=500, le=15_000)] = 3000
    feed_cap: Annotated[int, Meta(ge=100)] = 20_000


class SessionSettings(Section, frozen=True, kw_only=True):
    """How sessions stick.

    Attributes:
        ttl_s: sliding life of a session's pin.
        max: pins that each pool keeps; the one used longest ago goes for the next.
        break_out_ms: a pinned endpoint is left when it is this much dearer than the cheapest.
        strict: never leave a pinned endpoint that can serve.
        infer: recognise a conversation whose client names none by its growing message list.
        secret: key of the hash that session ids are stored under, the same on every replica. Without one the key is
            derived from `redis.key_prefix`, which who can read Redis may know too.
    """

    ttl_s: Positive = 1800.0
    max: Annotated[int, Meta(ge=1, le=100_000_000)] = 200_000
    break_out_ms: NotNegative = 1000.0
    strict: bool = False
    infer: bool = True
    secret: Annotated[str, Meta(min_length=1)] | None = None


class VolatileRule(Section, frozen=True, kw_only=True):
    """Text that changes from request to request near the beginning of a prompt; hashing passes over it.

    Attributes:
        pattern: regular expression (Python's `re`) of the text.
        replacement: what is hashed in its place.
    """

    pattern: Annotated[str, Meta(min_length=1, max_length=1024)]
    replacement: Annotated[str, Meta(max_length=1024)] = ""


class Volatile(Section, frozen=True, kw_only=True):
    """Volatile prefixes: what is hashed in their place. The engine always gets the prompt as the client sent it.

    Attributes:
        builtin: apply the rules that come with Warmpath: the billing line of Claude Code.
        first_bytes: how far into the first message, and into the system prompt, rules look.
        rules: further rules, applied in order after the built-in ones.
    """

    builtin: bool = True
    first_bytes: Annotated[int, Meta(ge=64, le=65_536)] = 4096
    rules: Annotated[list[VolatileRule], Meta(max_length=32)] = msgspec.field(default_factory=list)


class Routing(Section, frozen=True, kw_only=True):
    """The choice of an endpoint; every weight is in milliseconds or multiplies milliseconds.

    Attributes:
        policy: default policy of all pools.
        block_tokens: tokens in one hashed block.
        candidates: how many of the locally cheapest endpoints the store decides among.
        prefill_weight: weight of a request's own uncached prefill, when the beginning it shares is used all the time.
        rare_weight: the same, when that beginning is hardly used, so that a second copy of it would serve nobody.
        rare_gap: gap between two uses from which a beginning counts as hardly used, by the time that an answer takes.
        running_ms: cost of one sequence in flight.
        output_ms: cost of one output token that requests in flight are still expected to generate.
        hit_weight: policy `weighted`: what a wholly cached prompt is worth, in seconds of load.
        load_weight: policy `weighted`: factor on an endpoint's load.
        ramp_s: how long an endpoint that joined or restarted is slowed in.
        profile_ttl_s: blocks of a profile that nothing used for so long are forgotten.
        rate_factor: share of the learnt prefill speed that is believed.
        tie_ms: costs this close are equal; the endpoint nearest in hash wins.
        kv_watermark: KV usage from which an endpoint grows dearer.
        kv_penalty_ms: cost added at full KV usage.
        session: sticking to an endpoint.
        volatile: text that hashing passes over.
    """

    policy: PolicyName = "predicted_ttft"
    block_tokens: Annotated[int, Meta(ge=16, le=1024)] = 64
    candidates: Annotated[int, Meta(ge=1, le=32)] = 16
    prefill_weight: NotNegative = 1.0
    rare_weight: NotNegative = 3.0
    rare_gap: Positive = 0.7
    running_ms: NotNegative = 2.0
    output_ms: NotNegative = 0.09
    hit_weight: NotNegative = 1.0
    load_weight: NotNegative = 1.0
    ramp_s: NotNegative = 10.0
    profile_ttl_s: Positive = 3600.0
    rate_factor: Annotated[float, Meta(gt=0, le=2)] = 1.0
    tie_ms: NotNegative = 3.0
    kv_watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    kv_penalty_ms: NotNegative = 500.0
    session: SessionSettings = SessionSettings()
    volatile: Volatile = Volatile()


class Telemetry(Section, frozen=True, kw_only=True):
    """What is watched and written.

    Attributes:
        scrape_ms: how often each engine's metrics are read.
        access_log_flush_ms: how long Envoy may hold access-log entries back.
        log_level: least severe level that is written.
        recent_decisions: decisions each worker remembers for `warmpath explain`.
    """

    scrape_ms: Annotated[int, Meta(ge=50, le=60_000)] = 250
    access_log_flush_ms: Annotated[int, Meta(ge=10, le=10_000)] = 100
    log_level: LogLevel = "info"
    recent_decisions: Annotated[int, Meta(ge=0, le=100_000)] = 1000


class Config(Section, frozen=True, kw_only=True):
    """The whole file."""

    models: Annotated[dict[ModelName, Model], Meta(min_length=1)]
    pools: Annotated[dict[Name, Pool], Meta(min_length=1)]
    gateway: Gateway = Gateway()
    redis: Redis = Redis()
    routing: Routing = Routing()
    timeouts: Timeouts = Timeouts()
    retries: Retries = Retries()
    breakers: Breakers = Breakers()
    overload: Overload = Overload()
    rate_limits: RateLimits = RateLimits()
    relay: Relay = Relay()
    rollouts: Rollouts = Rollouts()
    telemetry: Telemetry = Telemetry()

    def policy_of(self, pool: str) -> PolicyName:
        """Policy of a pool, its own or the default."""
        return self.pools[pool].policy or self.routing.policy


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port`; brackets around an IPv6 address are dropped."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_ip(host: str) -> bool:
    """Whether a host is an IP address, written without brackets, and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True

"""Several policies on one trace: the same rows, the same engines, one table."""

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from extproc.choose.policies import POLICIES
from extproc.config import Config, Model, Pool, Routing
from extproc.errors import ConfigError
from extproc.replay.arguments import KV_TOKENS, ORACLE, Profiles
from extproc.replay.arrivals import lasts_s, paced
from extproc.replay.cache_events import CacheEvents
from extproc.replay.lines import LONGEST_S
from extproc.replay.oracle import Oracle
from extproc.replay.routed import MODEL, POOL, Routed
from extproc.replay.rows import Trace
from extproc.replay.summary import Replayed, summarize
from extproc.replay.world import Chooser, Settings, World
from extproc.sim.settings import EngineSettings
from extproc.sim.virtual import VirtualEngine

_CALIBRATED_ROWS = 1000
_CALIBRATED_WITHIN = 0.01
_CALIBRATED_AT_ALL = 0.05
_CALIBRATIONS = 32
_SATURATED = 0.9
"""Busy shares beyond it hardly change with arrivals: the queue grows instead."""
_FASTEST = 1e6


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared.

    Attributes:
        policies: names; `oracle` sees the truth, and is greedy.
        engines: number of engines.
        kv_tokens: KV cache of each engine.
        routing: weights of the choice; its policy is replaced.
        profiles: kinds of profiles; policies that look at prompts are replayed with each.
        event_delay_s: how long after it happened a change of an engine's cache is known, with precise profiles.
        regret: whether decisions are held against what the truth offered, one in four; changes no decision.
    """

    policies: Sequence[str]
    engines: int = 8
    kv_tokens: int = KV_TOKENS
    routing: Routing = Routing()
    profiles: Sequence[Profiles] = ("estimated",)
    event_delay_s: float = 0.0
    regret: bool = True


def compare(
    trace: Trace, wanted: Compared, watch: Callable[[str], None] = lambda _policy: None
) -> Mapping[str, Replayed]:
    """Replay a trace under each policy, in the order given; `watch` is told the name before each.

    Where several kinds of profiles are compared, the name of a policy that looks at prompts has that of the kind
    behind it.

    Raises:
        ConfigError: a policy does not exist.
    """
    results = {}
    for policy in wanted.policies:
        kinds = wanted.profiles if policy in POLICIES and POLICIES[policy].prefix else ("estimated",)
        for kind in kinds:
            name = f"{policy} {kind}" if len(kinds) > 1 else policy
            watch(name)
            results[name] = replay(trace, policy, wanted, kind)
    return results


def replay(trace: Trace, policy: str, wanted: Compared, profiles: Profiles = "estimated") -> Replayed:
    """Replay a trace under one policy.

    Raises:
        ConfigError: the policy does not exist, or an engine's cache would hold no block of the trace.
    """
    engine = engine_of(trace, wanted.kv_tokens)
    engines = [VirtualEngine(engine) for _ in range(wanted.engines)]
    oracle = Oracle(engines)
    chooser: Chooser = oracle
    if policy != ORACLE:
        events = CacheEvents(engines, wanted.event_delay_s) if profiles == "precise" else None
        chooser = Routed(config_of(policy, wanted), engines, trace.block_tokens, events)
    world = World(trace, Settings(), engines, chooser)
    return summarize(world.run(oracle.regret_ms if wanted.regret else None))


def engine_of(trace: Trace, kv_tokens: int) -> EngineSettings:
    """An engine whose KV blocks are those of the trace's hashes.

    Raises:
        ConfigError: its cache would not hold one of them.
    """
    if kv_tokens < trace.block_tokens:
        raise ConfigError(
            f"--kv-tokens {kv_tokens}: such a cache holds no block of {trace.name}, which has {trace.block_tokens} "
            f"tokens; write {trace.block_tokens} or more"
        )
    return EngineSettings(block_size=trace.block_tokens, blocks=kv_tokens // trace.block_tokens + 1)


def config_of(policy: str, wanted: Compared) -> Config:
    """The configuration that is replayed: one pool of so many endpoints.

    Raises:
        ConfigError: the policy does not exist.
    """
    try:
        routing = msgspec.convert({**msgspec.to_builtins(wanted.routing), "policy": policy}, Routing)
    except msgspec.ValidationError as error:
        raise ConfigError(f"policy `{policy}` does not exist: {error}") from error
    return Config(
        models={MODEL: Model(pool=POOL)},
        pools={POOL: Pool(endpoints=[f"e{index}:1" for index in range(wanted.engines)])},
        routing=routing,
    )


def at_load(trace: Trace, busy: float, wanted: Compared) -> tuple[Trace, float]:
    """Speed arrivals up or down until round robin's engines are busy for this share of the time.

    Only arrivals change; clients think as long as they did. The first thousand rows are tried.

    Returns:
        The trace at that speed, and the factor.

    Raises:
        ConfigError: no speed makes engines so busy: clients that think, or a last long answer, leave them idle.
    """
    head = Trace(trace.name, trace.block_tokens, trace.rows[:_CALIBRATED_ROWS])
    trial = msgspec.structs.replace(wanted, policies=("round_robin",), regret=False)
    slowest = max(1.0 / _FASTEST, lasts_s(head) / LONGEST_S)
    low, high = 0.0, math.inf
    factor, nearest = 1.0, (math.inf, 1.0, 0.0)
    for _ in range(_CALIBRATIONS):
        share = replay(paced(head, factor, think=False), "round_robin", trial).busy_share
        nearest = min(nearest, (abs(share - busy), factor, share))
        if nearest[0] <= _CALIBRATED_WITHIN or high < 1.001 * low:
            break
        low, high = (max(low, factor), high) if share < busy else (low, min(high, factor))
        factor = _next_speed(factor, busy / max(share, 1e-3) if share < _SATURATED else 0.5, low, high)
        if not slowest < factor < _FASTEST:
            break
    missed, factor, share = nearest
    if missed > _CALIBRATED_AT_ALL:
        raise ConfigError(
            f"--busy {busy:g}: at no speed does {trace.name} keep {wanted.engines} engines so busy, {share:.0%} is the "
            "nearest; write that share, or the pace with --speed"
        )
    return paced(trace, factor, think=False), factor


def _next_speed(factor: float, step: float, low: float, high: float) -> float:
    """The next speed to try, between one that is known as too low (0 for none) and one that is too high (inf).

    Busy time is about proportional to arrivals, so a step in proportion finds the place in a few tries.
    """
    if low < factor * step < high:
        return factor * step
    if high == math.inf:
        return 2.0 * low
    return high / 2.0 if low <= 0.0 else (low * high) ** 0.5

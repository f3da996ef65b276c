"""The rules of each pool when it is saturated, and what fallbacks must agree on with the rest of a configuration."""

from collections.abc import Iterator

import msgspec

from extproc.config import Config
from extproc.config_mistakes import Mistake
from extproc.config_overload import PoolOverload, Rules, rules_of
from extproc.rules_rollouts import no_model


def rules_in(config: Config, pool: str) -> Rules:
    """The rules of a pool: its own, else those of the section `overload`.

    The pool that serves the section's fallback falls back to nobody: unless it says otherwise itself, it takes all.
    """
    settings = config.pools.get(pool)
    own = settings.overload if settings else PoolOverload()
    rules = rules_of(config.overload, own)
    if rules.action == "fallback" and own.action is None and own.fallback is None and _serves(config, pool, rules):
        return msgspec.structs.replace(rules, action="pass")
    return rules


def fallbacks_lead_on(config: Config) -> Iterator[Mistake]:
    """Each pool that sends requests elsewhere names a model for them, and none comes back to a pool where it was."""
    for pool, settings in config.pools.items():
        rules = rules_in(config, pool)
        own = f"$.pools.{pool}.overload.fallback"
        path = own if settings.overload.fallback or settings.overload.action else "$.overload.fallback"
        if rules.fallback and rules.fallback not in config.models:
            yield Mistake(path, no_model(config, rules.fallback))
        elif rules.action == "fallback" and not rules.fallback:
            yield Mistake(path, "is missing: name the model that answers in place of the saturated one")
        elif came_back := _comes_back(config, pool):
            remedy = f"give pool `{came_back}` another overload.action"
            yield Mistake(path, f"requests of pool `{pool}` would come back to it: {remedy}")


def waits_fit(config: Config) -> Iterator[Mistake]:
    """Nobody waits for longer than the whole request may take."""
    most_s = config.timeouts.request_s
    for pool, settings in config.pools.items():
        rules = rules_in(config, pool)
        if rules.action == "queue" and 0.0 < most_s <= rules.queue.max_wait_s:
            path = (
                f"$.pools.{pool}.overload.queue.max_wait_s"
                if settings.overload.queue
                else "$.overload.queue.max_wait_s"
            )
            text = f"{rules.queue.max_wait_s:g}: a whole request may take {most_s:g} s (timeouts.request_s): wait less"
            yield Mistake(path, text)


def _serves(config: Config, pool: str, rules: Rules) -> bool:
    model = config.models.get(rules.fallback)
    return model is not None and model.in_pool(pool) is not None


def _comes_back(config: Config, pool: str) -> str:
    """The last pool on a way of fallbacks that leads back to `pool`; empty without one.

    A model may fall back to any of its versions: a rollout gives traffic to those that have none now.
    """
    seen, waiting = {pool}, [pool]
    while waiting:
        at = waiting.pop()
        rules = rules_in(config, at)
        model = config.models.get(rules.fallback)
        if rules.action != "fallback" or model is None:
            continue
        pools = {version.pool for version in model.by_version.values()} & set(config.pools)
        if pool in pools:
            return at
        waiting += sorted(pools - seen)
        seen |= pools
    return ""

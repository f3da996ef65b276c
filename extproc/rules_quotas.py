"""What the limits of a configuration must agree on."""

from collections.abc import Iterator

from extproc.config import Config
from extproc.config_mistakes import Mistake
from extproc.config_quotas import EACH, RateLimit
from extproc.govern.quota_rules import limits_of
from extproc.rules_rollouts import no_model

_SHORTER = (
    ("requests_per_minute", "requests_per_day"),
    ("tokens_per_minute", "tokens_per_day"),
    ("tokens_per_minute", "tokens_per_month"),
    ("tokens_per_day", "tokens_per_month"),
)
"""Pairs of limits of which the first comes back sooner."""


def quotas_agree(config: Config) -> Iterator[Mistake]:
    """Mistakes of single rules, two rules for the same, and limits before the body that there are none of."""
    seen: dict[tuple[str | None, str | None], int] = {}
    for index, rule in enumerate(config.rate_limits.rules):
        path = f"$.rate_limits.rules[{index}]"
        yield from _of_rule(path, rule)
        if rule.model not in {None, EACH, *config.models}:
            yield Mistake(f"{path}.model", no_model(config, rule.model or ""))
        first = seen.setdefault((rule.tenant, rule.model), index)
        if first != index:
            yield Mistake(path, f"is for the same tenant and model as rules[{first}]: write their limits into one rule")
    before = [each for each in config.rate_limits.rules if each.model is None]
    if config.rate_limits.before_body and not any(
        limit.unit == "requests" for each in before for limit in limits_of(each)
    ):
        remedy = "write a rule without `model` that limits requests, or drop before_body"
        yield Mistake("$.rate_limits.before_body", f"nothing is limited before the body is read: {remedy}")


def _of_rule(path: str, rule: RateLimit) -> Iterator[Mistake]:
    limits = list(limits_of(rule))
    if not limits:
        yield Mistake(path, "limits nothing: give it requests_per_minute, tokens_per_day or another limit")
    for limit in limits:
        if limit.most < 1.0:
            remedy = f"with burst_s {rule.burst_s:g} not one passes: raise burst_s to {1 / limit.rate:g} or more"
            yield Mistake(f"{path}.{limit.name}", f"{limit.rate * 60:g} a minute: {remedy}")
    for sooner, later in _SHORTER:
        low, high = getattr(rule, sooner), getattr(rule, later)
        if low is not None and high is not None and low > high:
            yield Mistake(f"{path}.{later}", f"{high} is below {sooner} ({low}), which could never be used: raise one")

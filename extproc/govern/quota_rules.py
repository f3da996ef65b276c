"""Which rules are for a request, and which limits follow from them."""

from collections.abc import Iterator, Sequence

import msgspec

from extproc.config_quotas import EACH, RateLimit
from extproc.govern.quotas import Per, Unit

_MINUTE_S = 60.0


class Limit(msgspec.Struct, frozen=True, gc=False):
    """One limit of one rule.

    Attributes:
        unit: what is counted.
        per: how it comes back.
        most: how much may be in use.
        rate: how much comes back in a second; 0 where all does at once.
    """

    unit: Unit
    per: Per
    most: float
    rate: float

    @property
    def name(self) -> str:
        """The key of the configuration that set it."""
        return f"{self.unit}_per_{self.per}"


class Applied(msgspec.Struct, frozen=True, gc=False):
    """A rule as it applies to a request.

    Attributes:
        rule: the rule.
        tenant: tenant that it counts for; None for all together.
        model: model that it counts for; None for all together.
    """

    rule: RateLimit
    tenant: str | None
    model: str | None


class Rules:
    """The rules of a configuration, found by who asks."""

    def __init__(self, rules: Sequence[RateLimit]) -> None:
        self._rules = {(each.tenant, each.model): each for each in rules}

    def __bool__(self) -> bool:
        return bool(self._rules)

    def of(self, tenant: str, model: str | None) -> Iterator[Applied]:
        """The rules for a request.

        Args:
            tenant: whose it is; empty where nobody says.
            model: model that it asks for; None while that is not known, which leaves out rules that count by model.
        """
        for tenants in ((None,), (tenant, EACH)):
            for models in ((None,), (model, EACH)) if model is not None else ((None,),):
                found = (self._rules.get((one, other)) for one in tenants for other in models)
                rule = next((each for each in found if each is not None), None)
                if rule is not None:
                    yield Applied(rule, None if rule.tenant is None else tenant, None if rule.model is None else model)


def limits_of(rule: RateLimit) -> Iterator[Limit]:
    """The limits that a rule sets."""
    rates: tuple[tuple[Unit, int | None], ...] = (
        ("requests", rule.requests_per_minute),
        ("tokens", rule.tokens_per_minute),
    )
    for unit, per_minute in rates:
        if per_minute is not None:
            rate = per_minute / _MINUTE_S
            yield Limit(unit, "minute", rate * rule.burst_s, rate)
    windows: tuple[tuple[Unit, Per, int | None], ...] = (
        ("requests", "day", rule.requests_per_day),
        ("tokens", "day", rule.tokens_per_day),
        ("tokens", "month", rule.tokens_per_month),
    )
    for unit, per, most in windows:
        if most is not None:
            yield Limit(unit, per, float(most), 0.0)

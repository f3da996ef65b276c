"""Evidence against a canary that is no worse, as wealth won by betting. Plain functions of numbers.

An e-value is a number that is 1 or less on average under the hypothesis it speaks against: the wealth of somebody who
began with 1 and bets at fair odds (Shafer 2021, "Testing by betting"). By Ville's inequality (1939) the chance that
wealth ever comes to `1 / a` is at most `a`, however often one looks. Every bet here is about labels: which of the
values of a group that were seen together are the canary's. Were the two versions alike, every assignment of the labels
would be as likely as any other, whatever the values are.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

RATE_BETS: Final = (2.0, 5.0, 15.0, 50.0)
"""Odds at which an event is bet to be the canary's, against one without any difference."""
RANK_BETS: Final = (1.0, 2.0, 4.0)
"""Logarithms of the odds for the slowest value of a group against the fastest one."""
_CACHED: Final = 8192


def events_log(group: int, canary: int, events: int, found: int, odds: float) -> float:
    """Log of the likelihood ratio of Fisher's noncentral hypergeometric distribution against the central one.

    Args:
        group: units of the group.
        canary: those of the canary.
        events: units with an event.
        found: those of the canary with an event.
        odds: odds ratio that is bet on; over 1 for a canary with more events.
    """
    return found * math.log(odds) - events_log_mean(group, canary, events, odds)


@lru_cache(maxsize=_CACHED)
def events_log_mean(group: int, canary: int, events: int, odds: float) -> float:
    """Log of the mean, over all assignments of labels, of the odds to the power of the canary's events."""
    found = range(max(0, canary + events - group), min(canary, events) + 1)
    ways = sum(math.comb(events, some) * math.comb(group - events, canary - some) * odds**some for some in found)
    return math.log(ways / math.comb(group, canary))


@lru_cache(maxsize=_CACHED)
def ranks_log_mean(group: int, canary: int, percentile: float, bet: float) -> float:
    """Log of the mean, over all assignments of labels, of `exp(bet x sum of the canary's rank_steps)`."""
    steps = rank_steps(group, percentile)
    mean = sum(steps) / group
    # About their mean, products neither overflow nor vanish, however many there are.
    weights = tuple(math.exp(bet * (step - mean)) for step in steps)
    return math.log(mean_product(weights, canary)) + bet * mean * canary


@lru_cache(maxsize=_CACHED)
def rank_steps(group: int, percentile: float) -> tuple[float, ...]:
    """What each rank of a group counts, the least first: from 0 to 1, in a ramp around the percentile.

    The ramp is as wide as the percentile allows on its nearer side: for the median these are Wilcoxon's ranks, for the
    90th percentile what lies over the 80th. A step alone would leave a third of what ranks tell of a shift unused.
    """
    at = percentile / 100.0
    half = min(at, 1.0 - at)
    return tuple(min(1.0, max(0.0, ((rank + 0.5) / group - at + half) / (2.0 * half))) for rank in range(group))


def mean_product(weights: Sequence[float], chosen: int) -> float:
    """Mean, over all choices of so many of the weights, of the product of those chosen.

    The elementary symmetric polynomial over the binomial coefficient, by a recurrence of means that cannot overflow
    where its result does not.
    """
    means = [1.0] + [0.0] * chosen
    for count, weight in enumerate(weights, start=1):
        for some in range(min(count, chosen), 0, -1):
            means[some] = ((count - some) * means[some] + some * weight * means[some - 1]) / count
    return means[chosen]


def rate_log(events: int, risk: int, rate: float, odds: float) -> float:
    """Log of the likelihood ratio of independent events at some odds over a rate, against that rate or less."""
    return events * math.log(odds) - risk * math.log1p((odds - 1.0) * rate)


def upper_bound(events: int, risk: int, chance: float) -> float:
    """Rate that so few events of so many at risk come from with no more than this chance.

    By the bound of Chernoff and Hoeffding (1963): the chance of a share of `p` or less at rate `q` is at most
    `exp(-risk x KL(p, q))`. 1 without anything at risk.
    """
    if risk <= 0 or events >= risk:
        return 1.0
    share, wanted = events / risk, -math.log(chance) / risk
    low, high = share, 1.0
    for _ in range(50):
        middle = (low + high) / 2.0
        gap = (1.0 - share) * math.log((1.0 - share) / (1.0 - middle)) if middle < 1.0 else math.inf
        gap += share * math.log(share / middle) if share > 0.0 else 0.0
        low, high = (middle, high) if gap < wanted else (low, middle)
    return high


def log10_mixture(logs: Iterable[tuple[float, float]]) -> float:
    """Log10 of a mixture of wealths, from pairs of their shares and natural logs."""
    pairs = [(share, log) for share, log in logs if share > 0.0]
    most = max((log for _, log in pairs), default=0.0)
    total = sum(share * math.exp(log - most) for share, log in pairs)
    return (most + math.log(total)) / math.log(10.0) if total > 0.0 else 0.0

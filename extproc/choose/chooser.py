"""From a pool and an ask to the few candidates among which the store decides."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import msgspec
import xxhash

from extproc.choose import filters, scorers
from extproc.choose.fleet import Endpoint, Pool
from extproc.choose.policies import POLICIES, Ask, Policy, Weights


class Priced(msgspec.Struct, frozen=True, gc=False):
    """One candidate with its cost by local knowledge.

    Attributes:
        endpoint: the endpoint.
        static_ms: cost in milliseconds, shared load left out.
        uncached: prompt tokens it would have to prefill.
    """

    endpoint: Endpoint
    static_ms: float
    uncached: float


class Plan(msgspec.Struct, frozen=True, gc=False):
    """Candidates in tie-break order, and how the store is to weigh the shared load.

    Attributes:
        candidates: at most `Weights.candidates`; empty when no endpoint may serve.
        running_ms: cost of one sequence in flight; each answer that is asked for adds as much.
        output_ms: cost of one output token that is expected of the requests in flight.
        backlog_weight: factor on the backlog's drain time.
        tie_ms: costs this close are equal.
        sticky: whether session pins count.
        eligible: every endpoint that may serve, candidates or not.
        best_cached: the most prompt tokens that any of them is believed to have cached.
    """

    candidates: Sequence[Priced]
    running_ms: float
    output_ms: float
    backlog_weight: float
    tie_ms: float
    sticky: bool
    eligible: Sequence[Endpoint]
    best_cached: float = 0.0


def plan(ask: Ask, pool: Pool, weights: Weights, subset: AbstractSet[str] | None = None) -> Plan:
    """Price the pool's endpoints for `ask` and keep the cheapest.

    Raises:
        KeyError: the pool names a policy that does not exist (configuration is checked before it comes here).
    """
    policy = POLICIES[pool.policy]
    eligible = filters.usable(pool.endpoints, subset)
    priced, best_cached = _price(ask, _ordered(ask, eligible, policy), policy, weights)
    load = weights.load_weight if policy.traded else 1.0
    return Plan(
        candidates=_cheapest(priced, weights.candidates),
        running_ms=load * weights.running_ms * ask.n if policy.running else 0.0,
        output_ms=load * weights.output_ms if policy.running else 0.0,
        backlog_weight=load if policy.backlog else 0.0,
        tie_ms=weights.tie_ms if policy.ties else 0.0,
        sticky=policy.sticky,
        eligible=eligible,
        best_cached=best_cached,
    )


def price_one(ask: Ask, endpoint: Endpoint, pool: Pool, weights: Weights) -> Priced:
    """Price a single endpoint, such as one that a session is pinned to."""
    return _price(ask, [endpoint], POLICIES[pool.policy], weights)[0][0]


def _price(ask: Ask, order: Sequence[Endpoint], policy: Policy, weights: Weights) -> tuple[list[Priced], float]:
    """The endpoints with their costs, and the most prompt tokens that any of them has cached."""
    priced = []
    terms = tuple(policy.terms.values())
    matched, whole = ask.matched_tokens, ask.prompt_tokens
    least = whole
    for position, endpoint in enumerate(order):
        # `Ask.uncached` without its call, which took a fifth of the time where all endpoints hold a hot prefix.
        uncached = whole
        if tokens := matched.get(endpoint.id):
            uncached -= scorers.cached_tokens(tokens, whole, endpoint.block_tokens)
            if uncached < least:
                least = uncached
        static_ms = 0.0
        for term in terms:
            static_ms += term(ask, endpoint, uncached, weights, position)
        priced.append(Priced(endpoint, static_ms, uncached))
    return priced, whole - least


def _ordered(ask: Ask, endpoints: Sequence[Endpoint], policy: Policy) -> Sequence[Endpoint]:
    if policy.order == "turn":
        start = ask.turn % len(endpoints) if endpoints else 0
        return [*endpoints[start:], *endpoints[:start]]
    return _rendezvous(ask.first_block if policy.order == "prefix" else ask.home, endpoints)


def _rendezvous(seed: int, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
    """Highest random weight first: equal seeds rank the endpoints alike, others rank them otherwise.

    An endpoint that joins or leaves moves only its own share, one in n of the seeds, as a ring with endlessly many
    virtual nodes would (Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous", 1996).
    """
    digest = xxhash.xxh3_64_intdigest
    return sorted(endpoints, key=lambda endpoint: digest(endpoint.id.encode(), seed))


def _cheapest(priced: list[Priced], limit: int) -> Sequence[Priced]:
    """Keep `limit` candidates, in the order given.

    Three quarters go to the cheapest by local knowledge, the rest to the least loaded by the engines' own
    gauges: otherwise a prefix that many saturated endpoints hold would hide every idle one from the store.
    """
    if len(priced) <= limit:
        return priced
    spare = limit // 4
    cost = [each.static_ms for each in priced]
    gauge = [each.endpoint.running + each.endpoint.waiting for each in priced]
    by_cost = sorted(range(len(priced)), key=cost.__getitem__)
    keep, rest = by_cost[: limit - spare], sorted(by_cost[limit - spare :])
    keep += sorted(rest, key=gauge.__getitem__)[:spare]
    return [priced[at] for at in sorted(keep)]

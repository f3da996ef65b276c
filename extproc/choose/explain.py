"""One decision taken apart: what was dropped and why, what each candidate cost and of what, and what was picked."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal, Protocol

import msgspec

from extproc.choose import chooser, filters, policies
from extproc.choose.chooser import Plan, Priced
from extproc.choose.fleet import Endpoint, Pool
from extproc.choose.policies import POLICIES, Ask, Rung, Weights
from extproc.rollout.split import By
from extproc.rollout.split import Why as VersionWhy

BEYOND = "beyond_candidates"
"""Why an endpoint that may serve was not weighed: it is not among the `routing.candidates` that the store gets."""

PinState = Literal["none", "new", "honoured", "moved", "unknown"]
"""What became of the session's pin: no session; a session without a pin; its pin won; it lost; it could not be read."""

Why = Literal["cheapest", "tie_order", "least_cost", "pin", "no_endpoint"]
"""Why the pick was picked: nothing costs less; others within `tie_ms` cost less but stand behind it; one of these two
(a past decision knows the load of its pick alone); the session is pinned to it; nothing was, as nothing may serve."""


class Load(Protocol):
    """The shared load of an endpoint: prefill backlog and expected outputs in tokens, sequences in flight."""

    @property
    def backlog_tokens(self) -> float:
        """Prefill work in front of a new request."""
        ...

    @property
    def running(self) -> int:
        """Sequences in flight."""
        ...

    @property
    def output_tokens(self) -> float:
        """Output tokens expected of those."""
        ...


class CandidateCost(msgspec.Struct, frozen=True):
    """One endpoint of the pool, as the decision saw it.

    Attributes:
        endpoint: endpoint id.
        dropped: the filter's reason, or `BEYOND`; empty when it was weighed.
        matched_tokens: the prompt's first tokens that its profile holds.
        uncached_tokens: prompt tokens it would have to prefill.
        terms: parts of the cost in milliseconds, by name; empty when it was dropped. Those of the shared load
            (`backlog`, `running`, `outputs`) are left out where the load is not known, or not counted by the policy.
        cost_ms: their sum; None when it was dropped, or its load is not known.
        predicted_ttft_ms: expected time to the first token; None as for `cost_ms`.
        matched_by: what tells which tokens it holds.
    """

    endpoint: str
    dropped: str
    matched_tokens: float
    uncached_tokens: float
    terms: dict[str, float]
    cost_ms: float | None
    predicted_ttft_ms: float | None
    matched_by: Rung = "estimated"


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request went where it went, or would go. Holds no prompt, session id or tenant.

    Attributes:
        at: when it was decided, seconds since the Unix epoch.
        charge_id: the decision's charge; empty when nothing was decided and only asked for.
        request_id: the request's `x-request-id`; empty when it had none.
        replica: the worker that decided.
        pool: pool that serves the model.
        policy: policy of the pool.
        kind: API of the request.
        flaw: why its body could not be read; empty when it could.
        prompt_tokens: estimated prompt length.
        answers: answers asked for.
        output_tokens: output tokens expected of all answers.
        pin: what became of the session's pin.
        pinned_to: endpoint of that pin; empty when there was none, or a past decision no longer knows.
        pick: endpoint that was picked; empty when none may serve.
        why: why that one.
        tie_ms: costs this close are equal.
        break_out_ms: how much dearer than the cheapest a pinned endpoint may be.
        candidates: every endpoint of the pool: those that were weighed in tie order, then those dropped.
        model: the model by its own name; empty where it has one version.
        version: the version that serves it; empty where there is one.
        version_why: why that version.
        version_by: what it was chosen for.
    """

    at: float
    charge_id: str
    request_id: str
    replica: str
    pool: str
    policy: str
    kind: str
    flaw: str
    prompt_tokens: float
    answers: int
    output_tokens: float
    pin: PinState
    pinned_to: str
    pick: str
    why: Why
    tie_ms: float
    break_out_ms: float
    candidates: list[CandidateCost]
    model: str = ""
    version: str = ""
    version_why: VersionWhy = "weight"
    version_by: By = "nobody"


class Case(msgspec.Struct, frozen=True, gc=False):
    """What a decision is a function of, but for the shared load and the session's pin.

    Attributes:
        ask: what the request asks.
        pool: the pool's snapshot.
        weights: the configured weights.
        subset: `ip:port` of the endpoints that may be picked; None for all.
    """

    ask: Ask
    pool: Pool
    weights: Weights
    subset: AbstractSet[str] | None

    def plan(self) -> Plan:
        """The plan that the decision made of it."""
        return chooser.plan(self.ask, self.pool, self.weights, self.subset)

    def with_pinned(self, plan: Plan, pinned: str) -> Sequence[Priced]:
        """The plan's candidates; before them the pinned endpoint, when it may serve and is not among them."""
        if not pinned or any(each.endpoint.id == pinned for each in plan.candidates):
            return plan.candidates
        extra = [each for each in plan.eligible if each.id == pinned]
        return [*(chooser.price_one(self.ask, each, self.pool, self.weights) for each in extra), *plan.candidates]


def costs(
    case: Case,
    pinned: str,
    load_of: Callable[[str], Load | None],
    predict: Callable[[Endpoint, float, float], float],
) -> list[CandidateCost]:
    """Take the cost of every endpoint apart.

    Args:
        case: the decision's values.
        pinned: endpoint that the session is pinned to; empty without a pin.
        load_of: the shared load of an endpoint by its id; None where it is not known.
        predict: expected milliseconds to the first token, given (endpoint, its uncached tokens, its backlog).
    """
    plan, positions = case.plan(), _positions(case)
    policy = POLICIES[case.pool.policy]
    weighed = []
    for each in case.with_pinned(plan, pinned):
        endpoint = each.endpoint
        position = positions.get(endpoint.id, 0)
        terms = dict(policies.terms(policy, case.ask, endpoint, each.uncached, case.weights, position))
        load = load_of(endpoint.id)
        cost = predicted = None
        if load is not None:
            terms.update(_shared_terms(plan, endpoint, load))
            cost = sum(terms.values())
            predicted = predict(endpoint, each.uncached, load.backlog_tokens)
        weighed.append(_cost(case, endpoint, "", terms, cost, predicted))
    names = {each.endpoint for each in weighed}
    may_serve = {each.id for each in plan.eligible}
    return weighed + [
        _cost(case, endpoint, BEYOND if endpoint.id in may_serve else _reason(case, endpoint), {}, None, None)
        for endpoint in case.pool.endpoints
        if endpoint.id not in names
    ]


def _positions(case: Case) -> Mapping[str, int]:
    """Place of every endpoint that may serve in the order in which the policy prices them."""
    every = msgspec.structs.replace(case.weights, candidates=max(1, len(case.pool.endpoints)))
    plan = chooser.plan(case.ask, case.pool, every, case.subset)
    return {each.endpoint.id: position for position, each in enumerate(plan.candidates)}


def _shared_terms(plan: Plan, endpoint: Endpoint, load: Load) -> Mapping[str, float]:
    """What the store adds, as `state.pick.cost_ms` does."""
    terms = {}
    if plan.backlog_weight:
        terms["backlog"] = load.backlog_tokens / endpoint.rate * 1000 * plan.backlog_weight
    if plan.running_ms:
        terms["running"] = load.running * plan.running_ms
    if plan.output_ms:
        terms["outputs"] = load.output_tokens * plan.output_ms
    return terms


def _reason(case: Case, endpoint: Endpoint) -> str:
    return filters.hard_reason(endpoint, case.subset) or filters.soft_reason(endpoint)


def _cost(
    case: Case,
    endpoint: Endpoint,
    dropped: str,
    terms: dict[str, float],
    cost_ms: float | None,
    predicted_ttft_ms: float | None,
) -> CandidateCost:
    ask, name = case.ask, endpoint.id
    matched = min(ask.held_tokens.get(name, ask.matched_tokens.get(name, 0.0)), ask.prompt_tokens)
    uncached, rung = ask.uncached(endpoint), ask.rung(name)
    return CandidateCost(name, dropped, matched, uncached, terms, cost_ms, predicted_ttft_ms, rung)

"""What is kept of a decision: its outcome for telemetry, and all that it was a function of for `warmpath explain`."""

from collections.abc import Set as AbstractSet

import msgspec

from extproc.choose.chooser import Plan, Priced
from extproc.choose.fleet import Pool
from extproc.choose.policies import Ask
from extproc.config import Config
from extproc.deciding import Asked, Outcome
from extproc.recent import Remembered
from extproc.state.values import Reservation, Reserve


class Made(msgspec.Struct, frozen=True, gc=False):
    """A decision with the values that it was made from, in the order in which they come up."""

    asked: Asked
    ask: Ask
    pool: Pool
    plan: Plan
    reserve: Reserve
    picked: Priced
    reservation: Reservation


class Spans(msgspec.Struct, frozen=True, gc=False):
    """When work on it began, when the store was asked, and when that had answered, in seconds of one clock."""

    began: float
    reserving: float
    ended: float


def outcome_of(made: Made, spans: Spans, predicted_ttft_ms: float) -> Outcome:
    """The decision as telemetry records it."""
    asked, ask, endpoint = made.asked, made.ask, made.picked.endpoint
    cached = ask.cached(endpoint)
    return Outcome(
        pool=made.pool.name,
        policy=made.pool.policy,
        kind=asked.request.kind,
        prompt_tokens=ask.prompt_tokens,
        cached_tokens=cached,
        best_cached_tokens=max(made.plan.best_cached, cached),
        predicted_ttft_ms=predicted_ttft_ms,
        session=_has_session(made),
        pinned=made.reservation.pinned,
        moved=made.reservation.moved,
        flaw=asked.request.flaw,
        local_s=spans.reserving - spans.began - asked.waited_s,
        store_s=spans.ended - spans.reserving,
        tokens_s=asked.waited_s,
        rung=ask.rung(endpoint.id),
    )


def remembered(
    made: Made, config: Config, *, at: float, request_id: str, subset: AbstractSet[str] | None
) -> Remembered:
    """The decision as `explain` finds it again.

    Args:
        made: the decision.
        config: configuration that was in use.
        at: when it was made, seconds since the Unix epoch.
        request_id: `x-request-id` of the request; empty when it had none.
        subset: `ip:port` of the endpoints that could be picked; None for all.
    """
    return Remembered(
        at=at,
        charge_id=made.reserve.charge_id,
        request_id=request_id,
        kind=made.asked.request.kind,
        flaw=made.asked.request.flaw,
        session=_has_session(made),
        ask=made.ask,
        pool=made.pool,
        subset=subset,
        config=config,
        reservation=made.reservation,
        choice=made.asked.choice,
    )


def _has_session(made: Made) -> bool:
    reserve, request = made.reserve, made.asked.request
    # Of a model with versions, a pin that the policy does not honour tells the version alone.
    kept = made.plan.sticky or made.asked.choice is None or bool(request.response or request.previous_response)
    return kept and bool(reserve.pin_key or reserve.next_pin_key)

"""A request that another model answers, and what its decision says of that. Plain functions of values."""

from typing import Final

import msgspec

from extproc.engines.fit import Wanted, fit
from extproc.envoy.contract import VERSION_HEADER, Call, Decision
from extproc.request.model import RouteKind
from extproc.request.shapes import peek

_LONG_S: Final = 1.0
"""A prompt that takes less than this to prefill has drained by itself before anybody could be in its way for long."""


def for_model(call: Call, model: str) -> Call | None:
    """The call as if its client had asked for `model`; None where the body cannot say so."""
    kind = peek(call.path, call.headers, call.body).kind
    if kind is RouteKind.OTHER:
        return None
    fitted = fit(call.body, kind, Wanted(model=model))
    if fitted is None:
        return None
    # A version that its client chose is of the model that it asked for.
    headers = {name: value for name, value in call.headers.items() if name != VERSION_HEADER}
    return msgspec.structs.replace(call, body=fitted.body, headers=headers)


def with_fact(decision: Decision, key: str, value: str | float) -> Decision:
    """The decision with one more value in its metadata."""
    return msgspec.structs.replace(decision, metadata={**decision.metadata, key: value})


def is_undone(decision: Decision, rate: float, now: float) -> bool:
    """Whether a request with a long prompt ended before even an idle endpoint could have prefilled half of it.

    Its tokens wait for nothing any more: an engine refuses a prompt that is too long at once (400), a client
    leaves. Left in the ledger, two such prompts of 180,000 tokens kept a pool of two saturated for 13 s. What
    others had in front of it does not count: a request may be served before them, and work that was done is drained
    by the time that it took.

    Args:
        decision: the request's.
        rate: tokens a second that its endpoint prefills.
        now: by the clock of `Decision.at`.
    """
    uncached = decision.metadata.get("uncached_tokens", 0.0)
    if isinstance(uncached, str) or uncached < _LONG_S * rate:
        return False
    return rate * (now - decision.at) < uncached / 2


def sequences_of(decision: Decision) -> int:
    """Answers that a decision was charged for."""
    value = decision.metadata.get("sequences", 1.0)
    return int(value) if isinstance(value, int | float) else 1

"""What a finished request used of what it took, as far as the access log tells. Plain functions of values."""

from collections.abc import Sequence

import msgspec

from extproc.envoy.contract import Served
from extproc.govern.quota_text import Carried
from extproc.govern.quotas import Correction, Draw, alone
from extproc.telemetry.metrics import GONE

CARRIED = "quota"
"""Key of a decision's metadata with what it took."""
AHEAD = "quota_ahead"
"""The same of what was taken before the body was read."""
AHEAD_BY = "quota_ahead_by"
"""Key of the metadata with the replica that took that."""

_ERROR = 400
_SERVER_ERROR = 500
_TOO_MANY = 429


class Used(msgspec.Struct, frozen=True, gc=False):
    """What a request used.

    Attributes:
        served: it counts as a request.
        tokens: tokens of prompt and answer; -1 when nobody knows.
    """

    served: bool
    tokens: float


def used(served: Served, counted: float) -> Used:
    """What a request used.

    An engine that refuses a prompt (400, 404, 422) generated nothing, but the request was made: it counts, or wrong
    requests would be free. One that had no room (429), failed, or was never reached did nothing for the client. A
    client that left before its answer began may have had its prompt read.

    Args:
        served: the request.
        counted: its output tokens by the bytes of the answer; -1 when they were not counted.
    """
    if 0 < served.status < _ERROR:
        return Used(True, _tokens(served, counted))
    if served.status == 0 and GONE.intersection(served.flags):
        return Used(True, max(0.0, _prompt(served)) if served.destination else 0.0)
    refused = _ERROR <= served.status < _SERVER_ERROR and served.status != _TOO_MANY
    return Used(refused, 0.0)


def refused_undecided(served: Served) -> bool:
    """Whether a request was answered by an error before it was decided, so that no engine has seen it."""
    return not served.charge_id and not served.destination and served.status >= _ERROR


def returned(carried: Carried, *, share: float, own: bool) -> Correction:
    """All that was taken comes back; arguments as in `correction`."""
    back = [msgspec.structs.replace(each, amount=-each.amount) for each in carried.draws]
    return Correction(carried.at, () if carried.local else back, [alone(each, share) for each in back] if own else ())


def _tokens(served: Served, counted: float) -> float:
    output = float(served.output_tokens) if served.output_tokens >= 0 else counted
    if served.prompt_tokens >= 0:
        # Embeddings report a prompt and no output.
        return served.prompt_tokens + max(0.0, output)
    return max(0.0, _prompt(served)) + output if output >= 0 else -1.0


def _prompt(served: Served) -> float:
    """Length of the prompt as the decision estimated it; -1 when it did not."""
    value = served.metadata.get("prompt_tokens")
    return float(value) if isinstance(value, int | float) else -1.0


def correction(carried: Carried, used: Used, *, share: float, own: bool) -> Correction:
    """How limits differ from what was taken of them.

    What a process took of its own share, the shared store knows nothing of: there, all of what was used is missing.

    Args:
        carried: what was taken.
        used: what was used, its tokens known.
        share: see `Take.share`.
        own: this process took it.
    """
    against_taken = _differences(carried.draws, used, taken=True)
    shared = _differences(carried.draws, used, taken=not carried.local)
    return Correction(carried.at, shared, [alone(each, share) for each in against_taken] if own else ())


def _differences(draws: Sequence[Draw], used: Used, *, taken: bool) -> list[Draw]:
    differences = []
    for draw in draws:
        real = used.tokens if draw.unit == "tokens" else float(used.served)
        difference = real - (draw.amount if taken else 0.0)
        if difference:
            differences.append(msgspec.structs.replace(draw, amount=difference))
    return differences

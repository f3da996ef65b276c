"""What a finished request says of the version that served it: from the access log to a sample. No I/O, no clock.

What Envoy 1.40 tells of answers that did not end as they should:

| what the engine did | status | flags | usage |
|---|---|---|---|
| refused the connection, hung up or sent garbage before headers | 503 | `UF`, `UC`, `UPE`; `URX` after retries | none |
| answered 5xx itself | that | none; `URX` after retries | none |
| reset or closed the connection in the middle of the body | 200 | `UPE` | none, even where it was asked for |
| ended its stream in good order before its time | 200 | none | none, even where it was asked for |
| ended it without saying anything | 200 | none | one token, that of the end; or none; or none and no byte |

A stream that ends early in good order looks like a whole one whose client asked for no usage. It is known by usage that
is missing where it is due: in all whole answers and streams of the Responses API, in others where the pools of all
versions have `ask_usage`. In a stream of the Messages API, which opens with usage, a cut leaves the tokens at 0.
"""

from collections.abc import Mapping
from typing import Final

from extproc.config import Config, Model
from extproc.envoy.contract import BRIEF, CONTINUED, EPOCH, MODEL, UNIT, VERSION, Served
from extproc.learner import UNBEGUN, UNREAD_BYTES, engine_ttft_s, number, output_tokens, tells_ttft
from extproc.request.model import RouteKind
from extproc.rollout.evidence import Sample
from extproc.telemetry.metrics import CUT, GONE
from extproc.telemetry.rollout_metrics import VersionOutcome

_OK: Final = 200
_OF_ENGINES: Final = frozenset({401, 403, 404, 429})
"""What clients of a healthy version hardly ever get of an engine: its key, its model's name and its room are not theirs
to choose. Keys, names of models and limits are looked at before an engine is chosen."""
_GENERATES: Final = frozenset({RouteKind.CHAT, RouteKind.COMPLETION, RouteKind.RESPONSES, RouteKind.MESSAGES})
"""APIs whose answers have output tokens."""
_USAGE_UNASKED: Final = frozenset({RouteKind.RESPONSES, RouteKind.MESSAGES})
"""APIs whose streams report usage whether the client asks for it or not."""


def model_of(config: Config, served: Served) -> tuple[str, Model] | None:
    """The model with several versions that served a request, by its own name; None where there is none.

    Its pool must be that of the version that the decision names: the access log comes from outside.
    """
    told, version = str(served.metadata.get(MODEL, "")), served.metadata.get(VERSION)
    if not isinstance(version, str):
        return None
    found = config.models.get(told)
    if found is None:  # A limit's rule goes by the name that the client used.
        told, found = next(((name, each) for name, each in config.models.items() if told in each.aliases), ("", None))
    if found is None or version not in found.versions or found.versions[version].pool != served.pool:
        return None
    return told, found


def usage_due(config: Config, model: Model, served: Served) -> bool:
    """Whether the engine had to report usage, if it gave a whole answer."""
    kind = served.metadata.get("kind")
    if kind not in _GENERATES:
        return False
    if number(served.metadata, "streamed") != 1.0 or kind in _USAGE_UNASKED:
        return True
    # Where one version is asked and another is not, streams of one would look cut, and those of the other whole. A
    # client that refuses usage is rare, and looks cut whatever version it gets.
    pools = [config.pools.get(version.pool) for version in model.versions.values()]
    return all(pool is not None and pool.ask_usage for pool in pools)


def outcome_of(served: Served, *, due: bool) -> VersionOutcome:
    """How a decided request ended for its version; `due` says that a whole answer has usage.

    `neutral` is what no version is to blame for: a bad request, a client that broke the protocol or does not read, an
    answer that was longer than allowed. Want of room is a failure: the baseline under the same load has room, and a
    canary that refuses everybody must not stay for that it is never wrong.
    """
    flags, status = set(served.flags), served.status
    if served.stage:
        return _of_stage(served)
    if flags & GONE:
        return "neutral" if "DPE" in flags else "abandoned"
    if flags & CUT:
        return "broken" if status == _OK else "failed"
    if status == _OK:
        return "broken" if _is_empty(served) or (due and served.output_tokens < 0) else "ok"
    return "failed" if status >= 500 or status in _OF_ENGINES else "neutral"


def _of_stage(served: Served) -> VersionOutcome:
    """The same of a request that a time limit ended."""
    begun = served.status == _OK and served.stage not in UNBEGUN
    if not begun:
        return "failed"
    if served.stage == "request" or served.response_bytes >= UNREAD_BYTES:
        return "neutral"
    return "broken"


def _is_empty(served: Served) -> bool:
    if served.response_bytes <= 0:
        return True
    tokens = output_tokens(served)
    # vLLM counts the token that ends an answer: one that says nothing has one (0.32).
    least = 1.0 if number(served.metadata, BRIEF) == 1.0 else 2.0
    return served.metadata.get("kind") in _GENERATES and 0.0 <= tokens < least


def sample_of(served: Served, endpoint: str, outcome: VersionOutcome, counted: float = -1.0) -> Sample | None:
    """What a decided request says of the version that its decision names; None where it says nothing.

    Args:
        served: the request.
        endpoint: id of the endpoint of the version's pool that answered; empty when none did.
        outcome: how it ended.
        counted: its output tokens by the bytes of the answer; -1 when they were not counted.
    """
    unit = number(served.metadata, UNIT)
    if outcome == "neutral" or not 0.0 <= unit < 1.0 or not isinstance(served.metadata.get(EPOCH), str):
        return None
    if served.destination and not endpoint:
        return None  # An endpoint that is not, or no more, of the version's pool.
    whole = outcome == "ok"
    return Sample(
        version=str(served.metadata.get(VERSION, "")),
        unit=unit,
        uncached_tokens=number(served.metadata, "uncached_tokens"),
        streamed=number(served.metadata, "streamed") == 1.0,
        ttft_s=engine_ttft_s(served) if served.status == _OK and tells_ttft(served) else -1.0,
        tpot_s=tpot_s(served) if whole else -1.0,
        output_tokens=output_tokens(served, counted) if whole else -1.0,
        duration_s=max(0.0, served.duration_s),
        answered=served.status == _OK and outcome != "failed",
        failed=outcome == "failed",
        abandoned=outcome == "abandoned",
        broken=outcome == "broken",
        continued=number(served.metadata, CONTINUED) == 1.0,
    )


def tpot_s(served: Served) -> float:
    """Seconds of each output token after the first; -1 where the answer does not tell.

    From the first byte of the answer to its last, which take the time in the queue both with them. Several answers to
    one request come side by side.
    """
    tokens = output_tokens(served)
    if not tells_ttft(served) or served.ttft_s < 0.0 or tokens < 2.0:
        return -1.0
    return max(0.0, served.duration_s - served.ttft_s) / (tokens - 1.0)


def epoch_of(metadata: Mapping[str, str | float]) -> str:
    """The epoch that a request's version was chosen in; empty without a rollout."""
    epoch = metadata.get(EPOCH)
    return epoch if isinstance(epoch, str) else ""

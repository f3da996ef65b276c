"""What a sidecar's own metrics say of a run: pins given up, and how right its predictions were."""

from collections.abc import Iterable, Mapping, Sequence

import aiohttp
import msgspec

from extproc.engines import prometheus
from extproc.engines.prometheus import Sample
from extproc.errors import StackError

_SESSIONS = "warmpath_sessions_total"
_PREDICTED = "warmpath_predicted_cached_tokens_total"
_CACHED_ERROR = "warmpath_cached_tokens_error_share_bucket"
_TTFT_RATIO = "warmpath_ttft_ratio_bucket"
_TIMEOUT = aiohttp.ClientTimeout(total=10.0)


class Told(msgspec.Struct, frozen=True):
    """What the metrics amount to.

    Attributes:
        moved_sessions: decisions that gave up a session's pin.
        predicted_cached_tokens: prompt tokens that were expected to be found cached, of all decisions together; None
            when none ever were, as by a policy that does not look.
        cached_error: median of |predicted - real| cached tokens by prompt tokens; None when nothing was predicted. Read
            off a histogram, it is known to the width of a bucket, as is what follows.
        ttft_error: median of |predicted - real| TTFT by the real one; None when nothing was predicted.
    """

    moved_sessions: int
    predicted_cached_tokens: float | None
    cached_error: float | None = None
    ttft_error: float | None = None


async def ask(url: str) -> Told:
    """Read a sidecar's metrics page.

    Raises:
        StackError: the page cannot be had.
        EngineError: it cannot be read.
    """
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT, raise_for_status=True) as session,
            session.get(url) as answer,
        ):
            return read(await answer.read())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise StackError(f"sidecar: its metrics could not be read: {error or type(error).__name__}") from error


def read(page: bytes) -> Told:
    """Make sense of the page, all pools together.

    Raises:
        EngineError: a line is malformed.
    """
    samples = prometheus.read(page, (_SESSIONS, _PREDICTED, _CACHED_ERROR, _TTFT_RATIO))
    moved = sum(one.value for one in samples.get(_SESSIONS, ()) if one.labels.get("outcome") == "moved")
    predicted = samples.get(_PREDICTED)
    errors = _observed(samples.get(_CACHED_ERROR, ()))
    ratios = _observed(samples.get(_TTFT_RATIO, ()))
    return Told(
        moved_sessions=round(moved),
        predicted_cached_tokens=sum(one.value for one in predicted) if predicted else None,
        cached_error=_median(errors.items()),
        # The ratio is real / expected, and the error is by the real time.
        ttft_error=_median((abs(1.0 / ratio - 1.0), count) for ratio, count in ratios.items()),
    )


def _observed(samples: Sequence[Sample]) -> Mapping[float, float]:
    """Observations of a histogram by the middle of their bucket; beyond the last bound, by that bound."""
    upto: dict[float, float] = {}
    for one in samples:
        bound = float(one.labels["le"])
        upto[bound] = upto.get(bound, 0.0) + one.value
    middles: dict[float, float] = {}
    below, before = 0.0, 0.0
    for bound, count in sorted(upto.items()):
        middle = below if bound == float("inf") else (below + bound) / 2
        middles[middle] = count - before
        below, before = bound, count
    return middles


def _median(values: Iterable[tuple[float, float]]) -> float | None:
    """The value in the middle of (value, count); None for no counts."""
    ordered = sorted((value, count) for value, count in values if count > 0)
    left = sum(count for _, count in ordered) / 2
    for value, count in ordered:
        left -= count
        if left <= 0:
            return value
    return None

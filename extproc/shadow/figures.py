"""What many results say together: counts, quantiles, and ratios of medians with their intervals. Pure."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from extproc.shadow.compare import Comparison, Side
from extproc.shadow.result import Result

_RESAMPLES: Final = 2_000
_SEED: Final = 20_260_101
"""Of the resamples, so that a report of the same results is the same."""
_AT_ONCE: Final = 2_000_000
"""Values that are resampled at once: 32 MB."""
_Z: Final = 1.959964
"""Quantile 0.975 of the normal distribution: two-sided 95 %."""
_WORST: Final = 10
_FEWEST: Final = 5
"""Pairs below which an interval says nothing."""


class Spread(msgspec.Struct, frozen=True):
    """Number and quantiles of values."""

    number: int
    p10: float
    p50: float
    p90: float


class Share(msgspec.Struct, frozen=True):
    """How often something is so: `number` of `of`, and the 95 % interval of the share (Wilson's)."""

    number: int
    of: int
    low: float
    high: float


class Pairs(msgspec.Struct, frozen=True):
    """A measure of both answers, of those comparisons where both have it.

    Attributes:
        number: of pairs.
        primary: of the client's answers.
        shadow: of the shadow's.
        ratio: median of the shadow by that of the client's; None where that is 0.
        low: lower end of its 95 % interval; None of fewer than five pairs.
        high: upper end.
    """

    number: int
    primary: Spread
    shadow: Spread
    ratio: float | None
    low: float | None
    high: float | None


class Worst(msgspec.Struct, frozen=True):
    """One of the comparisons that are least alike; `excerpts` of both texts where they differ, if they were kept."""

    id: str
    similarity: float
    differs_at: int | None
    characters: tuple[int, int]
    finish: tuple[str, str]
    excerpts: tuple[str, str] | None = None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """All results of one pair of versions.

    Attributes:
        model: the model.
        primary: version that answered clients.
        shadow: version that was compared with it.
        number: of results.
        first: time of the earliest, in seconds since the epoch.
        last: time of the latest.
        outcomes: number of each outcome.
        exact: texts and tool calls the same.
        same_finish: ended for the same reason.
        same_tools: tool calls the same, of those comparisons where either calls tools.
        similarity: of texts, 0 to 1.
        meaning: cosine of embeddings.
        characters_ratio: shadow by client.
        tokens_ratio: shadow by client.
        partial: comparisons whose texts were aligned in part.
        counted: comparisons whose tokens are events of the streams.
        refusals: number by who refused: `both`, `primary`, `shadow`, `neither`.
        flaws: number of each flaw, of both sides.
        finishes: number of each reason, of both sides.
        measures: pairs of `ttft_s`, `tpot_s`, `duration_s`, `tokens`, `characters`.
        worst: comparisons that are least alike, the worst first.
    """

    model: str
    primary: str
    shadow: str
    number: int
    first: float
    last: float
    outcomes: Mapping[str, int]
    exact: Share
    same_finish: Share
    same_tools: Share
    similarity: Spread | None
    meaning: Spread | None
    characters_ratio: Spread | None
    tokens_ratio: Spread | None
    partial: int
    counted: int
    refusals: Mapping[str, int]
    flaws: tuple[Mapping[str, int], Mapping[str, int]]
    finishes: tuple[Mapping[str, int], Mapping[str, int]]
    measures: Mapping[str, Pairs]
    worst: tuple[Worst, ...]


MEASURES: Final[Mapping[str, Callable[[Side], float | None]]] = {
    "ttft_s": lambda side: side.ttft_s,
    "tpot_s": lambda side: side.tpot_s,
    "duration_s": lambda side: side.duration_s,
    "tokens": lambda side: side.tokens,
    "characters": lambda side: side.characters,
}


def figures(results: Sequence[Result]) -> list[Figures]:
    """The figures of each pair of versions, those with most results first."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.model, result.primary, result.shadow), []).append(result)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    return [_figures(group) for _, group in ordered]


def _figures(results: Sequence[Result]) -> Figures:
    every = [result.compared for result in results]
    whole = [one for one in every if one.outcome == "compared"]
    tools = [one for one in whole if one.primary.tools or one.shadow.tools]
    return Figures(
        model=results[0].model,
        primary=results[0].primary,
        shadow=results[0].shadow,
        number=len(results),
        first=min(result.at for result in results),
        last=max(result.at for result in results),
        outcomes=_counts(one.outcome for one in every),
        exact=share(sum(one.exact is True for one in whole), len(whole)),
        same_finish=share(sum(one.same_finish is True for one in whole), len(whole)),
        same_tools=share(sum(one.same_tools is True for one in tools), len(tools)),
        similarity=spread(one.similarity for one in whole),
        meaning=spread(one.meaning for one in whole),
        characters_ratio=spread(one.characters_ratio for one in whole),
        tokens_ratio=spread(one.tokens_ratio for one in whole),
        partial=sum(one.partial for one in whole),
        counted=sum(one.primary.counted or one.shadow.counted for one in whole),
        refusals=_counts(map(_who_refused, whole)),
        flaws=(_counts(one.primary.flaw for one in every), _counts(one.shadow.flaw for one in every)),
        finishes=(_counts(one.primary.finish for one in whole), _counts(one.shadow.finish for one in whole)),
        measures={name: found for name, read in MEASURES.items() if (found := _pairs(whole, read))},
        worst=_worst(results),
    )


def spread(values: Iterable[float | None]) -> Spread | None:
    """Quantiles of those values that there are, between neighbours in proportion; None of none."""
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if not len(known):
        return None
    p10, p50, p90 = (float(value) for value in np.quantile(known, (0.1, 0.5, 0.9)))
    return Spread(len(known), p10, p50, p90)


def share(number: int, of: int) -> Share:
    """A share with the score interval of E. B. Wilson (1927), which holds for few and for extreme ones."""
    if not of:
        return Share(number, of, 0.0, 1.0)
    found, squared = number / of, _Z * _Z
    middle = (found + squared / (2 * of)) / (1 + squared / of)
    half = _Z / (1 + squared / of) * math.sqrt(found * (1 - found) / of + squared / (4 * of * of))
    return Share(number, of, max(0.0, middle - half), min(1.0, middle + half))


def interval(primary: NDArray[np.float64], shadow: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """The 95 % interval of the ratio of medians, by the bootstrap of pairs (percentiles of 2,000 resamples).

    Pairs are drawn, since both answers are to one request: what is long for one is long for the other.
    """
    number = len(primary)
    if number < _FEWEST:
        return None, None
    random, ratios = np.random.default_rng(_SEED), list[NDArray[np.float64]]()
    at_once = max(1, _AT_ONCE // number)
    for start in range(0, _RESAMPLES, at_once):
        drawn = random.integers(0, number, (min(at_once, _RESAMPLES - start), number))
        below = np.median(primary[drawn], axis=1)
        above = np.median(shadow[drawn], axis=1)
        ratios.append(above[below > 0.0] / below[below > 0.0])
    found = np.concatenate(ratios)
    if not len(found):
        return None, None
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)


def _pairs(whole: Sequence[Comparison], read: Callable[[Side], float | None]) -> Pairs | None:
    both = [(read(one.primary), read(one.shadow)) for one in whole]
    known = [(ours, theirs) for ours, theirs in both if ours is not None and theirs is not None]
    if not known:
        return None
    primary, shadow = np.array(known, dtype=np.float64).T
    ours, theirs = spread(primary.tolist()), spread(shadow.tolist())
    assert ours is not None  # noqa: S101 -- there are values
    assert theirs is not None  # noqa: S101
    low, high = interval(primary, shadow)
    return Pairs(len(known), ours, theirs, theirs.p50 / ours.p50 if ours.p50 > 0.0 else None, low, high)


def _who_refused(one: Comparison) -> str:
    match one.primary.refused, one.shadow.refused:
        case True, True:
            return "both"
        case True, False:
            return "primary"
        case False, True:
            return "shadow"
    return "neither"


def _counts(values: Iterable[str]) -> dict[str, int]:
    """Number of each value that is no empty text, the most frequent first."""
    counted = Counter(value for value in values if value)
    return dict(sorted(counted.items(), key=lambda item: (-item[1], item[0])))


def _worst(results: Sequence[Result]) -> tuple[Worst, ...]:
    unlike = [(one.compared.similarity, one) for one in results if one.compared.exact is False]
    unlike.sort(key=lambda found: (found[0] or 0.0, found[1].id))
    return tuple(
        Worst(
            id=one.id,
            similarity=found or 0.0,
            differs_at=one.compared.differs_at,
            characters=(one.compared.primary.characters, one.compared.shadow.characters),
            finish=(one.compared.primary.finish, one.compared.shadow.finish),
            excerpts=_excerpts(one),
        )
        for found, one in unlike[:_WORST]
    )


_BEFORE: Final = 40
_BEHIND: Final = 80


def _excerpts(one: Result) -> tuple[str, str] | None:
    if one.answers is None:
        return None
    at = one.compared.differs_at or 0
    ours, theirs = (text[max(0, at - _BEFORE) : at + _BEHIND] for text in one.answers)
    return ours, theirs

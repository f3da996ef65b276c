"""Numbers out of pages whose writer is not trusted: what is believed, and how samples and JSON values are taken."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from extproc.engines.adapter import MAX_PAGE_BYTES
from extproc.engines.prometheus import Sample
from extproc.errors import EngineError

BELIEVED: Final = 1e15
"""No gauge or counter of an engine goes beyond it; larger values do not even fit the integers they are published as."""

MOST_NAMES: Final = 1024
"""Names of models, adapters and event sources that are taken from one engine: they are published with every scrape."""
LONGEST_NAME: Final = 256
"""Longer names are left out."""

Page = Mapping[str, Sequence[Sample]]
"""Samples of a text page by name; see `prometheus.read`."""


def believed(page: Page, *names: str) -> Iterator[float]:
    """Values of the first of `names` that the page has, without NaN, infinite and absurdly large ones."""
    for name in names:
        if name in page:
            return (sample.value for sample in credible(page[name]))
    return iter(())


def credible(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Samples without those that are NaN, infinite or absurdly large."""
    return (sample for sample in samples if abs(sample.value) <= BELIEVED)


def count(values: Iterable[float]) -> int:
    """Sum as a whole number, at least 0."""
    return max(0, round(sum(values)))


def total(values: Iterable[float]) -> float:
    """Sum of counters, at least 0."""
    return max(0.0, sum(values))


def most(values: Iterable[float]) -> float:
    """The greatest; 0 when there is none, or none above it."""
    return max(0.0, 0.0, *values)


def share(value: float) -> float:
    """A value between 0 and 1."""
    return min(1.0, max(0.0, value))


def whole(sample: Sample, label: str) -> int:
    """A label as a whole number; 0 for a label that is absent, `None`, or anything else."""
    text = sample.labels.get(label, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else 0


def decoded(page: bytes) -> object:
    """A JSON page.

    Raises:
        EngineError: it is too long, or no JSON.
    """
    short(page)
    try:
        return msgspec.json.decode(page)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise EngineError("the page is no JSON") from None


def short(page: bytes) -> None:
    """Raises EngineError for a page that is too long to be read."""
    if len(page) > MAX_PAGE_BYTES:
        raise EngineError(f"the page is longer than {MAX_PAGE_BYTES} bytes", "too_long")


def table(value: object) -> Mapping[str, object]:
    """A JSON object; an empty one for anything else, as engines write null where they have nothing."""
    return value if isinstance(value, dict) else {}


def rows(value: object) -> Sequence[Mapping[str, object]]:
    """The JSON objects of an array; none for anything else."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def amount(row: Mapping[str, object], key: str) -> float:
    """A number of a JSON object, at least 0; 0 where it has none that is believed."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if 0 <= value <= BELIEVED and math.isfinite(value) else 0.0


def named(row: Mapping[str, object], key: str) -> str:
    """A text of a JSON object; empty where it has none, or one that is too long."""
    value = row.get(key)
    return value if isinstance(value, str) and len(value) <= LONGEST_NAME else ""

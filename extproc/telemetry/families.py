"""Metric families: children looked up once for each label set, and never more of them than a cap."""

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

MAX_SERIES = 5000
_OTHER = "other"

_M = TypeVar("_M", bound=MetricWrapperBase)


class Family(Generic[_M]):
    """A metric family whose children are looked up once for each label set, and never grow past a cap."""

    def __init__(self, metric: _M, labels: int) -> None:
        self._metric = metric
        self._labels = labels
        self._children: dict[tuple[str, ...], _M] = {}

    def at(self, *labels: str) -> _M:
        """The child of these label values."""
        child = self._children.get(labels)
        return child if child is not None else self._new(labels)

    def drop(self, *labels: str) -> None:
        """Forget the child of these label values, and its series."""
        if self._children.pop(labels, None) is not None:
            self._metric.remove(*labels)

    def _new(self, labels: tuple[str, ...]) -> _M:
        if len(self._children) >= MAX_SERIES:
            labels = (_OTHER,) * self._labels
        child = self._metric.labels(*labels) if labels else self._metric
        self._children[labels] = child
        return child


class Families:
    """Declares families on one registry, under the names `warmpath_*`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, labels: Sequence[str]) -> Family[Counter]:
        """A family of counters."""
        return Family(Counter(f"warmpath_{name}", text, labels, registry=self._registry), len(labels))

    def gauge(self, name: str, text: str, labels: Sequence[str]) -> Family[Gauge]:
        """A family of gauges."""
        return Family(Gauge(f"warmpath_{name}", text, labels, registry=self._registry), len(labels))

    def histogram(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> Family[Histogram]:
        """A family of histograms with these upper bounds."""
        metric = Histogram(f"warmpath_{name}", text, labels, registry=self._registry, buckets=buckets)
        return Family(metric, len(labels))


class WithoutCreated(Collector):
    """A registry without the `_created` series, which double the page and which the text format has no use for."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric

"""Prometheus text as `prometheus_client` writes it: families, samples, labels."""

from collections.abc import Iterator, Mapping

from extproc.sim.stats import Histogram

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def number(value: float) -> str:
    """Return `value` as Prometheus clients print it."""
    return repr(float(value))


def labelled(**labels: str) -> str:
    """Return a label set with its braces, quotes and line ends in its values escaped."""
    escaped = (
        (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for name, value in labels.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"


def family(name: str, kind: str, text: str) -> Iterator[str]:
    """Yield the two lines that begin a family."""
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def gauge(name: str, text: str, values: Mapping[str, float]) -> Iterator[str]:
    """Yield a gauge; `values` by label set."""
    yield from family(name, "gauge", text)
    for labels, value in values.items():
        yield f"{name}{labels} {number(value)}"


def counter(name: str, text: str, values: Mapping[str, float], started: float | None) -> Iterator[str]:
    """Yield a counter, whose samples end in `_total`, and when it began to count.

    Args:
        name: without `_total`.
        text: its help.
        values: by label set.
        started: seconds since the epoch; None leaves it out, as a client in multiprocess mode does.
    """
    yield from family(f"{name}_total", "counter", text)
    for labels, value in values.items():
        yield f"{name}_total{labels} {number(value)}"
    if started is not None:
        yield from gauge(f"{name}_created", text, dict.fromkeys(values, started))


def histogram(name: str, text: str, values: Mapping[str, Histogram], started: float | None) -> Iterator[str]:
    """Yield a histogram; see `counter`."""
    yield from family(name, "histogram", text)
    for labels, one in values.items():
        inner = labels[1:-1]
        seen = 0
        bounds = (*map(number, one.bounds), "+Inf")
        for bound, count in zip(bounds, one.counts, strict=True):
            seen += count
            yield f'{name}_bucket{{{inner},le="{bound}"}} {number(seen)}'
        yield f"{name}_count{labels} {number(seen)}"
        yield f"{name}_sum{labels} {number(one.total)}"
    if started is not None:
        yield from gauge(f"{name}_created", text, dict.fromkeys(values, started))

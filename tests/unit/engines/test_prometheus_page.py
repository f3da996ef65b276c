"""The text-page reader agrees with the reference implementation, and is strict about lines it was asked for."""

import contextlib
import math
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from extproc.engines.prometheus import MAX_LINE_BYTES, MAX_LINES, MAX_READ_BYTES, MAX_SAMPLES, Sample, read
from extproc.errors import EngineError

_LABEL_NAMES = ("model_name", "engine", "le")
# Python splits lines at more characters than the format does; these must survive inside a label value.
_VALUES = st.text(alphabet=st.one_of(st.sampled_from('\\"\n\r\t{},=# \x0b\x85\u2028é'), st.characters(codec="utf-8")))
_NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


class _Fixed(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


@given(
    rows=st.dictionaries(st.tuples(_VALUES, _VALUES, _VALUES), _NUMBERS, min_size=1, max_size=5),
    open_metrics=st.booleans(),
)
def test_what_the_reference_library_writes_is_read_back(
    rows: dict[tuple[str, str, str], float], open_metrics: bool
) -> None:
    """Every label value and number that prometheus_client can write comes back unchanged, in order."""
    gauge = GaugeMetricFamily("engine_x", "text with \\ and\nnewline", labels=_LABEL_NAMES)
    for labels, value in rows.items():
        gauge.add_metric(list(labels), value)
    other = CounterMetricFamily("engine_xy", "not asked for", value=1)
    registry = CollectorRegistry()
    registry.register(_Fixed([other, gauge]))
    write: Callable[[CollectorRegistry], bytes] = openmetrics.generate_latest if open_metrics else generate_latest
    page = write(registry)

    found = read(page, ["engine_x"])

    assert list(found) == ["engine_x"]
    assert [tuple(sample.labels[name] for name in _LABEL_NAMES) for sample in found["engine_x"]] == list(rows)
    assert all(_same(sample.value, value) for sample, value in zip(found["engine_x"], rows.values(), strict=True))


@pytest.mark.parametrize(
    ("line", "value", "labels"),
    [
        (b"x 1", 1.0, {}),
        (b"x{} 1", 1.0, {}),
        (b'x{a="b",} 1', 1.0, {"a": "b"}),
        (b'  x { a = "b" , c = "d" } 1', 1.0, {"a": "b", "c": "d"}),
        (b'x\t{a="}"}\t2.5e-3', 0.0025, {"a": "}"}),
        (b"x 1.5e+09 1395066363000", 1.5e9, {}),
        (b"x 1\r", 1.0, {}),
        (b'x{a="b"} 3 # {trace_id="z"} 0.5 1', 3.0, {"a": "b"}),
        (b"x +Inf", math.inf, {}),
        (b"x -Inf", -math.inf, {}),
        (rb'x{a="\\n\"\n\q"} 1', 1.0, {"a": '\\n"\n\\q'}),
        (b'x{a="\xff"} 1', 1.0, {"a": "�"}),
    ],
)
def test_forms_of_a_sample_line(line: bytes, value: float, labels: dict[str, str]) -> None:
    """Blanks, trailing commas, timestamps, exemplars, CRLF, infinities and escapes are read as the format says."""
    assert read(b"# HELP x y\n" + line + b"\n", ["x"]) == {"x": [Sample(value, labels)]}


@pytest.mark.parametrize(
    "line",
    [b"x", b"x{", b'x{a="b" 1', b'x{a="b""c"} 1', b'x{a="b}', b"x{a=b} 1", b"x one", b"x 1_0", b'x{a="b"}', b"x{,} 1"],
)
def test_a_malformed_line_of_an_asked_name_is_an_error(line: bytes) -> None:
    """A broken line is refused with its number; the same line under another name is not looked at."""
    page = b"ok 1\n" + line + b"\n"
    with pytest.raises(EngineError, match="line 2"):
        read(page, ["ok", "x"])
    assert read(page, ["ok"]) == {"ok": [Sample(1.0, {})]}


def test_nothing_is_read_behind_the_end_mark() -> None:
    """`# EOF` ends an OpenMetrics page."""
    assert read(b"x 1\n# EOF\nx 2\n", ["x"]) == {"x": [Sample(1.0, {})]}


def test_names_that_begin_alike_are_told_apart() -> None:
    """A name is matched whole: neither a prefix nor a longer name of it counts."""
    assert read(b"x_total 1\nxy 2\nx 3\n", ["x"]) == {"x": [Sample(3.0, {})]}


@pytest.mark.parametrize(
    ("values", "greatest"),
    [((1, 3, 2), 3), ((3, 2, 1), 3), ((1, 2, 3), 3), (("NaN", 1, 2), 2), ((2, "NaN", 1), 2), (("1e9", "2.5e9"), 2.5e9)],
)
def test_of_some_names_only_the_greatest_sample_is_wanted(values: tuple[object, ...], greatest: float) -> None:
    """Some engines add a series for every combination of labels that ever was; labels of the others are not read."""
    page = "".join(f'x{{at="{value}"}} {value}\n' for value in values) + "y 1\n"
    found = read(page.encode(), ["y"], greatest=["x"])
    assert found["x"] == [Sample(greatest, found["x"][0].labels)]
    assert float(found["x"][0].labels["at"]) == greatest
    assert found["y"] == [Sample(1.0, {})]


def test_lines_of_lesser_samples_are_not_looked_at() -> None:
    """A broken one hides nothing; the greatest must be whole."""
    assert read(b"x 2\nx{ 1\n", [], greatest=["x"])["x"] == [Sample(2.0, {})]
    with pytest.raises(EngineError, match="line 2"):
        read(b"x 2\nx{ 3\n", [], greatest=["x"])


def test_a_page_of_very_many_samples_is_refused() -> None:
    """Reading them all would hold up every other engine."""
    assert len(read(b"x 1\n" * MAX_SAMPLES, ["x"])["x"]) == MAX_SAMPLES
    with pytest.raises(EngineError, match="more than"):
        read(b"x 1\n" * (MAX_SAMPLES + 1), ["x"])


def test_a_page_that_would_take_long_to_read_is_refused() -> None:
    """One engine's page must not hold up the others: neither by its lines, nor by labels without end."""
    line = b'x{a="%s"} 1\n'
    assert read(b"y\n" * (MAX_LINES - 1) + b"x 1\n", ["x"]) == {"x": [Sample(1.0, {})]}
    with pytest.raises(EngineError, match="more than"):
        read(b"y\n" * MAX_LINES + b"x 1\n", ["x"])
    for lists in ({"names": ["x"]}, {"names": [], "greatest": ["x"]}):
        assert read(line % (b"b" * (MAX_LINE_BYTES - 10)), **lists)
        with pytest.raises(EngineError, match="line 1 of"):
            read(line % (b"b" * MAX_LINE_BYTES), **lists)
    many = line % (b"b" * 990)
    assert read(many * (MAX_READ_BYTES // len(many)), ["x"])
    with pytest.raises(EngineError, match="more than"):
        read(many * (MAX_READ_BYTES // len(many) + 1), ["x"])
    assert read(many * (MAX_READ_BYTES // len(many) + 1), [], greatest=["x"])


@given(st.lists(st.sampled_from(["\\\\", "\\n", '\\"', "\\q", "n", "q"])))
def test_escapes_are_undone_from_left_to_right(parts: list[str]) -> None:
    """An escaped backslash escapes nothing behind it."""
    plain = {"\\\\": "\\", "\\n": "\n", '\\"': '"'}
    value = "".join(plain.get(part, part) for part in parts)
    assert read(f'x{{a="{"".join(parts)}"}} 1'.encode(), ["x"]) == {"x": [Sample(1.0, {"a": value})]}


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_read_or_refused(page: bytes) -> None:
    """Whatever an engine sends, the reader answers or raises EngineError, nothing else."""
    with contextlib.suppress(EngineError):
        assert set(read(b"x" + page, ["x", ""])) <= {"x", ""}

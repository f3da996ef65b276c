"""Pages of several processes become one valid page that loses nothing."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from extproc.engines.prometheus import read
from extproc.telemetry.metrics import Decided, Finished, Metrics
from extproc.telemetry.pages import merge


def _parsed(page: bytes) -> list[tuple[str, dict[str, str], float]]:
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    ]


def _key(sample: tuple[str, dict[str, str], float]) -> tuple[str, list[tuple[str, str]], float]:
    name, labels, value = sample
    return name, sorted(labels.items()), value


def _worker(requests: int) -> bytes:
    metrics = Metrics("0.1.0")
    for _ in range(requests):
        metrics.decided(Decided("chat", "predicted_ttft", "new", 0.001))
        metrics.finished(Finished("chat", 'e"1\\', "ok", 0.2, 1.0, 10, 5, 2))
    return metrics.page()


def test_each_family_stands_once_and_every_sample_keeps_its_value() -> None:
    """Merging real pages: one HELP and TYPE a family, and exactly the samples of the parts, plus their process."""
    pages = {"worker-0": _worker(2), "worker-1": _worker(5), "keeper": Metrics().page()}
    merged = merge(pages)
    heads = Counter(tuple(line.split()[:3]) for line in merged.decode().splitlines() if line.startswith("#"))
    assert set(heads.values()) == {1}
    expected = [
        (name, labels | {"process": process}, value)
        for process, page in pages.items()
        for name, labels, value in _parsed(page)
    ]
    assert sorted(map(_key, _parsed(merged))) == sorted(map(_key, expected))


def test_types_survive() -> None:
    """Counters, gauges and histograms are still such on the merged page."""
    types = {family.name: family.type for family in text_string_to_metric_families(merge({"a": _worker(1)}).decode())}
    assert types["warmpath_decisions"] == "counter"
    assert types["warmpath_in_flight"] == "gauge"
    assert types["warmpath_decision_seconds"] == "histogram"


@given(st.dictionaries(st.text(), st.integers(0, 3), max_size=3))
def test_any_process_name_is_a_valid_label(processes: dict[str, int]) -> None:
    """Whatever a process is called, the page can be parsed and the name read back."""
    merged = merge({name: b"x %d\n" % value for name, value in processes.items()})
    assert {s.labels["process"]: s.value for s in read(merged, ["x"]).get("x", ())} == processes


def test_a_page_cut_short_loses_its_last_line_alone() -> None:
    """A process that dies while it writes cannot put half a sample on the page."""
    page = b'# HELP x text\n# TYPE x gauge\nx{a="b"} 1\nx{a="c"} 1'
    assert _parsed(merge({"w": page})) == [("x", {"a": "b", "process": "w"}, 1.0)]


def test_samples_without_head_or_labels_are_kept() -> None:
    """Untyped samples, empty braces and names that begin like the family before are put in families of their own."""
    page = b"# TYPE x counter\nx 1\nx_total{} 2\nxy 3\n"
    assert merge({"w": page}) == (b'# TYPE x counter\nx{process="w"} 1\nx_total{process="w"} 2\nxy{process="w"} 3\n')


def test_a_family_of_several_processes_stays_together() -> None:
    """The format wants all lines of a family in one group, those without a head too."""
    page = b"# TYPE x counter\nx 1\nxy 2\n"
    assert [line.partition(b"{")[0] for line in merge({"a": page, "b": page}).splitlines()[1:]] == [
        b"x",
        b"x",
        b"xy",
        b"xy",
    ]


def test_no_pages_make_an_empty_page() -> None:
    """Before any process answered there is nothing to show, and that is valid."""
    assert merge({}) == b""
    assert merge({"w": b""}) == b""

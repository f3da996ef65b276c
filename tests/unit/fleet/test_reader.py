"""Finding out what engine an endpoint is, which page carries its load, and what it tells of itself."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

from extproc.config import EngineKind
from extproc.engines.adapter import Reading
from extproc.engines.detect import all_adapters
from extproc.errors import EngineError
from extproc.fleet.health import Failure
from extproc.fleet.reader import ABOUT_EVERY_S, BETTER_EVERY_S, LOOK_EVERY_S, Reader, Told

_FILES = Path(__file__).parents[1] / "engines" / "pages"
LOADS = "/v1/loads?include=core"
PROMETHEUS = "/prometheus/metrics"


def files(**names: str) -> dict[str, bytes]:
    """Golden pages by a short name of their path."""
    paths = {
        "metrics": "/metrics",
        "models": "/v1/models",
        "version": "/version",
        "sources": "/kv_event_sources",
        "loads": LOADS,
        "get_load": "/get_load",
        "info": "/server_info",
        "prometheus": PROMETHEUS,
    }
    return {paths[path]: (_FILES / name).read_bytes() for path, name in names.items()}


VLLM = files(
    metrics="vllm_0.23.txt",
    models="vllm_0.33_models.json",
    version="vllm_0.33_version.json",
    sources="vllm_0.33_kv_event_sources.json",
)
SGLANG_NEW = files(
    loads="sglang_0.5.23_loads.json", metrics="sglang_0.5.23_metrics.txt", models="sglang_0.5.23_models.json"
)
SGLANG_OLD = files(get_load="sglang_0.5.4_get_load.json")
TENSORRT_NEW = files(
    prometheus="trtllm_1.3_prometheus.txt", metrics="trtllm_1.3_metrics.json", models="trtllm_1.3_models.json"
)
TENSORRT_OLD = files(prometheus="trtllm_1.2_prometheus.txt", metrics="trtllm_1.2_metrics.json")


class Endpoint:
    """Pages by path; what is not there is answered with 404, and a fault instead of a page is raised."""

    def __init__(self, pages: dict[str, bytes]) -> None:
        self.pages: dict[str, bytes | str] = {**pages}
        self.asked: list[str] = []
        self.down = ""

    async def fetch(self, path: str) -> bytes:
        """See `reader.Fetch`."""
        self.asked.append(path)
        page = self.down or self.pages.get(path, "not_found")
        if isinstance(page, str):
            raise EngineError("no page", page)
        return page

    def taken(self) -> list[str]:
        """Paths that were asked for since the last call."""
        asked, self.asked = self.asked, []
        return asked


def reader(configured: EngineKind = "auto") -> Reader:
    """A reader of an endpoint nobody knows."""
    return Reader(all_adapters(), configured)


def loads(reading: Reader, endpoint: Endpoint, times: Iterable[float]) -> list[Told]:
    """One scrape at each of these times."""

    async def all_of_them() -> list[Told]:
        return [await reading.load(endpoint.fetch, at) for at in times]

    return asyncio.run(all_of_them())


def load(reading: Reader, endpoint: Endpoint, at: float = 0.0) -> Told:
    """One scrape."""
    return loads(reading, endpoint, [at])[0]


@pytest.mark.parametrize(
    ("pages", "kind", "page", "running"),
    [
        (VLLM, "vllm", "/metrics", 12),
        ({"/metrics": VLLM["/metrics"]}, "vllm", "/metrics", 12),
        (SGLANG_NEW, "sglang", LOADS, 7),
        ({**SGLANG_NEW, "/v1/models": b"<html>"}, "sglang", LOADS, 7),
        ({"/metrics": SGLANG_NEW["/metrics"]}, "sglang", "/metrics", 7),
        (SGLANG_OLD, "sglang", "/get_load", 3),
        (TENSORRT_NEW, "tensorrt_llm", PROMETHEUS, 9),
        (TENSORRT_OLD, "tensorrt_llm", "/metrics", 4),
        ({**VLLM, "/v1/models": SGLANG_NEW["/v1/models"]}, "vllm", "/metrics", 12),
    ],
    ids=str,
)
def test_the_kind_and_its_best_page_are_found(pages: dict[str, bytes], kind: str, page: str, running: int) -> None:
    """By the owner of its models, and by its pages where that is missing, unknown or wrong."""
    told = load(reader(), Endpoint(pages))
    assert isinstance(told.outcome, Reading)
    assert (told.outcome.kind, told.outcome.page, told.outcome.running) == (kind, page, running)
    assert told.fault == ""


def test_what_was_found_is_remembered() -> None:
    """From the second scrape on, one page is asked for."""
    endpoint, reading = Endpoint(SGLANG_NEW), reader()
    load(reading, endpoint)
    endpoint.taken()
    loads(reading, endpoint, [1.0, 2.0])
    assert endpoint.taken() == [LOADS, LOADS]


def test_nothing_is_taken_out_of_an_engine_that_says_what_it_is() -> None:
    """TensorRT-LLM's records are gone when somebody reads them: they are left alone while another page serves."""
    endpoint = Endpoint(TENSORRT_NEW)
    load(reader(), endpoint)
    assert "/metrics" not in endpoint.asked


def test_each_page_is_asked_for_once_while_looking() -> None:
    """However many kinds of engines have a page of that name."""
    endpoint = Endpoint({"/metrics": b"hello"})
    assert load(reader(), endpoint).outcome is Failure.UNREADABLE
    assert len(endpoint.asked) == len(set(endpoint.asked))


@pytest.mark.parametrize(
    ("configured", "pages", "fault"),
    [
        ("sglang", VLLM, "other_kind"),
        ("vllm", SGLANG_NEW, "other_kind"),
        ("tensorrt_llm", VLLM, "other_kind"),
        ("vllm", TENSORRT_NEW, "other_kind"),
        ("vllm", {}, "not_found"),
        ("auto", {"/metrics": b"hello"}, "other_kind"),
        ("auto", {"/metrics": b"vllm:num_requests_running one\n"}, "malformed"),
        ("auto", {}, "not_found"),
    ],
)
def test_a_page_of_another_kind_is_an_error_with_a_reason(
    configured: EngineKind, pages: dict[str, bytes], fault: str
) -> None:
    """What is configured is not doubted; what cannot be found out is said as plainly as the first page allows."""
    told = load(reader(configured), Endpoint(pages))
    assert (told.outcome, told.fault) == (Failure.UNREADABLE, fault)
    assert told.detail


@pytest.mark.parametrize(("fault", "failure"), [("unreachable", Failure.UNREACHABLE), ("silent", Failure.SILENT)])
def test_an_endpoint_that_is_down_is_asked_once(fault: str, failure: Failure) -> None:
    """No other page would come either."""
    endpoint = Endpoint({})
    endpoint.down = fault
    told = load(reader(), endpoint)
    assert (told.outcome, told.fault, len(endpoint.asked)) == (failure, fault, 1)


def test_another_engine_at_the_address_is_found_out() -> None:
    """After a lost connection everything is looked for anew."""
    endpoint, reading = Endpoint(VLLM), reader()
    load(reading, endpoint)
    endpoint.down = "unreachable"
    assert load(reading, endpoint, 6.0).outcome is Failure.UNREACHABLE
    endpoint.down, endpoint.pages = "", {**SGLANG_NEW}
    kinds = [told.outcome.kind for told in loads(reading, endpoint, [7.0, 8.0]) if isinstance(told.outcome, Reading)]
    assert kinds == ["sglang", "sglang"]
    assert reading.kind == "sglang"


def test_a_page_that_went_away_is_replaced_after_three_failures() -> None:
    """Another version may serve its load elsewhere; one lost page is no reason to look."""
    endpoint, reading = Endpoint(SGLANG_NEW), reader("sglang")
    load(reading, endpoint)
    del endpoint.pages[LOADS]
    outcomes = [told.outcome for told in loads(reading, endpoint, [10.0, 11.0, 12.0, 13.0])]
    assert outcomes[:3] == [Failure.UNREADABLE] * 3
    assert isinstance(outcomes[3], Reading)
    assert outcomes[3].page == "/metrics"


def test_a_better_page_that_comes_later_comes_into_use() -> None:
    """TensorRT-LLM's gauges have no sample before its first request; until then it is the page that reading empties."""
    endpoint, reading = Endpoint(TENSORRT_OLD), reader()
    load(reading, endpoint)
    endpoint.pages.update(TENSORRT_NEW)
    endpoint.taken()
    told = loads(reading, endpoint, [1.0, BETTER_EVERY_S, BETTER_EVERY_S + 1.0])
    pages = [each.outcome.page for each in told if isinstance(each.outcome, Reading)]
    assert pages == ["/metrics", PROMETHEUS, PROMETHEUS]
    assert endpoint.taken() == ["/metrics", PROMETHEUS, PROMETHEUS]


def test_a_better_page_that_does_not_come_costs_nothing_but_its_question() -> None:
    """The page in use is read in the same scrape, and the better one is left alone until it is time again."""
    endpoint, reading = Endpoint(SGLANG_OLD), reader()
    load(reading, endpoint)
    endpoint.taken()
    told = loads(reading, endpoint, [BETTER_EVERY_S, BETTER_EVERY_S + 1.0])
    assert all(isinstance(each.outcome, Reading) for each in told)
    assert endpoint.taken() == [LOADS, "/metrics", "/get_load", "/get_load"]


def test_looking_is_rare_while_it_finds_nothing() -> None:
    """Between two looks one page is asked for, and what it tells is believed at once."""
    endpoint, reading = Endpoint({}), reader()
    load(reading, endpoint)
    assert len(endpoint.taken()) > 2
    loads(reading, endpoint, [1.0, 2.0])
    assert endpoint.taken() == ["/metrics", "/metrics"]
    endpoint.pages = {"/metrics": SGLANG_NEW["/metrics"], LOADS: SGLANG_NEW[LOADS]}
    pages = [told.outcome.page for told in loads(reading, endpoint, [3.0, 4.0]) if isinstance(told.outcome, Reading)]
    assert pages == ["/metrics", LOADS]
    assert LOOK_EVERY_S > 4.0


def about(reading: Reader, endpoint: Endpoint, at: float = 0.0, spread: float = 0.0) -> tuple[list[str], list[str]]:
    """Ask for the slow pages; which were asked for, and what was wrong with them."""
    endpoint.taken()
    described = asyncio.run(reading.about(endpoint.fetch, at, spread))
    return endpoint.taken(), list(described.faults)


def test_slow_pages_are_asked_for_at_the_start_and_then_rarely() -> None:
    """Once the kind is known; again after ten seconds or a little less, and after a restart."""
    endpoint, reading = Endpoint(VLLM), reader()
    assert not reading.about_due(0.0)
    load(reading, endpoint)
    assert reading.about_due(0.0)
    assert about(reading, endpoint) == (["/v1/models", "/version", "/kv_event_sources"], [])
    assert not reading.about_due(ABOUT_EVERY_S - 0.1)
    assert reading.about_due(ABOUT_EVERY_S)
    about(reading, endpoint, 0.0, spread=1.0)
    assert reading.about_due(ABOUT_EVERY_S / 2)
    about(reading, endpoint)
    reading.restarted()
    assert reading.about_due(0.1)


def test_an_engine_whose_load_cannot_be_read_tells_of_itself_all_the_same() -> None:
    """Its models and events are known when its metrics are switched off."""
    endpoint = Endpoint({"/v1/models": VLLM["/v1/models"]})
    for configured in ("auto", "vllm"):
        reading = reader(configured)
        assert load(reading, endpoint).outcome is Failure.UNREADABLE
        assert reading.kind == "vllm"
        assert reading.about_due(0.0)
        described = asyncio.run(reading.about(endpoint.fetch, 0.0, 0.0))
        assert [each.adapters for each in described.abouts] == [("sql-lora",)]


def test_a_slow_page_that_is_not_there_is_no_fault() -> None:
    """Older versions lack some; one that is broken or locked is counted, and the others are read."""
    endpoint, reading = Endpoint(VLLM), reader()
    load(reading, endpoint)
    del endpoint.pages["/kv_event_sources"]
    endpoint.pages |= {"/v1/models": "forbidden", "/version": b"<html>"}
    assert about(reading, endpoint)[1] == ["forbidden", "malformed"]


def test_a_page_that_was_called_otherwise_is_asked_for_by_its_older_name() -> None:
    """Where the newer one is not there; never both."""
    info = (_FILES / "sglang_0.5.4_get_server_info.json").read_bytes()
    for names in (["/server_info"], ["/get_server_info"], ["/server_info", "/get_server_info"]):
        endpoint, reading = Endpoint({**SGLANG_OLD, **dict.fromkeys(names, info)}), reader("sglang")
        load(reading, endpoint)
        asked, faults = about(reading, endpoint)
        assert asked == ["/v1/models", "/server_info", "/get_server_info"][: 2 + ("/server_info" not in names)]
        assert faults == []


def test_slow_pages_of_a_silent_endpoint_are_not_waited_for() -> None:
    """The first that does not come ends it."""
    endpoint, reading = Endpoint(VLLM), reader()
    load(reading, endpoint)
    endpoint.down = "silent"
    assert about(reading, endpoint) == (["/v1/models"], ["silent"])

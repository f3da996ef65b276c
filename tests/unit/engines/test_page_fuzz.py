"""Whatever a page holds, every reader answers with something that can be published, or raises EngineError."""

import contextlib
import json
import math
import re
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.engines.adapter import About, Adapter, Reading
from extproc.engines.detect import all_adapters
from extproc.errors import EngineError

PAGES = Path(__file__).parent / "pages"
ADAPTERS = all_adapters()
_TEXTS = [path.read_text() for path in sorted(PAGES.glob("*.txt"))]
_NAMES = sorted({name for text in _TEXTS for name in re.findall(r"^(\w+:?\w*)\{?", text, re.MULTILINE)})
_LABELS = sorted({name for text in _TEXTS for name in re.findall(r'[{,](\w+)="', text)})
_KEYS = sorted({key for path in PAGES.glob("*.json") for key in re.findall(r'"(\w+)":', path.read_text())})

_NUMBERS = st.one_of(
    st.floats().map(repr), st.integers().map(str), st.sampled_from(["NaN", "+Inf", "-Inf", "1e400", "0x1", "", "1 2"])
)
_PAIRS = st.lists(
    st.tuples(st.sampled_from(_LABELS), st.one_of(st.text(max_size=6), st.integers().map(str))), max_size=4
)


def _line(name: str, labels: list[tuple[str, str]], value: str) -> str:
    inner = ",".join(f'{key}="{label}"' for key, label in labels)
    return f"{name}{{{inner}}} {value}"


_LINES = st.builds(_line, st.sampled_from(_NAMES), _PAIRS, _NUMBERS)
_ANCHORS = ["", "vllm:num_requests_running 3", "sglang:num_running_reqs 3", "trtllm_num_requests_running 3"]
"""What makes a page one of its kind: without it nothing else on the page would be looked at."""
_TEXT_PAGES = st.tuples(st.sampled_from(_ANCHORS), st.lists(_LINES, max_size=12)).map(
    lambda parts: "\n".join([parts[0], *parts[1]]).encode("utf-8", "surrogatepass")
)
_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["zmq", "vllm"])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(_KEYS), inner, max_size=6)),
    max_leaves=20,
)
_COUNTED = ("num_running_reqs", "num_reqs", "numActiveRequests", "page_size", "id", "dp_rank", "kv_events")
_ROWS = st.lists(
    st.dictionaries(
        st.sampled_from([*_COUNTED, *_KEYS]), st.one_of(st.integers(), st.floats(allow_nan=False), _VALUES), max_size=9
    ).map(lambda row: {"id": "m", "num_running_reqs": 1, "num_reqs": 1, "numActiveRequests": 1, **row}),
    max_size=3,
)
_JSON_PAGES = st.one_of(
    _VALUES, _ROWS, st.fixed_dictionaries({"loads": _ROWS}), st.fixed_dictionaries({"data": _ROWS})
).map(lambda value: json.dumps(value).encode())
_ANY_PAGES = st.one_of(_TEXT_PAGES, _JSON_PAGES, st.binary(max_size=200))


def fit_to_publish(told: Reading | About) -> bool:
    """Whether a state made of it can be written, and its numbers make sense."""
    msgspec.msgpack.encode(told)
    numbers = [value for value in msgspec.structs.astuple(told) if isinstance(value, int | float)]
    return all(math.isfinite(value) and 0 <= value < 2**63 for value in numbers)


@pytest.mark.parametrize(("adapter", "path"), [(adapter, path) for adapter in ADAPTERS for path in adapter.load_pages])
@given(page=_ANY_PAGES)
def test_any_page_of_load_is_read_or_refused(adapter: Adapter, path: str, page: bytes) -> None:
    """Numbers that come out are finite, at least 0, and fit into what is published."""
    with contextlib.suppress(EngineError):
        reading = adapter.read(path, page)
        assert fit_to_publish(reading)
        assert reading.kv_usage <= 1.0


@pytest.mark.parametrize(
    ("adapter", "path"), [(adapter, path) for adapter in ADAPTERS for path in chain(*adapter.about_pages)]
)
@given(page=_ANY_PAGES)
def test_any_slow_page_is_read_or_refused(adapter: Adapter, path: str, page: bytes) -> None:
    """The same for what else engines tell."""
    with contextlib.suppress(EngineError):
        assert fit_to_publish(adapter.about(path, page))


@given(name=st.sampled_from([path.name for path in sorted(PAGES.iterdir())]), data=st.data())
def test_a_damaged_page_is_read_or_refused(name: str, data: st.DataObject) -> None:
    """Real pages, cut and with bytes replaced, on every reader of every kind."""
    page = bytearray((PAGES / name).read_bytes()[:6000])
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(page)))
        page[at : at + data.draw(st.integers(0, 20))] = data.draw(st.binary(max_size=8))
    for adapter in ADAPTERS:
        for path in adapter.load_pages:
            with contextlib.suppress(EngineError):
                assert fit_to_publish(adapter.read(path, bytes(page)))
        for path in chain(*adapter.about_pages):
            with contextlib.suppress(EngineError):
                assert fit_to_publish(adapter.about(path, bytes(page)))

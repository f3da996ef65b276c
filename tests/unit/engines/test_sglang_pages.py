"""SGLang's pages: ranks that add up and ranks that are copies, and what is missing or broken."""

import json
from typing import Any

import pytest

from extproc.engines.adapter import Reading
from extproc.engines.kv_values import EventSource
from extproc.engines.sglang import SglangAdapter
from extproc.errors import EngineError

LOADS = "/v1/loads?include=core"


def loads(*ranks: dict[str, Any], **more: Any) -> Reading:
    """`GET /v1/loads` with these ranks."""
    return SglangAdapter().read(LOADS, json.dumps({"loads": ranks, **more}).encode())


def metrics(*lines: str) -> Reading:
    """`GET /metrics` with these lines."""
    return SglangAdapter().read("/metrics", ("\n".join(lines) + "\n").encode())


def series(value: float, **labels: object) -> str:
    """A sample of running requests."""
    inner = ",".join(f'{name}="{label}"' for name, label in labels.items())
    return f"sglang:num_running_reqs{{{inner}}} {value}"


@pytest.mark.parametrize(
    ("lines", "running", "ranks"),
    [
        ([series(3, tp_rank=0), series(3, tp_rank=1), series(2, tp_rank=2)], 3, 1),
        ([series(3, dp_rank=0, tp_rank=0), series(4, dp_rank=1, tp_rank=0)], 7, 2),
        ([series(3, dp_rank=0, pp_rank=0), series(3, dp_rank=0, pp_rank=1), series(5, dp_rank=1)], 8, 2),
        ([series(5, priority=""), series(2, priority=0), series(3, priority=9)], 5, 1),
        ([series(2, priority=0), series(3, priority=9)], 5, 1),
        ([series(2, tp_rank=0), "sglang:num_running_reqs NaN"], 2, 1),
    ],
)
def test_copies_count_once_and_data_parallel_ranks_add_up(lines: list[str], running: int, ranks: int) -> None:
    """All tensor- and pipeline-parallel ranks tell of the same requests; priorities are parts of the whole."""
    reading = metrics(*lines)
    assert (reading.running, reading.ranks) == (running, ranks)


def test_cache_sources_add_up_unless_a_total_is_told() -> None:
    """`total` is the sum of the others."""
    cached = "sglang:cached_tokens_total"
    some = [f'{cached}{{cache_source="device"}} 5', f'{cached}{{cache_source="host"}} 2']
    assert metrics(series(1), *some).prefix_hits == 7
    assert metrics(series(1), *some, f'{cached}{{cache_source="total"}} 7').prefix_hits == 7


def test_the_fullest_rank_counts_and_is_told_exactly() -> None:
    """Usage comes from tokens in use: `token_usage` is rounded, and stands still while short steps are made."""
    full = {"num_running_reqs": 1, "num_used_tokens": 501, "max_total_num_tokens": 100_000, "token_usage": 0.01}
    other = {"num_running_reqs": 1, "dp_rank": 1, "num_used_tokens": 100, "max_total_num_tokens": 100_000}
    assert loads(full, other).kv_usage == 0.00501
    assert loads({"num_running_reqs": 1, "token_usage": 0.25}).kv_usage == 0.25


def test_progress_is_prompt_tokens_and_decoding_steps() -> None:
    """Either of them moves while the engine works."""
    rank = {"num_running_reqs": 1, "total_prefill_uncached_tokens": 1000, "decode_moments": [40, 2, 3, 4, 5, 6]}
    assert loads(rank).tokens == 1040
    assert loads({**rank, "decode_moments": None}).tokens == 1000
    assert loads({**rank, "decode_moments": []}).tokens == 1000


def test_a_rank_that_is_told_twice_counts_once() -> None:
    """The later row holds."""
    assert loads({"dp_rank": 0, "num_running_reqs": 3}, {"dp_rank": 0, "num_running_reqs": 4}).running == 4


@pytest.mark.parametrize(
    "rank",
    [
        {"num_running_reqs": None},
        {"num_running_reqs": "many"},
        {"num_running_reqs": True},
        {"num_running_reqs": -4},
        {"num_running_reqs": 1e300},
        {"num_running_reqs": 10**40},
    ],
)
def test_numbers_that_are_none_count_as_not_told(rank: dict[str, Any]) -> None:
    """Null, texts, negative and absurd numbers."""
    assert loads(rank) == Reading(ranks=1)


@pytest.mark.parametrize(
    ("path", "page", "fault"),
    [
        (LOADS, b"", "malformed"),
        (LOADS, b"[]", "other_kind"),
        (LOADS, b'{"loads": null}', "other_kind"),
        (LOADS, b'{"loads": []}', "malformed"),
        (LOADS, b'{"loads": [null, 3, {"dp_rank": 0}]}', "malformed"),
        (LOADS, b'{"loads": [{"num_running_reqs": NaN}]}', "malformed"),
        (LOADS, b"[" * 100_000, "malformed"),
        (LOADS, b" " * (4 * 1024 * 1024 + 1), "too_long"),
        ("/get_load", b"{}", "other_kind"),
        ("/get_load", b'{"load": 3}', "other_kind"),
        ("/metrics", b"vllm:num_requests_running 1\n", "other_kind"),
        ("/metrics", b"sglang:num_running_reqs NaN\n", "other_kind"),
        ("/metrics", b'sglang:num_running_reqs{tp_rank="0"\n', "malformed"),
        ("/metrics", b'{"detail": "Not Found"}', "other_kind"),
        ("/metrics", b"#" * (4 * 1024 * 1024 + 1), "too_long"),
    ],
)
def test_a_page_that_is_not_sglangs_is_refused(path: str, page: bytes, fault: str) -> None:
    """Broken, foreign and overlong pages say what they are."""
    with pytest.raises(EngineError) as caught:
        SglangAdapter().read(path, page)
    assert caught.value.fault == fault


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        (None, ()),
        ({}, ()),
        ({"publisher": "null", "endpoint_port_base": 5557}, ()),
        ({"publisher": "zmq", "endpoint_port_base": 0}, ()),
        ({"publisher": "zmq", "endpoint_port_base": 70_000}, ()),
        (
            {"publisher": "zmq", "endpoint_host": "10.0.0.9", "endpoint_port_base": 5557, "dp_size": None},
            (EventSource(0, "zmq", "tcp://10.0.0.9:5557"),),
        ),
    ],
)
def test_events_are_found_where_they_are_published(described: object, expected: tuple[EventSource, ...]) -> None:
    """A description without a usable port is none."""
    page = json.dumps({"page_size": 1, "kv_events": described}).encode()
    assert SglangAdapter().about("/server_info", page).sources == expected


def test_other_server_information_is_refused() -> None:
    """TensorRT-LLM has a page of the same name."""
    with pytest.raises(EngineError, match="page_size"):
        SglangAdapter().about("/server_info", b'{"disaggregated_params": {}}')

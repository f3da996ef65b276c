"""TensorRT-LLM's pages: gauges of several processes, records that are taken out by reading, and what is broken."""

import json
from pathlib import Path
from typing import Any

import pytest

from extproc.engines.adapter import About, Reading
from extproc.engines.tensorrt_llm import TensorRtAdapter
from extproc.errors import EngineError

PROMETHEUS = "/prometheus/metrics"
PAGES = Path(__file__).parent / "pages"


def records(*rows: object) -> Reading:
    """`GET /metrics` with these records."""
    return TensorRtAdapter().read("/metrics", json.dumps(rows).encode())


def metrics(*lines: str) -> Reading:
    """`GET /prometheus/metrics` with these lines."""
    return TensorRtAdapter().read(PROMETHEUS, ("\n".join(lines) + "\n").encode())


def test_no_record_since_the_last_call_keeps_the_last() -> None:
    """An engine that made no step tells nothing, which is other than telling zero."""
    assert records() == Reading(kept=True)


def test_the_latest_record_of_each_rank_counts() -> None:
    """Attention-DP ranks add up, and the fullest one's cache counts."""

    def rank(number: int, active: int, used: int) -> dict[str, Any]:
        cache = {"maxNumBlocks": 100, "usedNumBlocks": used, "tokensPerBlock": 64, "reusedBlocks": 1, "missedBlocks": 3}
        return {"numActiveRequests": active, "numQueuedRequests": 1, "attentionDpRank": number, "kvCacheStats": cache}

    reading = records(rank(0, 9, 90), rank(1, 2, 40), rank(0, 3, 30))
    assert reading == Reading(
        running=5,
        waiting=2,
        kv_usage=0.4,
        block_tokens=64,
        kv_blocks=200,
        prefix_queries=512,
        prefix_hits=128,
        ranks=2,
    )


def test_a_record_without_a_cache_is_read() -> None:
    """Optional objects are null, or absent."""
    assert records({"numActiveRequests": 2, "kvCacheStats": None}) == Reading(running=2, ranks=1)
    assert records({"numActiveRequests": 2}) == Reading(running=2, ranks=1)


def test_the_greatest_gauge_of_several_processes_counts() -> None:
    """Series of processes that are gone stay on the page, and all are about one engine."""
    reading = metrics(
        *(f'trtllm_num_requests_running{{pid="{pid}"}} {value}' for pid, value in ((1, 4), (2, 6), (3, "NaN"))),
        'trtllm_kv_cache_used_blocks{pid="1"} 10',
        'trtllm_kv_cache_max_blocks{pid="1"} 40',
    )
    assert reading == Reading(running=6, kv_usage=0.25, kv_blocks=40, lags=True)


def test_request_metrics_without_gauges_are_no_load() -> None:
    """Up to 1.2, and without `enable_iter_perf_stats`, the page exists and says nothing of the load."""
    with pytest.raises(EngineError, match="enable_iter_perf_stats") as caught:
        TensorRtAdapter().read(PROMETHEUS, (PAGES / "trtllm_1.2_prometheus.txt").read_bytes())
    assert caught.value.fault == "not_found"


@pytest.mark.parametrize(
    ("path", "page", "fault"),
    [
        ("/metrics", b"", "other_kind"),
        ("/metrics", b"vllm:num_requests_running 1\n", "other_kind"),
        ("/metrics", b'{"detail":"Not Found"}', "other_kind"),
        ("/metrics", b"[{]", "malformed"),
        ("/metrics", b"[" * 100_000, "malformed"),
        ("/metrics", b'[{"iter": 3}]', "other_kind"),
        ("/metrics", b"[1, null]", "other_kind"),
        ("/metrics", b"[" + b" " * (4 * 1024 * 1024), "too_long"),
        (PROMETHEUS, b"vllm:num_requests_running 1\n", "other_kind"),
        (PROMETHEUS, b"[]", "other_kind"),
        (PROMETHEUS, b"trtllm_num_requests_running one\n", "malformed"),
        (PROMETHEUS, b"#" * (4 * 1024 * 1024 + 1), "too_long"),
    ],
)
def test_a_page_that_is_not_tensorrts_is_refused(path: str, page: bytes, fault: str) -> None:
    """Broken, foreign and overlong pages say what they are."""
    with pytest.raises(EngineError) as caught:
        TensorRtAdapter().read(path, page)
    assert caught.value.fault == fault


def test_server_information_that_says_nothing_changes_nothing() -> None:
    """Older servers have it for disaggregation alone."""
    assert TensorRtAdapter().about("/server_info", b"{}") == About()

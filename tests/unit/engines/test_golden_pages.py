"""Pages of every version in the field, in the names and shapes that it writes, decoded to exact values."""

from itertools import chain
from pathlib import Path

import pytest

from extproc.engines.adapter import About, Adapter, Reading
from extproc.engines.kv_values import EventSource
from extproc.engines.sglang import SglangAdapter
from extproc.engines.tensorrt_llm import TensorRtAdapter
from extproc.engines.vllm import VllmAdapter

PAGES = Path(__file__).parent / "pages"
LOADS = "/v1/loads?include=core"
PROMETHEUS = "/prometheus/metrics"

VLLM = {
    "vllm_0.8.txt": Reading(
        running=5,
        waiting=2,
        kv_usage=0.4375,
        block_tokens=16,
        kv_blocks=27000,
        started_at=1742000000.25,
        prefix_queries=9000.0,
        prefix_hits=3000.0,
        prefix_caching=True,
        tokens=10200.0,
        ranks=1,
        hash_algo="builtin",
    ),
    "vllm_0.9.txt": Reading(
        running=6,
        kv_usage=0.125,
        block_tokens=16,
        kv_blocks=27500,
        started_at=1750000000.5,
        prefix_queries=8000.0,
        prefix_hits=2000.0,
        prefix_caching=True,
        tokens=8700.0,
        ranks=1,
        hash_algo="builtin",
    ),
    "vllm_0.11.txt": Reading(
        running=7,
        waiting=1,
        kv_usage=0.5,
        block_tokens=16,
        kv_blocks=60000,
        prefix_queries=12000.0,
        prefix_hits=6000.0,
        prefix_caching=True,
        tokens=12700.0,
        ranks=2,
        max_adapters=1,
        hash_algo="sha256",
    ),
    "vllm_0.12.txt": Reading(
        block_tokens=16,
        kv_blocks=31000,
        started_at=1764000000.0,
        prefix_queries=640.0,
        prefix_hits=320.0,
        prefix_caching=True,
        tokens=704.0,
        ranks=1,
        hash_algo="sha256",
    ),
    "vllm_0.23.txt": Reading(
        running=12,
        waiting=4,
        kv_usage=0.875,
        block_tokens=32,
        kv_blocks=16000,
        started_at=1777000000.75,
        prefix_queries=20000.0,
        prefix_hits=15000.0,
        prefix_caching=True,
        tokens=23000.0,
        ranks=1,
        active_adapters=("law", "sql"),
        max_adapters=4,
        hash_algo="sha256_cbor",
    ),
    "vllm_0.33.txt": Reading(
        running=2,
        kv_usage=0.0625,
        block_tokens=16,
        kv_blocks=80000,
        started_at=1795000000.0,
        asleep=True,
        prefix_queries=6144.0,
        prefix_hits=1024.0,
        prefix_caching=True,
        tokens=6294.0,
        ranks=2,
        hash_algo="sha256_cbor",
    ),
}
SGLANG = {
    ("sglang_0.5.4_metrics.txt", "/metrics"): Reading(
        running=3,
        waiting=1,
        kv_usage=0.25,
        prefix_queries=12000.0,
        prefix_hits=4000.0,
        tokens=12900.0,
        ranks=1,
        lags=True,
    ),
    ("sglang_0.5.9_metrics.txt", "/metrics"): Reading(
        running=8,
        kv_usage=0.5,
        block_tokens=64,
        prefix_queries=50000.0,
        prefix_hits=20000.0,
        tokens=54000.0,
        kv_tokens=131072,
        ranks=1,
        lags=True,
    ),
    ("sglang_0.5.14_metrics.txt", "/metrics"): Reading(
        running=7,
        waiting=3,
        kv_usage=0.75,
        block_tokens=16,
        prefix_queries=30000.0,
        prefix_hits=10000.0,
        tokens=32500.0,
        kv_tokens=262144,
        ranks=2,
        lags=True,
    ),
    ("sglang_0.5.23_metrics.txt", "/metrics"): Reading(
        running=7,
        waiting=2,
        kv_usage=0.625,
        block_tokens=32,
        prefix_queries=80000.0,
        prefix_hits=31500.0,
        tokens=86000.0,
        kv_tokens=262144,
        ranks=1,
        max_adapters=8,
        lags=True,
    ),
    ("sglang_0.5.4_get_load.json", "/get_load"): Reading(running=3, waiting=1, ranks=1),
    ("sglang_0.5.14_get_load.json", "/get_load"): Reading(running=7, waiting=3, ranks=2),
    ("sglang_0.5.9_loads.json", LOADS): Reading(running=8, kv_usage=0.5, version="0.5.9", kv_tokens=131072, ranks=1),
    ("sglang_0.5.14_loads.json", LOADS): Reading(
        running=7, waiting=3, kv_usage=0.75, version="0.5.14", kv_tokens=262144, ranks=2
    ),
    ("sglang_0.5.23_loads.json", LOADS): Reading(
        running=7, waiting=2, kv_usage=0.625, version="0.5.23", tokens=50500.0, kv_tokens=262144, ranks=1
    ),
}
TENSORRT = {
    ("trtllm_1.2_metrics.json", "/metrics"): Reading(
        running=4,
        waiting=2,
        kv_usage=0.125,
        block_tokens=32,
        kv_blocks=4000,
        prefix_queries=38400.0,
        prefix_hits=9600.0,
        ranks=1,
    ),
    ("trtllm_1.3_metrics.json", "/metrics"): Reading(
        running=7,
        waiting=1,
        kv_usage=0.25,
        block_tokens=32,
        kv_blocks=8000,
        prefix_queries=76800.0,
        prefix_hits=19200.0,
        ranks=2,
    ),
    ("trtllm_1.3_prometheus.txt", PROMETHEUS): Reading(
        running=9,
        waiting=3,
        kv_usage=0.375,
        block_tokens=32,
        kv_blocks=8000,
        prefix_queries=64000.0,
        prefix_hits=16000.0,
        tokens=73000.0,
        lags=True,
    ),
}
LOAD_PAGES: list[tuple[Adapter, str, str, Reading]] = [
    *((VllmAdapter(), name, "/metrics", reading) for name, reading in VLLM.items()),
    *((SglangAdapter(), name, path, reading) for (name, path), reading in SGLANG.items()),
    *((TensorRtAdapter(), name, path, reading) for (name, path), reading in TENSORRT.items()),
]

VLLM_SOURCES = (
    EventSource(0, "zmq", "tcp://*:5557", "tcp://*:6557", "kv@10.0.0.1:8000@llama-8b"),
    EventSource(1, "zmq", "tcp://*:5558", "", "kv@10.0.0.1:8000@llama-8b"),
)
ABOUT_PAGES: list[tuple[Adapter, str, str, About]] = [
    (
        VllmAdapter(),
        "vllm_0.33_models.json",
        "/v1/models",
        About(models=("llama-8b", "llama-8b-alias"), adapters=("sql-lora",)),
    ),
    (VllmAdapter(), "vllm_0.33_version.json", "/version", About(version="0.33.0")),
    (VllmAdapter(), "vllm_0.33_kv_event_sources.json", "/kv_event_sources", About(sources=VLLM_SOURCES)),
    (SglangAdapter(), "sglang_0.5.23_models.json", "/v1/models", About(models=("qwen3-8b",), adapters=("sql",))),
    (
        SglangAdapter(),
        "sglang_0.5.4_get_server_info.json",
        "/get_server_info",
        About(version="0.5.4", sources=(), block_tokens=1, kv_tokens=131072, ranks=1, prefix_caching=True),
    ),
    (
        SglangAdapter(),
        "sglang_0.5.9_server_info.json",
        "/server_info",
        About(
            version="0.5.9",
            sources=(),
            block_tokens=64,
            kv_tokens=131072,
            ranks=1,
            max_adapters=8,
            prefix_caching=True,
        ),
    ),
    (
        SglangAdapter(),
        "sglang_0.5.14_server_info.json",
        "/server_info",
        About(
            version="0.5.14",
            sources=(
                EventSource(0, "zmq", "tcp://*:5557", "", "kv-events"),
                EventSource(1, "zmq", "tcp://*:5558", "", "kv-events"),
            ),
            block_tokens=16,
            kv_tokens=262144,
            ranks=2,
            prefix_caching=False,
        ),
    ),
    (
        SglangAdapter(),
        "sglang_0.5.23_server_info.json",
        "/server_info",
        About(
            version="0.5.23",
            sources=(EventSource(0, "zmq", "tcp://*:5557", "tcp://*:6557", ""),),
            block_tokens=32,
            kv_tokens=262144,
            ranks=1,
            prefix_caching=True,
        ),
    ),
    (
        TensorRtAdapter(),
        "trtllm_1.3_models.json",
        "/v1/models",
        About(
            models=("llama-8b",),
            adapters=(),
            sources=(EventSource(0, "drain", "/kv_cache_events"),),
            hash_algo="v1_block_key",
        ),
    ),
    (TensorRtAdapter(), "trtllm_1.3_version.json", "/version", About(version="1.3.0rc27")),
    (TensorRtAdapter(), "trtllm_1.2_server_info.json", "/server_info", About()),
    (
        TensorRtAdapter(),
        "trtllm_1.3_server_info.json",
        "/server_info",
        About(block_tokens=64, hash_algo="v2_sha256_64"),
    ),
]


@pytest.mark.parametrize(("adapter", "name", "path", "reading"), LOAD_PAGES, ids=[page[1] for page in LOAD_PAGES])
def test_a_page_of_load_is_read_exactly(adapter: Adapter, name: str, path: str, reading: Reading) -> None:
    """Every number that a version tells is read, and nothing that it does not tell is made up."""
    assert path in adapter.load_pages
    assert adapter.read(path, (PAGES / name).read_bytes()) == reading


@pytest.mark.parametrize(("adapter", "name", "path", "about"), ABOUT_PAGES, ids=[page[1] for page in ABOUT_PAGES])
def test_a_slow_page_is_read_exactly(adapter: Adapter, name: str, path: str, about: About) -> None:
    """Models, adapters, versions, event sources and block sizes, by the page that tells them."""
    assert path in chain(*adapter.about_pages)
    assert adapter.about(path, (PAGES / name).read_bytes()) == about


def test_every_golden_page_is_read_by_a_test() -> None:
    """A page that nobody reads proves nothing."""
    read = {name for _, name, *_ in LOAD_PAGES} | {name for _, name, *_ in ABOUT_PAGES}
    assert {path.name for path in PAGES.iterdir()} == read | {"vllm_0.32.txt", "trtllm_1.2_prometheus.txt"}
